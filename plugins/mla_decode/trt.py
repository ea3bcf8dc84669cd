"""Latent attention of decoding in TensorRT, over its own cache [B, 1, M, D], launched from the host.

Of heads of 576 TensorRT has no fused kernel. The cache is read as pages of 64 rows one after the other. `mla_decode_fp8`
rounds what the op rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.mla_decode import op
from plugins.trt import Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _shapes(sizes: Sizes, *, latent: int, **_: object) -> Sequence[Sequence[Size]]:
    return ((*sizes["q"][:3], latent),)


def _refusal(sizes: Sizes, *, latent: int, **_: object) -> str:
    heads, dim, rows = sizes["q"][2], sizes["q"][3], sizes["cache"][2]
    fits = (dim, latent) == (op.DIM, op.LATENT) and rows % op.BLOCK == 0 and (heads % op.BLOCK == 0 or heads < op.BLOCK)
    if fits:
        return ""
    return f"the kernel takes rows of {op.DIM} with {op.LATENT} values, {op.BLOCK} at a time, not {rows} of {dim} with {latent}"


def _reference(q: Tensor, cache: Tensor, lengths: Tensor, *, scale: float, latent: int, kv_scale: float) -> Sequence[Tensor]:
    pages = cache.view(-1, op.BLOCK, cache.shape[3])
    table = torch.arange(len(pages), dtype=torch.int32, device=cache.device).view(len(q), -1)
    return op.mla_decode(q, pages, table, lengths, scale, latent, kv_scale)[:1]


def _decode(name: str, cache: str) -> Plugin:
    return Plugin(
        name=name, inputs={"q": "BF16", "cache": cache, "lengths": "INT32"}, outputs={"out": "BF16"},
        attributes={"scale": float, "latent": int, "kv_scale": float}, shapes=_shapes, reference=_reference, kernel=None,
        refusal=_refusal, least_sm=90, only_sm=90,
    )  # fmt: skip


PLUGINS = _decode("mla_decode", "BF16"), _decode("mla_decode_fp8", "FP8")
