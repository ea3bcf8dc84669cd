#!/usr/bin/env python3
"""Collectives of expert-parallel decoding in BF16, FP8 and NVFP4, on any number of ranks: bytes on the wire, time, error.

    torchrun --nproc-per-node 2 scripts/bench_collectives.py [--quick] [--json FILE]

NCCL where each rank has a GPU (CUDA graphs, medians), gloo on CPU ranks otherwise (wall clock). Hidden states are 7168 wide.

    all_gather       each rank's rows to all: quantised, gathered, dequantised; `undecoded` stops before the last step
    reduce_scatter   BF16 sums of all ranks' rows, each rank its share: the way back
    dispatch         each token once to every rank that holds one of its 8 experts of 256, drawn at random
    combine          the experts' outputs back to their tokens, and their sum

`us` is the slowest rank's. `gb_per_s` counts what one rank receives from others, `effective_gb_per_s` what that is in BF16.
`error`: relative, of what arrived (`combine`: summed). `bf16_x` is the time of BF16 over this one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.bench import relative  # noqa: E402
from plugins.fp4_allgather import op  # noqa: E402
from plugins.moe_grouped_gemm import launch as kernels  # noqa: E402
from plugins.moe_grouped_gemm import plain  # noqa: E402
from plugins.timing import clocked, graph_seconds, machine  # noqa: E402
from scripts._options import result_file  # noqa: E402

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
TOKENS, QUICK_TOKENS = (8, 32, 128, 512, 1024, 2048, 4096), (8, 64)
IN_A_GRAPH, REPEATS = 10, 5


def main() -> int:
    """Every collective at every number of tokens a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 and 64 tokens a rank")
    parser.add_argument("--json", type=result_file, help="write the rows and the machine here")
    options = parser.parse_args()
    device = start()
    rows: list[dict[str, Any]] = []
    for row in measured(QUICK_TOKENS if options.quick else TOKENS, device):
        rows.append(row)
        if dist.get_rank() == 0:
            print(line(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(described(rows, device, HIDDEN), indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def start() -> torch.device:
    """The process group, and this rank's device."""
    if "RANK" not in os.environ:
        sys.exit("There are no ranks: start this with torchrun --nproc-per-node N.")
    local = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        return torch.device("cuda", local)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def measured(counts: Sequence[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of the result, the same on every rank; bf16 comes first and is what the others are compared with."""
    base: dict[tuple[str, int], float] = {}
    for tokens in counts:
        generator = torch.Generator().manual_seed(1000 + dist.get_rank())
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().to(device)
        for precision in op.PRECISIONS:
            for row in (*gathers(x, precision), *exchanges(x, precision, generator)):
                row |= {"tokens_a_rank": tokens, "precision": precision}
                shrunk = op.row_bytes(HIDDEN, precision) / op.row_bytes(HIDDEN, "bf16")
                row["effective_gb_per_s"] = round(row["gb_per_s"] / shrunk, 2)
                first = base.setdefault((row["collective"].split()[0], tokens), row["us"])
                yield row | {"bf16_x": round(first / row["us"], 2)}


def gathers(x: Tensor, precision: op.Precision) -> Iterator[dict[str, Any]]:
    """all_gather, and reduce_scatter in BF16."""
    ranks, scale = dist.get_world_size(), op.common_scale(x)
    wire = (ranks - 1) * len(x) * op.row_bytes(HIDDEN, precision)
    wanted = op.all_gather(x, "bf16")
    found = op.all_gather(x, precision, input_scale=scale)
    seconds = slowest(lambda: op.all_gather(x, precision, input_scale=scale), x.device)
    yield result("all_gather", seconds, wire) | {"error": relative(found, wanted)}
    if precision != "bf16":
        seconds = slowest(lambda: op.gather_packed(x, precision, input_scale=scale), x.device)
        yield result("all_gather undecoded", seconds, wire)
        return
    share = torch.empty_like(x)
    seconds = slowest(lambda: dist.reduce_scatter_tensor(share, wanted), x.device)
    yield result("reduce_scatter", seconds, wire) | {"error": relative(share.float(), (x.float() * ranks).bfloat16())}


def exchanges(x: Tensor, precision: op.Precision, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """dispatch of tokens to experts' ranks, and combine."""
    ranks, scale = dist.get_world_size(), op.common_scale(x)
    experts = torch.rand(len(x), EXPERTS, generator=generator).topk(TOP_K).indices
    goes = torch.nn.functional.one_hot(experts // -(-EXPERTS // ranks), ranks).amax(1).bool()  # [N, ranks]
    places = torch.cat([goes[:, rank].nonzero().flatten() for rank in range(ranks)]).to(x.device)
    send = goes.sum(0)
    receive = torch.empty_like(send, device=x.device)
    dist.all_to_all_single(receive, send.to(x.device))
    sent, received, here = send.tolist(), receive.tolist(), dist.get_rank()

    def dispatch(precision: op.Precision = precision) -> Tensor:
        return op.unpack(op.exchange_rows(op.pack(x, precision, scale)[places], sent, received), HIDDEN, precision, scale)

    slots = torch.where(goes.t(), goes.t().flatten().cumsum(0).view(ranks, -1) - 1, -1).t().contiguous().int().to(x.device)
    once = torch.ones(slots.shape, device=x.device)

    def combine(outputs: Tensor) -> Tensor:
        return summed(op.all_to_all(outputs, received, sent, precision, input_scale=scale), once, slots.flatten())

    at_experts = dispatch()
    width = op.row_bytes(HIDDEN, precision)
    seconds, error = slowest(dispatch, x.device), relative(at_experts, dispatch("bf16"))
    yield result("dispatch", seconds, (sum(received) - received[here]) * width) | {"error": error}
    seconds = slowest(lambda: combine(at_experts), x.device)
    wanted = x.float() * goes.sum(1, keepdim=True).to(x.device)
    yield result("combine", seconds, (sum(sent) - sent[here]) * width) | {"error": relative(combine(at_experts), wanted)}


def summed(rows: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """rows BF16 [R, H], weights F32 [N, K], slots I32 [N * K] (-1: none) -> [N, H]: each token's rows added."""
    if not rows.is_cuda:
        return plain.finalize(rows, weights, slots)
    out = rows.new_empty((len(weights), rows.shape[1]))
    kernels.finalize(rows, weights, slots, out)
    return out


def slowest(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call on the slowest rank."""
    dist.barrier()
    seconds = graph_seconds([call] * IN_A_GRAPH) if device.type == "cuda" else clocked(call, REPEATS)
    return largest((seconds,), device)[0]


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """Of all ranks' values, one by one."""
    every = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.tolist()


def result(name: str, seconds: float, wire: int) -> dict[str, Any]:
    """A row: what a rank received from the others, and how fast."""
    rate = {"us": round(seconds * 1e6, 2), "gb_per_s": round(wire / seconds / 1e9, 2)}
    return {"collective": name, "received_bytes": wire, **rate}


def described(rows: list[dict[str, Any]], device: torch.device, hidden: int) -> dict[str, Any]:
    """Rows and where they come from."""
    where = machine() if device.type == "cuda" else {"device": "CPU", "torch": torch.__version__}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
    shape = {"ranks": dist.get_world_size(), "backend": dist.get_backend(), "nccl": nccl, "hidden": hidden}
    return {"rows": rows, **shape, **where}


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    moved = f"{row['received_bytes'] / 1e3:9.1f} kB {row['us']:9.1f} us {row['gb_per_s']:7.1f} GB/s"
    tail = f"  error {row['error']:.1e}" if "error" in row else ""
    return f"{row['collective']:21s} {row['tokens_a_rank']:5d} {row['precision']:6s} {moved}  {row['bf16_x']:5.2f} x bf16{tail}"


if __name__ == "__main__":
    sys.exit(main())
