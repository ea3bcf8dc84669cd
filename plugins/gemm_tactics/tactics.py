"""The search, and the file that it leaves: for each shape and device the fastest cuBLASLt algorithm, or form of our own kernel.

    python -m plugins.gemm_tactics.tactics FILE [--quick]      # on the GPU; R1's products, decoding and prefill

The library's own choice (its first candidate) and torch's product are timed beside `CANDIDATES` and, up to 64 tokens, the forms of
`router_gemm`'s kernel, each checked against float32 first; what is kept is faster than torch's by more than the spread of a
measurement. Weights come from memory, not from the L2, as a layer's do when its turn comes. A file is used on the device and with
the library version that it names; anywhere else, and for other shapes, torch's product is taken. Tokens are the sizes of decode
batches that engines capture, and of prompts' chunks.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from plugins.gemm_tactics import cublaslt
from plugins.router_gemm import op as ours
from plugins.timing import graph_seconds, machine

__all__ = ["FILE", "SHAPES", "Kernel", "find", "library", "multiply", "products", "search"]

FILE, VERSION = Path(__file__).with_name("tactics.json"), 1
SHAPES = {
    "qkv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o_proj": (7168, 16384),
    "shared gate/up": (4096, 7168),
    "shared down": (7168, 2048),
    "dense gate/up": (36864, 7168),
    "dense down": (7168, 18432),
    "lm_head": (129280, 7168),
}
"""R1's products [O, K] beside experts and router."""
TOKENS, QUICK_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096), (1, 64)
COLD_BYTES = 256 << 20
"""More than the L2 holds: weights that are read in turn."""
CANDIDATES, FIRST, CALLS, REPLAYS = 24, 5, 4, 8
"""Candidates timed once; of those the best FIRST and the library's own again, with four times the replays."""
SPREAD, MOST_ERROR = 0.02, 1e-2


class Kernel(NamedTuple):
    """Ours for few tokens."""

    tiles: int
    """Of 16 outputs that a CTA takes."""


KERNELS = tuple(map(Kernel, ours.EXPERT_TILES))
Tactic = cublaslt.Algorithm | Kernel


@functools.cache
def find(tokens: int, out: int, hidden: int, device: str, version: int) -> Tactic | None:
    """What was found for a shape on this device with this library, if anything."""
    for row in _rows_for(device, version):
        if (row["tokens"], row["out"], row["hidden"]) == (tokens, out, hidden):
            return Kernel(row["kernel"]) if row.get("kernel") else tuple(int(word, 16) for word in row["algorithm"])
    return None


def multiply(x: Tensor, weight: Tensor, out: Tensor, tactic: Tactic) -> None:
    """BF16 x [N, K] times weight [O, K], both `aligned`, into out [N, O]."""
    if isinstance(tactic, Kernel):
        ours.launch(x, weight, out, tiles=tactic.tiles)
    else:
        cublaslt.product(x, weight, out, tactic)


def products(device: str, version: int) -> set[tuple[int, int]]:
    """Shapes [O, K] of weights for which there is anything."""
    return {(row["out"], row["hidden"]) for row in _rows_for(device, version)}


def library() -> tuple[str, int]:
    """Device and version of cuBLASLt that the file is for."""
    kept = _file(FILE)
    return kept["device"], kept["cublaslt"]


def search(tokens: int, out: int, hidden: int) -> dict[str, Any]:
    """Times every candidate; `algorithm` is empty and `kernel` 0 where torch's product is as good."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(out, hidden, device="cuda", dtype=torch.bfloat16).mul_(hidden**-0.5)
    weights = [weight, *(weight.clone() for _ in range(COLD_BYTES // weight.nbytes))]
    calls = weights * max(1, CALLS // len(weights))
    wanted, y = x.float() @ weight.float().t(), x.new_empty((tokens, out))

    def seconds(tactic: Tactic | None, replays: int) -> float:
        chosen = linear if tactic is None else functools.partial(multiply, out=y, tactic=tactic)
        return graph_seconds([functools.partial(chosen, x, one) for one in calls], replays)

    def right(tactic: Tactic) -> bool:
        multiply(x, weight, y.fill_(torch.nan), tactic)
        return float((y.float() - wanted).norm() / wanted.norm()) < MOST_ERROR

    kernels = KERNELS if out >= ours.WIDE and ours.has_kernel(x, weight) else ()
    found = [one for one in (*cublaslt.candidates(tokens, out, hidden, CANDIDATES), *kernels) if right(one)]
    first = sorted(found, key=lambda one: seconds(one, REPLAYS))[:FIRST]
    times = {one: seconds(one, 4 * REPLAYS) for one in (*dict.fromkeys((found[0], *first)), None)}
    best = min(first, key=times.__getitem__)
    kept = best if times[best] < times[None] * (1 - SPREAD) else None
    row = {"tokens": tokens, "out": out, "hidden": hidden, "candidates": len(found)}
    row |= {name: round(times[one] * 1e6, 2) for name, one in (("default_us", found[0]), ("torch_us", None), ("us", kept))}
    own = kept.tiles if isinstance(kept, Kernel) else 0
    return row | {"kernel": own, "algorithm": [] if own else [hex(word) for word in kept or ()]}


def _rows(quick: bool) -> Iterator[dict[str, Any]]:
    for name, (out, hidden) in SHAPES.items():
        for tokens in QUICK_TOKENS if quick else TOKENS:
            row = {"name": name} | search(tokens, out, hidden)
            limit = 2 * (row["out"] + tokens) * hidden / 1e6  # MB, of the weights and x
            print(
                f"{name:15s} {tokens:4d}  default {row['default_us']:8.2f} us  torch {row['torch_us']:8.2f}  best {row['us']:8.2f}"
                f"  {row['torch_us'] / row['us']:5.2f} x  {limit / row['us']:5.2f} TB/s",
                flush=True,
            )
            yield row


def _main(file: Path, quick: bool) -> None:
    rows: list[dict[str, Any]] = []
    for row in _rows(quick):
        rows.append(row)
        kept = {"version": VERSION, "cublaslt": cublaslt.version(), **machine(), "rows": rows}
        file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _rows_for(device: str, version: int) -> list[dict[str, Any]]:
    """Those with an algorithm or a kernel, if the file is for this device and library."""
    kept = _file(FILE)
    same = (kept["version"], *library()) == (VERSION, device, version)
    return [row for row in kept["rows"] if row["algorithm"] or row.get("kernel")] if same else []


@functools.cache
def _file(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this search needs one.")
    _main(Path(sys.argv[1]), "--quick" in sys.argv)
