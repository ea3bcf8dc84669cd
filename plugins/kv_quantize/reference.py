"""The quantisation that the kernel must reproduce to the bit, in float32 torch.

Chunks of `chunk` tokens (the last may be shorter), each with one scale. `limit` is the chunk's magnitude below or at which the
share `quantile` of its values lie: sorted, the one at place ceil(quantile * count) of 1..count; the largest if that one is 0.

    FP8    scale = limit / 448    code = e4m3(x * (448 / limit)), at most 448
    INT8   scale = limit / 127    code = round(x * (127 / limit)), ties to even, within -127..127; 0 for NaN

A chunk of zeros has the scale 1. What is above the limit saturates: outliers of a chunk do not coarsen the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["LARGEST", "kv_dequantize", "kv_quantize", "place"]

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def place(quantile: float, count: int) -> int:
    """Of the limit among `count` sorted magnitudes, from 1."""
    return min(count, max(1, math.ceil(quantile * count)))


def kv_quantize(x: Tensor, chunk: int, quantile: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x BF16 [N, D] -> codes [N, D] of FP8 or INT8, scales F32 [ceil(N / chunk)]"""
    pieces = [_quantize(part.float(), quantile, dtype) for part in x.split(chunk)] if len(x) else []
    if not pieces:
        return torch.empty_like(x, dtype=dtype), x.new_empty(0, dtype=torch.float32)
    codes, scales = zip(*pieces, strict=True)
    return torch.cat(codes), torch.stack(scales)


def kv_dequantize(codes: Tensor, scales: Tensor, chunk: int) -> Tensor:
    """-> BF16 [N, D]"""
    return (codes.float() * scales.repeat_interleave(chunk)[: len(codes)].unsqueeze(-1)).bfloat16()


def _quantize(part: Tensor, quantile: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    sizes = part.abs().flatten()
    limit = sizes.sort().values[place(quantile, sizes.numel()) - 1]  # NaN is the largest
    limit = torch.where(limit == 0, sizes.amax(), limit)
    largest = torch.full_like(limit, LARGEST[dtype])
    limit = torch.where(limit == 0, largest, limit)
    values = (part * (largest / limit)).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (values.to(dtype) if dtype != torch.int8 else values.nan_to_num(0).round().to(dtype)), limit / largest
