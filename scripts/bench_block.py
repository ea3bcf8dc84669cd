#!/usr/bin/env python3
"""A decoder layer of DeepSeek-R1 on several ranks: attention data-parallel and experts split, against tensor parallelism.

    torchrun --nproc-per-node 2 scripts/bench_block.py [--quick] [--json FILE]

NCCL where each rank has a GPU, R1's shapes; gloo on CPU ranks otherwise, small shapes. The layer is `scripts/_layer.py` (FP8).

    ADP+EP   each rank has its own sequences, all heads and a part of the experts: tokens are routed where they are, gathered
             in BF16, FP8 or NVFP4 with their experts and weights in the same row, and the outputs reduce-scattered in BF16
    TP       each rank has all sequences, its share of the heads and of each expert's width, as TensorRT-LLM's tp_size alone
             does (moe_tensor_parallel_size = tp_size), and a copy of every latent: two all-reduces in BF16
    TP+EP    the same with the experts by number (moe_expert_parallel_size = tp_size)

`tokens` counts those of all ranks in a step, `us` is the slowest rank's. `error` is relative, of what the layer adds to its input
against the whole layer on one rank, over tokens with the same experts there; `rerouted` the share of the others; the worst rank's
(of a call that is not captured, in rows with `graph` on one stream).
It must be within `TOLERANCE`, or the exit code is 1: sums go in another order, and a bit that differs there can be another FP8 code
before the experts. A gather in FP8 adds nothing, as the experts quantise to the codes that travelled; NVFP4 rounds what they get.
Rows without `exchange` leave the collectives out (each rank goes on with what it last received): the difference is what they cost
in place, waiting for the slower rank included. Capacity: bytes of weights and of a token's latent on a rank, and tokens that fit
beside the weights of this one layer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.fp4_allgather import op  # noqa: E402
from plugins.timing import clocked, graph_seconds  # noqa: E402
from scripts._layer import FASTEST, R1, Layer, Shape, Share, State, deviation  # noqa: E402
from scripts._options import result_file  # noqa: E402
from scripts.bench_collectives import described, largest, start  # noqa: E402

SMALL = Shape(256, 128, 128, 32, 6, 96, 128, experts=6, top_k=2, n_group=2, topk_group=1, width=768, page=16)
LAYOUTS = {"ADP{}+EP{}": ("dp", "number"), "TP{}": ("tp", "width"), "TP{}+EP{}": ("tp", "number")}
TOKENS, QUICK_TOKENS, LENGTH = (1, 8, 32, 128, 512), (8,), 4096
TOLERANCE = {"bf16": 0.03, "fp8": 0.03, "nvfp4": 0.15}
ALL = FASTEST - {"fp8_cache"}
"""The cache is in BF16, as `Shape.cache_bytes` counts it."""
LEFT_OUT = tuple(map(frozenset, ((), ("streams",), ("graph",), ("graph", "streams"), ("exchange",))))
"""Steps that each row does without; `exchange` is the collectives."""
CACHE_SHARE = 0.9
"""Of a GPU's memory that weights and cache may take."""
IN_A_GRAPH = 4


def main() -> int:
    """Every layout at every number of tokens a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 tokens a rank")
    parser.add_argument("--json", type=result_file, help="write the rows and the machine here")
    options = parser.parse_args()
    device = start()
    shape, length = (R1, LENGTH) if device.type == "cuda" else (SMALL, 40)
    blocks, rows = {name: Block(shape, device, share) for name, share in shares().items()}, []
    capacity = [capacity_of(name, block) for name, block in blocks.items()]
    for row in measured(blocks, Layer(shape, device), QUICK_TOKENS if options.quick else TOKENS, length):
        rows.append(row)
        if dist.get_rank() == 0:
            print(line(row), flush=True)
            if options.json:
                shape_of = {"context": length, "tolerance": TOLERANCE, "capacity": capacity}
                result = described(rows, device, shape.hidden) | shape_of
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if dist.get_rank() == 0:
        print(*capacity, sep="\n")
    dist.barrier()
    dist.destroy_process_group()
    return int(not all(map(within, rows)))


def within(row: dict[str, Any]) -> bool:
    """Whether a row's outputs are one rank's."""
    return row["error"] <= TOLERANCE[row["gather"] or "bf16"]


def shares() -> dict[str, Share]:
    """Layouts on the ranks that there are."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {name.format(ranks, ranks): Share(rank, ranks, *split) for name, split in LAYOUTS.items()}


class Block(Layer):
    """A rank's share of the layer with the collectives that make it whole."""

    precision: op.Precision = "bf16"
    input_scale: Tensor | None = None
    """NVFP4's, calibrated."""
    sizes: Sequence[int] | None = None
    """Tokens of each rank under attention data parallelism, where they differ."""
    exchange: bool = True
    """False: nothing is sent, and `seen` is what came last."""
    seen: Tensor

    def attention(self, x: Tensor, state: State, on: frozenset[str]) -> Tensor:
        """As `Layer`'s, summed over heads."""
        return self._summed(super().attention(x, state, on))

    def experts(self, x: Tensor, on: frozenset[str]) -> Tensor:
        """As `Layer`'s, summed over experts or their width."""
        return self._summed(super().experts(x, on))

    def routed(self, x: Tensor, on: frozenset[str]) -> Tensor:
        """Under attention data parallelism tokens go to all ranks, and what their experts gave comes back summed."""
        if self.share.attention == "tp":
            return super().routed(x, on)
        weights, indices = self.route(x, on)
        beside = torch.cat((weights.view(torch.int32), indices), dim=1).view(torch.uint8)
        rows = torch.cat((op.pack(x, self.precision, self.input_scale), beside), dim=1)
        if self.exchange:
            self.seen = op.gather_rows(rows, self.sizes)
        everyone, rows = op.unpack(self.seen, x.shape[1], self.precision, self.input_scale).contiguous(), self.seen
        weights, indices = (half.contiguous() for half in rows[:, -beside.shape[1] :].view(torch.int32).chunk(2, dim=1))
        out = self.grouped(everyone, weights.view(torch.float32), indices, on)
        return op.reduce_scatter(out, self.sizes) if self.exchange else out[: len(x)]

    def _summed(self, out: Tensor) -> Tensor:
        if self.share.attention == "tp" and self.exchange:
            dist.all_reduce(out)
        return out


def measured(blocks: dict[str, Block], whole: Layer, counts: Sequence[int], length: int) -> Iterator[dict[str, Any]]:
    """Rows, the same on every rank; one rank's layer with all steps says what is right."""
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), whole.device
    for count in counts:
        state = State.random(whole.shape, [length] * (count * ranks), device)
        x = torch.randn(count * ranks, whole.shape.hidden, generator=torch.Generator().manual_seed(count)).bfloat16().to(device)
        wanted, own = (whole(x, state, ALL) - x, whole.chosen), slice(rank * count, (rank + 1) * count)
        apart = x[own], state.part(own), [tensor[own] for tensor in wanted]
        for name, block in blocks.items():
            mine = apart if block.share.attention == "dp" else (x, state, wanted)
            for row in variants(block, *mine):
                yield {"layout": name, "tokens": len(x), "tokens_per_s": round(len(x) / row["us"] * 1e6), **row}


def variants(block: Block, x: Tensor, state: State, wanted: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
    """Each precision of the gather, with and without CUDA graph, second stream and collectives."""
    block.input_scale = op.common_scale(block.norm(x, block.post_norm, ALL))
    apart, gpu = block.share.attention == "dp", x.is_cuda
    for block.precision in op.PRECISIONS if apart else op.PRECISIONS[:1]:
        for left_out in LEFT_OUT if gpu else LEFT_OUT[:1]:
            on = ALL - left_out
            differs = deviation(block(x, state, on) - x, block.chosen, *wanted)
            block.exchange = "exchange" not in left_out
            seconds = timed(lambda on=on: block(x, state, on), gpu and "graph" in on)
            slowest, *worst = largest((seconds, *differs.values()), x.device)
            how = {"graph": gpu and "graph" in on, "streams": gpu and "streams" in on, "exchange": block.exchange}
            block.exchange = True
            row = {"gather": block.precision if apart else None, **how, "us": round(slowest * 1e6, 2)}
            yield row | dict(zip(differs, worst, strict=True))


def timed(call: Callable[[], Tensor], captured: bool) -> float:
    """Seconds of one call, begun by all ranks together; CPUs take the first, which tells nothing of GPUs anyway."""
    dist.barrier()
    if torch.cuda.is_available():
        return graph_seconds([call] * IN_A_GRAPH) if captured else clocked(call)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def capacity_of(name: str, block: Block) -> dict[str, Any]:
    """Bytes on a rank, and tokens of latent that fit beside them."""
    share, device, ranks = block.share, block.device, dist.get_world_size()
    row = {"layout": name, "weight_bytes": block.weight_bytes(), "cache_bytes_a_token": block.shape.cache_bytes}
    copies = ranks if share.attention == "tp" else 1
    row |= {"ranks_that_hold_a_token": copies}
    if device.type == "cuda":
        room = CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory - row["weight_bytes"]
        fit = int(room // block.shape.cache_bytes)
        row |= {"tokens_a_rank": fit, "tokens_in_all": fit * ranks // copies}
    return row


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    how = f"{row['gather'] or '-':6s} {'graph' if row['graph'] else 'eager':5s} {'2 streams' if row['streams'] else '1 stream':9s}"
    how += "" if row["exchange"] else " no exchange"
    speed = f"{row['us']:9.1f} us {row['tokens_per_s']:9,d} tokens/s"
    close = f"error {row['error']:.1e}{'' if within(row) else ', TOO LARGE'}, rerouted {row['rerouted']:.1%}"
    return f"{row['layout']:9s} {row['tokens']:5d} {how} {speed}  {close}"


if __name__ == "__main__":
    sys.exit(main())
