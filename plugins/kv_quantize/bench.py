"""The KV quantiser at R1's latent rows of 576, a scale for each page of 64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from plugins.bench import Bench, differing
from plugins.kv_quantize import op, reference

__all__ = ["rows"]

DIM, CHUNK, QUANTILE, TOKENS = 576, 64, 0.999, (1, 64, 1024, 4096, 32768)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """FP8 and INT8."""
    for dtype in (torch.float8_e4m3fn, torch.int8):
        for tokens in TOKENS:
            x = torch.randn(tokens, DIM, device="cuda", dtype=torch.bfloat16)
            wanted = reference.kv_quantize(x, CHUNK, QUANTILE, dtype)
            out = torch.empty_like(wanted[0]).fill_(-1), torch.empty_like(wanted[1]).fill_(-1)
            yield bench.row(
                "kv_quantize",
                {"tokens": tokens, "dtype": str(dtype).removeprefix("torch.")},
                lambda overlap, x=x, out=out: op.launch(x, *out, CHUNK, QUANTILE, overlap),
                error=lambda out=out, wanted=wanted: differing(out, wanted),
                eager=lambda x=x, dtype=dtype: reference.kv_quantize(x, CHUNK, QUANTILE, dtype),
                peers={},
                right=lambda _: True,
                moved=x.numel() * 3 + wanted[1].numel() * 4,
                cold=True,
            )
