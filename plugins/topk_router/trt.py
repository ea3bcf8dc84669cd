"""The routing in TensorRT: one kernel in place of some twenty layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.topk_router import op
from plugins.topk_router.reference import route
from plugins.trt import Kernel, Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _shapes(sizes: Sizes, *, top_k: int, **_: object) -> Sequence[Sequence[Size]]:
    return ((sizes["logits"][0], top_k),) * 2


def _refusal(sizes: Sizes, *, n_group: int, topk_group: int, top_k: int, **_: object) -> str:
    experts = sizes["logits"][1]
    if op.has_kernel(experts, n_group, topk_group, top_k):
        return ""
    return f"the kernel does not split {top_k} of {experts} experts in {topk_group} of {n_group} groups evenly over 32 lanes"


def _kernel(sizes: Sizes, *, n_group: int, topk_group: int, top_k: int, scale: float, norm_topk_prob: bool) -> Kernel:
    tokens, experts = sizes["logits"]
    form = experts, n_group, topk_group, top_k
    return Kernel(
        source=op.source(*form).path, name="topk_router", macros=op.macros(*form, norm_topk_prob),
        grid=((tokens + (op.WARPS - 1)) // op.WARPS, 1, 1), threads=32 * op.WARPS, numbers={"tokens": tokens},
        constants={"scale": scale},
    )  # fmt: skip


def _reference(logits: Tensor, bias: Tensor, **attributes: object) -> tuple[Tensor, Tensor]:
    weights, indices = route(logits, bias, **attributes)  # type: ignore[arg-type]
    return weights, indices.int()


PLUGINS = (
    Plugin(
        name="topk_router",
        inputs={"logits": "FLOAT", "bias": "FLOAT"},
        outputs={"weights": "FLOAT", "indices": "INT32"},
        attributes={"n_group": int, "topk_group": int, "top_k": int, "scale": float, "norm_topk_prob": bool},
        shapes=_shapes, reference=_reference, kernel=_kernel, refusal=_refusal, least_sm=80,
    ),
)  # fmt: skip
