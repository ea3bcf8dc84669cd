"""The products around absorbed attention in TensorRT, launched from the host: the kernel's arguments are TMA descriptors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from plugins.mla_absorb import op
from plugins.trt import Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _query_shapes(sizes: Sizes, **_: object) -> Sequence[Sequence[Size]]:
    return ((*sizes["q"][:2], op.LATENT + op.ROPE),)


def _output_shapes(sizes: Sizes, **_: object) -> Sequence[Sequence[Size]]:
    return ((*sizes["latent"][:2], op.NOPE),)


def _refusal(name: str, columns: int, weight: str) -> Callable[..., str]:
    def refusal(sizes: Sizes, **_: object) -> str:
        (_, heads, width), shape = sizes[name], tuple(sizes[weight])
        if width == columns and shape == (heads, op.NOPE, op.LATENT):
            return ""
        return f"the kernel takes rows of {columns} and weights [{heads}, {op.NOPE}, {op.LATENT}], not {width} and {list(shape)}"

    return refusal


def _query(q: Tensor, w_uk: Tensor) -> Sequence[Tensor]:
    return (op.absorb_query(q, w_uk),)


def _output(latent: Tensor, w_uv: Tensor) -> Sequence[Tensor]:
    return (op.absorb_output(latent, w_uv),)


PLUGINS = (
    Plugin(
        name="absorb_query", inputs={"q": "BF16", "w_uk": "BF16"}, outputs={"query": "BF16"}, attributes={}, shapes=_query_shapes,
        reference=_query, kernel=None, refusal=_refusal("q", op.NOPE + op.ROPE, "w_uk"), least_sm=90, only_sm=90,
    ),
    Plugin(
        name="absorb_output", inputs={"latent": "BF16", "w_uv": "BF16"}, outputs={"out": "BF16"}, attributes={},
        shapes=_output_shapes, reference=_output, kernel=None, refusal=_refusal("latent", op.LATENT, "w_uv"), least_sm=90,
        only_sm=90,
    ),
)  # fmt: skip
