"""The latent cache's quantiser in TensorRT, launched from the host: how many values of the last chunk exceed its limit is rounded
in floating point, which TensorRT's expressions of shapes have not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.kv_quantize import op
from plugins.trt import Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _shapes(sizes: Sizes, *, chunk: int, **_: object) -> Sequence[Sequence[Size]]:
    tokens, dim = sizes["x"]
    return (tokens, dim), ((tokens + (chunk - 1)) // chunk,)


def _refusal(sizes: Sizes, *, chunk: int, **_: object) -> str:
    dim = sizes["x"][1]
    if dim % 8 == 0 and 0 < chunk * dim <= op.MAX_CHUNK:
        return ""
    return f"the kernel takes rows of a multiple of 8 and chunks of {op.MAX_CHUNK} values, not {dim} and {chunk * dim}"


def _quantize(name: str, codes: str) -> Plugin:
    def reference(x: Tensor, *, chunk: int, quantile: float) -> Sequence[Tensor]:
        return op.kv_quantize(x, chunk, quantile, codes == "INT8")

    return Plugin(
        name=name, inputs={"x": "BF16"}, outputs={"codes": codes, "scales": "FLOAT"}, attributes={"chunk": int, "quantile": float},
        shapes=_shapes, reference=reference, kernel=None, refusal=_refusal, least_sm=89 if codes == "FP8" else 80,
    )  # fmt: skip


PLUGINS = _quantize("kv_quantize", "FP8"), _quantize("kv_quantize_int8", "INT8")
