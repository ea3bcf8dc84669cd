"""Activations in E4M3 with a scale each 128 values in TensorRT, whose own dynamic quantisation has blocks of 16 and 32 alone.

NVFP4 needs no plugin there: `IDynamicQuantizeLayer` makes it. TensorRT times one and two pieces of 16 bytes a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.quantize import op
from plugins.quantize.reference import FP8_GROUP, fp8_quantize
from plugins.trt import Kernel, Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _shapes(sizes: Sizes) -> Sequence[Sequence[Size]]:
    tokens, columns = sizes["x"]
    return (tokens, columns), (tokens, columns // FP8_GROUP)


def _refusal(sizes: Sizes) -> str:
    columns = sizes["x"][1]
    return "" if columns % FP8_GROUP == 0 else f"{columns} columns are not whole groups of {FP8_GROUP}"


def _kernel(sizes: Sizes, *, tactic: int = 0) -> Kernel:
    tokens, columns = sizes["x"]
    unroll = tactic or 1
    row, block = columns // op.PIECE, op.THREADS * unroll
    return Kernel(
        source=op.SOURCE.path, name="fp8_quantize", macros={"COLUMNS": columns, "UNROLL": unroll, "THREADS": op.THREADS},
        grid=((tokens * row + (block - 1)) // block, 1, 1), threads=op.THREADS, numbers={"pieces": tokens * row},
        constants={"code_stride": row, "row_stride": columns // FP8_GROUP, "group_stride": 1},
    )  # fmt: skip


def _reference(x: Tensor) -> Sequence[Tensor]:
    return fp8_quantize(x)


PLUGINS = (
    Plugin(
        name="fp8_quantize", inputs={"x": "BF16"}, outputs={"codes": "FP8", "scales": "FLOAT"}, attributes={}, shapes=_shapes,
        reference=_reference, kernel=_kernel, refusal=_refusal, least_sm=89, tactics=(1, 2),
    ),
)  # fmt: skip
