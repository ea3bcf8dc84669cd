"""Rows of R1's hidden size packed in NVFP4 for other ranks, and back; the collectives have `scripts/bench_collectives.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, compiled, differing
from plugins.fp4_allgather import op
from plugins.quantize import reference

__all__ = ["rows"]

HIDDEN, TOKENS = 7168, (1, 8, 64, 256, 1024, 4096)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Both ways, through the functions that ranks call."""
    for tokens in TOKENS:
        yield from _both(bench, tokens)


def _both(bench: Bench, tokens: int) -> Iterator[dict[str, Any]]:
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    scale = x.abs().amax().float().view(1) / op.LARGEST
    packed = _pack(x, scale)
    yield _row(bench, "fp4_pack", lambda: op.pack(x, "nvfp4", scale), _pack, (x, scale), packed)
    back = _unpack(packed, HIDDEN, scale)
    yield _row(bench, "fp4_unpack", lambda: op.unpack(packed, HIDDEN, "nvfp4", scale), _unpack, (packed, HIDDEN, scale), back)


def _row(bench: Bench, name: str, call: Call, plain: Any, inputs: tuple[Any, ...], wanted: Tensor) -> dict[str, Any]:
    return bench.row(
        name,
        {"tokens": len(wanted)},
        lambda _: call(),
        error=lambda: differing((call(),), (wanted,)),
        eager=lambda: plain(*inputs),
        compiled=lambda: compiled(plain)(*inputs),
        peers={},
        right=lambda _: True,
        moved=len(wanted) * (2 * HIDDEN + op.row_bytes(HIDDEN, "nvfp4")),
        cold=True,
        overlaps=False,
    )


def _pack(x: Tensor, scale: Tensor) -> Tensor:
    codes, scales = reference.nvfp4_quantize(x, scale)
    return torch.cat((codes, scales.view(torch.uint8)), dim=1)


def _unpack(packed: Tensor, columns: int, scale: Tensor) -> Tensor:
    codes, scales = op.views(packed, columns, "nvfp4")
    return reference.nvfp4_dequantize(codes, scales, scale)
