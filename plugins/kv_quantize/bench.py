"""The KV quantiser at R1's latent rows of 576, a scale for each page of 64; torch sorts all pages at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, compiled, differing
from plugins.kv_quantize import op, reference

__all__ = ["rows"]

DIM, CHUNK, QUANTILE, TOKENS = 576, 64, 0.999, (1, 8, 64, 256, 1024, 4096, 32768)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """FP8 and INT8."""
    for dtype in (torch.float8_e4m3fn, torch.int8):
        for tokens in TOKENS:
            yield _row(bench, tokens, dtype)


def _row(bench: Bench, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.randn(tokens, DIM, device="cuda", dtype=torch.bfloat16)
    wanted = reference.kv_quantize(x, CHUNK, QUANTILE, dtype)
    out = torch.empty_like(wanted[0]).fill_(-1), torch.empty_like(wanted[1]).fill_(-1)
    chunk = min(tokens, CHUNK)
    inputs = x, chunk, reference.place(QUANTILE, chunk * DIM) - 1, reference.LARGEST[dtype], dtype
    return bench.row(
        "kv_quantize",
        {"tokens": tokens, "dtype": str(dtype).removeprefix("torch.")},
        lambda overlap: op.launch(x, *out, CHUNK, QUANTILE, overlap),
        error=lambda: differing(out, wanted),
        eager=lambda: _eager(*inputs),
        compiled=lambda: compiled(_eager)(*inputs),
        peers={},
        right=lambda _: True,
        moved=x.numel() * 3 + wanted[1].numel() * 4,
        cold=True,
    )


def _eager(x: Tensor, chunk: int, place: int, largest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As an engine without the kernel would: whole chunks of finite values that are not all 0."""
    parts = x.float().view(-1, chunk * x.shape[1])
    limit = parts.abs().sort(dim=1).values[:, place : place + 1]
    values = (parts * (largest / limit)).clamp(-largest, largest)
    codes = (values.round() if dtype == torch.int8 else values).to(dtype)
    return codes.view_as(x), limit / largest
