#!/usr/bin/env python3
"""R1's kernels on this GPU beside eager torch, torch.compile, every peer that loads, and the limit, in one run.

    python scripts/bench_plugins.py [--quick] [--json FILE] [--peers DIR]

Times are medians of CUDA graph replays, in microseconds. `--peers DIR`: extension libraries (*.so) of vLLM and sgl-kernel to
load; flashinfer is taken if it can be imported. `overlap` is ours with programmatic dependent launch, `floor` an empty kernel,
`limit` the floor plus the bytes that must move over the measured copy bandwidth. Every answer is compared with the reference's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.router_gemm import op as gemm  # noqa: E402
from plugins.timing import copy_bandwidth, graph_seconds, machine  # noqa: E402
from plugins.topk_router import op as router  # noqa: E402
from plugins.topk_router.reference import route  # noqa: E402

Peers = dict[str, Callable[[], Any]]
ROUTERS = {
    "deepseek_r1": (256, 8, 4, 8, 2.5),
    "kimi_k2": (384, 1, 1, 8, 2.827),
    "glm_4.5": (160, 1, 1, 8, 2.5),
}
TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
HIDDEN, EXPERTS, GEMM_TOKENS = 7168, 256, (1, 2, 4, 8, 16, 32, 64)
IN_A_GRAPH = 20


def main() -> int:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="DeepSeek-R1 only, no torch.compile")
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    parser.add_argument("--peers", type=Path, help="folder of extension libraries to compare with")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this benchmark needs one.")
    notes = [note for library in sorted(options.peers.glob("*.so")) if (note := load(library))] if options.peers else []
    bandwidth = copy_bandwidth(700 << 20)
    configs = list(ROUTERS)[:1] if options.quick else list(ROUTERS)
    rows = []
    for row in chain(
        (router_row(name, tokens, bandwidth, options.quick, notes) for name in configs for tokens in TOKENS),
        (gemm_row(tokens, bandwidth, notes) for tokens in GEMM_TOKENS),
    ):
        rows.append(row)
        print(line(row), flush=True)
    print("\n".join(sorted(set(notes))))
    if options.json:
        result = {"rows": rows, "copy_gb_per_s": round(bandwidth / 1e9), "notes": sorted(set(notes)), **machine()}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def load(library: Path) -> str:
    """Nothing, or why the library does not load here."""
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library.name}: {str(error).splitlines()[0]}"
    return ""


def router_row(name: str, tokens: int, bandwidth: float, quick: bool, notes: list[str]) -> dict[str, Any]:
    """Routing of one configuration at one batch."""
    experts, *config = ROUTERS[name]
    logits, bias = torch.randn(tokens, experts, device="cuda"), torch.randn(experts, device="cuda") * 0.1
    weights, indices = route(logits, bias, *config)
    out = torch.full_like(weights, torch.nan), torch.full_like(indices, -1, dtype=torch.int32)
    row: dict[str, Any] = {"plugin": "topk_router", "model": name, "tokens": tokens}
    row |= ours(lambda overlap: router.launch(logits, bias, *out, *config, overlap=overlap))
    chosen = indices.sort().values
    wrong = (out[1].sort().values != chosen).any(dim=1)
    row |= {"error": float((out[0] - weights)[~wrong].abs().max() / weights.abs().max()), "tokens_that_differ": int(wrong.sum())}
    row["eager_us"] = micros(lambda: route(logits, bias, *config), calls=2)
    if not quick and name == next(iter(ROUTERS)):
        compiled = torch.compile(route, dynamic=False)
        row["compile_us"] = micros(lambda: compiled(logits, bias, *config), calls=2)

    def same(found: tuple[Tensor, Tensor]) -> bool:
        return bool((found[1].long().sort().values == chosen).all())

    row |= peers_of(f"topk_router {name} {tokens}", router_peers(logits, bias, *config), same, notes)
    return row | limit(logits.numel() * 4 + weights.numel() * 8, bandwidth)


def gemm_row(tokens: int, bandwidth: float, notes: list[str]) -> dict[str, Any]:
    """Router logits of R1 at one batch, with weights in L2 and (cold) not."""
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    wanted, logits = x.double() @ weight.double().t(), torch.full((tokens, EXPERTS), torch.nan, device="cuda")

    def error(found: Tensor) -> float:
        return float((found.double() - wanted).norm() / wanted.norm())

    def call(overlap: bool) -> None:
        gemm.launch(x, weight, logits, overlap)

    row: dict[str, Any] = {"plugin": "router_gemm", "model": "deepseek_r1", "tokens": tokens} | ours(call)
    row |= {"cold_us": micros(lambda: call(False), flush=True), "error": error(logits)}
    row["eager_us"] = micros(lambda: x.float() @ weight.float().t())
    row |= peers_of(f"router_gemm {tokens}", gemm_peers(x, weight), lambda found: error(found) < 1e-5, notes)
    return row | limit(x.numel() * 2 + weight.numel() * 2 + wanted.numel() * 4, bandwidth)


def ours(call: Callable[[bool], Any]) -> dict[str, float]:
    """Without and with programmatic dependent launch."""
    return {"ours_us": micros(lambda: call(False)), "overlap_us": micros(lambda: call(True))}


def peers_of(where: str, calls: Peers, right: Callable[[Any], bool], notes: list[str]) -> dict[str, Any]:
    """Times of the peers that run, and the best; the others leave a note."""
    times = {}
    for name, call in calls.items():
        try:
            if not right(call()):
                notes.append(f"{where}: {name} gives another answer")
            times[name] = micros(call)
        except (RuntimeError, AttributeError, ImportError, ValueError, TypeError, NotImplementedError) as error:
            notes.append(f"{where.rsplit(' ', 1)[0]}: {name} did not run: {str(error).strip().splitlines()[0][:140]}")
    best = min(times, key=times.get, default=None)
    return {"peers": times, "peer": best, "peer_us": times.get(best)}


def limit(moved: int, bandwidth: float) -> dict[str, float]:
    """An empty kernel, and that plus the bytes that must move (from L2 they may move faster)."""
    floor = micros(lambda: torch.cuda._sleep(0))
    return {"floor_us": floor, "limit_us": round(floor + moved / bandwidth * 1e6, 2)}


def router_peers(logits: Tensor, bias: Tensor, *config: Any) -> Peers:
    """Calls of other implementations; each may fail."""
    n_group, topk_group, top_k, scale = config

    def flashinfer() -> tuple[Tensor, Tensor]:
        from flashinfer.fused_moe import fused_topk_deepseek

        out = torch.empty(len(logits), top_k, device="cuda"), torch.empty(len(logits), top_k, dtype=torch.int32, device="cuda")
        fused_topk_deepseek(logits, bias, n_group, topk_group, top_k, scale, *out, False)
        return out

    ops = torch.ops
    return {
        "flashinfer": flashinfer,
        "vllm": lambda: ops._moe_C.grouped_topk(logits, n_group, topk_group, top_k, True, scale, bias, 1),
        "sgl": lambda: ops.sgl_kernel.moe_fused_gate(logits, bias, n_group, topk_group, top_k, 0, scale, True),
    }


def gemm_peers(x: Tensor, weight: Tensor) -> Peers:
    """cuBLAS, and kernels for up to 16 tokens."""
    out = torch.empty(len(x), len(weight), device="cuda")

    def trtllm() -> Tensor:
        import trtllm_kernel  # noqa: F401  registers torch.ops.trtllm

        return torch.ops.trtllm.dsv3_router_gemm_op(x, weight.t(), None, torch.float32)

    def sgl() -> Tensor:
        torch.ops.sgl_kernel.dsv3_router_gemm(out, x, weight)
        return out

    cublas: Peers = {"cublas": lambda: torch.mm(x, weight.t(), out_dtype=torch.float32)}
    return cublas | ({"trtllm": trtllm, "sgl": sgl} if len(x) <= 16 else {})


def micros(call: Callable[[], Any], calls: int = IN_A_GRAPH, flush: bool = False) -> float:
    """Microseconds of one call among several in a graph."""
    return round(graph_seconds([call] * calls, flush=flush) * 1e6, 2)


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    times = {"ours": "ours_us", "overlap": "overlap_us", "cold": "cold_us", "eager": "eager_us", "compile": "compile_us"}
    shown = [f"{name} {row[key]:.2f}" for name, key in times.items() if key in row]
    shown += [f"{name} {time:.2f}" for name, time in row["peers"].items()]
    differ = f", {row['tokens_that_differ']} differ" if "tokens_that_differ" in row else ""
    tail = f"limit {row['limit_us']:.2f}, floor {row['floor_us']:.2f}, error {row['error']:.1e}{differ}"
    return f"{row['plugin']} {row['model']:12s} {row['tokens']:6d}  {'  '.join(shown)}  {tail}"


if __name__ == "__main__":
    sys.exit(main())
