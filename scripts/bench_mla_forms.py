#!/usr/bin/env python3
"""Latent attention of a chunk in both forms on this GPU: absorbed, and with its cache decompressed; where they cross.

    python scripts/bench_mla_forms.py [--quick] [--json FILE] [--peers DIR]

R1's 128 heads, one sequence, a cache in BF16 or E4M3 in pages of 64; what differs between the forms alone: not q_b, RoPE, or
o_proj. Times are medians of CUDA graph replays in microseconds. Ops take the fastest implementation present (the file says which
there were); `--peers DIR`: libraries (*.so) to load. From the file, `python -m plugins.mla_prefill.crossover FILE` takes the
crossings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.mla_absorb import op as absorb  # noqa: E402
from plugins.mla_decode import op as decode  # noqa: E402
from plugins.mla_decode import tactics as decode_tactics  # noqa: E402
from plugins.mla_prefill import op as prefill  # noqa: E402
from plugins.mla_prefill import tactics as prefill_tactics  # noqa: E402
from plugins.mla_prefill.crossover import crossing  # noqa: E402
from plugins.timing import graph_seconds, machine  # noqa: E402
from scripts._options import result_file  # noqa: E402

HEADS, PAGE, SCALE = 128, 64, 192**-0.5
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CONTEXTS, QUICK_CONTEXTS = (64, 256, 1024, 4096, 16384), (256, 4096)
TOKENS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)


class Layer:
    """A layer's weights, and one sequence of `context` tokens of which the last `tokens` are queries."""

    def __init__(self, tokens: int, context: int, dtype: torch.dtype) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        pages = -(-context // PAGE)
        self.q = random(tokens, HEADS, absorb.NOPE + absorb.ROPE)
        self.cache = random(pages, PAGE, decode.DIM).to(dtype)
        self.table = torch.randperm(pages, device="cuda").int().unsqueeze(0)
        self.kv_b = random(HEADS, 2 * absorb.NOPE, absorb.LATENT) * absorb.LATENT**-0.5
        self.lengths = torch.tensor([context], device="cuda", dtype=torch.int32)
        self.ends = [torch.tensor([0, many], device="cuda", dtype=torch.int32) for many in (tokens, context)]
        self.context = context

    def absorbed(self) -> Tensor:
        """-> BF16 [T, A, V]"""
        w_uk, w_uv = self.kv_b.split((absorb.NOPE, absorb.NOPE), 1)
        query = absorb.absorb_query(self.q, w_uk).unsqueeze(0)
        latent, _ = decode.mla_decode(query, self.cache, self.table, self.lengths, SCALE, absorb.LATENT)
        return absorb.absorb_output(latent[0], w_uv)

    def expanded(self) -> Tensor:
        """The same."""
        rows = self.cache[self.table[0]].flatten(0, 1)[: self.context].bfloat16()
        kv = torch.nn.functional.linear(rows[:, : absorb.LATENT], self.kv_b.flatten(0, 1)).unflatten(1, (HEADS, -1))
        return prefill.mla_prefill_kv(self.q, kv, rows[:, absorb.LATENT :], *self.ends, SCALE)[0]


def main() -> int:
    """Measure and print; the file is written after every context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two contexts")
    parser.add_argument("--json", type=result_file, help="write the rows and the machine here")
    parser.add_argument("--peers", type=Path, help="folder of extension libraries to load")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this benchmark needs one.")
    for library in sorted(options.peers.glob("*.so")) if options.peers else ():
        torch.ops.load_library(str(library))
    found = {"mla_decode": decode_tactics.present(), "mla_prefill": prefill_tactics.present(alone=False)}
    rows = []
    for cache, context in itertools.product(CACHES, QUICK_CONTEXTS if options.quick else CONTEXTS):
        group = [measured(tokens, context, cache) for tokens in TOKENS if tokens <= context]
        rows += group
        print(f"{cache}, context {context}: expanded from {crossing(group)} tokens on", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows, "present": found, **machine()}, indent=1) + "\n", encoding="utf-8")
    return 0


def measured(tokens: int, context: int, cache: str) -> dict[str, Any]:
    """Both forms' times, and how far apart their results are."""
    layer = Layer(tokens, context, CACHES[cache])
    one, other = layer.absorbed().double(), layer.expanded().double()
    row: dict[str, Any] = {"cache": cache, "tokens": tokens, "context": context}
    row["difference"] = float((one - other).norm() / one.norm())
    for name, call in (("absorbed", layer.absorbed), ("expanded", layer.expanded)):
        row[f"{name}_us"] = round(graph_seconds([call] * 3, replays=10) * 1e6, 2)
    print("  ".join(f"{key} {value:.4g}" if key != "cache" else cache for key, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
