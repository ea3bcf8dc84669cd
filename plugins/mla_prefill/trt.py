"""Causal attention of packed sequences in TensorRT, launched from the host; TensorRT's own takes no packed ones on most chips."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.mla_prefill import op
from plugins.trt import Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _shapes(sizes: Sizes, **_: object) -> Sequence[Sequence[Size]]:
    tokens, heads, _ = sizes["q"]
    return (tokens, heads, sizes["v"][2]), (heads, tokens)


def _refusal(sizes: Sizes, **_: object) -> str:
    widths = sizes["q"][2], sizes["v"][2]
    wanted = op.NOPE + op.ROPE, op.VALUES
    return "" if widths == wanted else f"the kernel takes heads of {wanted[0]} and {wanted[1]}, not {widths[0]} and {widths[1]}"


def _reference(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *, scale: float) -> Sequence[Tensor]:
    return op.mla_prefill(q, k, v, cu_q, cu_k, scale)


PLUGINS = (
    Plugin(
        name="mla_prefill", inputs={"q": "BF16", "k": "BF16", "v": "BF16", "cu_q": "INT32", "cu_k": "INT32"},
        outputs={"out": "BF16", "lse": "FLOAT"}, attributes={"scale": float}, shapes=_shapes, reference=_reference, kernel=None,
        refusal=_refusal, least_sm=90, only_sm=90,
    ),
)  # fmt: skip
