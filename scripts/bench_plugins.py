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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.timing import copy_bandwidth, graph_seconds, machine  # noqa: E402
from plugins.topk_router import op  # noqa: E402
from plugins.topk_router.reference import route  # noqa: E402

Peer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
ROUTERS = {
    "deepseek_r1": (256, 8, 4, 8, 2.5),
    "kimi_k2": (384, 1, 1, 8, 2.827),
    "glm_4.5": (160, 1, 1, 8, 2.5),
}
TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
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
    bandwidth = copy_bandwidth(1 << 30)
    configs = list(ROUTERS)[:1] if options.quick else list(ROUTERS)
    rows = []
    for name in configs:
        for tokens in TOKENS:
            rows.append(router_row(name, tokens, bandwidth, options.quick, notes))
            print(line(rows[-1]), flush=True)
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
    """One configuration at one batch."""
    experts, *config = ROUTERS[name]
    logits, bias = torch.randn(tokens, experts, device="cuda"), torch.randn(experts, device="cuda") * 0.1
    weights, indices = route(logits, bias, *config)
    out = torch.full_like(weights, torch.nan), torch.full_like(indices, -1, dtype=torch.int32)
    row: dict[str, Any] = {"plugin": "topk_router", "model": name, "tokens": tokens}
    for mode in ("ours", "overlap"):
        row[f"{mode}_us"] = micros(lambda o=mode == "overlap": op.launch(logits, bias, *out, *config, overlap=o))
    wrong = (out[1].sort().values != indices.sort().values).any(dim=1)
    row |= {"error": float((out[0] - weights)[~wrong].abs().max() / weights.abs().max()), "tokens_that_differ": int(wrong.sum())}
    row["eager_us"] = micros(lambda: route(logits, bias, *config), calls=2)
    if not quick and name == next(iter(ROUTERS)):
        compiled = torch.compile(route, dynamic=False)
        row["compile_us"] = micros(lambda: compiled(logits, bias, *config), calls=2)
    peers = {}
    for peer, call in router_peers(logits, bias, experts, *config).items():
        try:
            found = call()[1].long().sort().values
            peers[peer] = micros(call)
            if differ := int((found != indices.sort().values).any(dim=1).sum()):
                notes.append(f"{peer} at {name}, {tokens} tokens: {differ} tokens with other experts")
        except (RuntimeError, AttributeError, ImportError, ValueError, TypeError, NotImplementedError) as error:
            notes.append(f"{peer} at {name}: {str(error).strip().splitlines()[0][:140]}")
    best = min(peers, key=peers.get, default=None)
    moved = logits.numel() * 4 + weights.numel() * 8
    floor = micros(lambda: torch.cuda._sleep(0))
    limit = {"floor_us": floor, "limit_us": round(floor + moved / bandwidth * 1e6, 2)}
    return {**row, "peers": peers, "peer": best, "peer_us": peers.get(best), **limit}


def router_peers(logits: Tensor, bias: Tensor, experts: int, *config: Any) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
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


def micros(call: Callable[[], Any], calls: int = IN_A_GRAPH) -> float:
    """Microseconds of one call among several in a graph."""
    return round(graph_seconds([call] * calls) * 1e6, 2)


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    peers = "  ".join(f"{name} {time:.2f}" for name, time in row["peers"].items())
    ours = f"ours {row['ours_us']:6.2f}  overlap {row['overlap_us']:6.2f}  eager {row['eager_us']:7.2f}"
    compiled = f"  compile {row['compile_us']:7.2f}" if "compile_us" in row else ""
    tail = (
        f"  limit {row['limit_us']:.2f}, floor {row['floor_us']:.2f}  error {row['error']:.1e}, {row['tokens_that_differ']} differ"
    )
    return f"{row['plugin']} {row['model']:12s} {row['tokens']:6d}  {ours}{compiled}  {peers}{tail}"


if __name__ == "__main__":
    sys.exit(main())
