"""Quantisers in TensorRT, of which it times one and two pieces of 16 bytes a thread.

    fp8_quantize    activations in E4M3 with a scale each 128 values; TensorRT's own dynamic quantisation has blocks of 16 and 32
    nvfp4_pack      rows as they travel to other ranks: INT8 [N, 9 K / 16], 8 bytes of codes for each 16 values, then the scales
    nvfp4_unpack    back to BF16 [N, K]

As the argument of a product NVFP4 needs no plugin there: `IDynamicQuantizeLayer` makes it; but collectives take no FP4 tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.quantize import op
from plugins.quantize.reference import FP8, FP8_GROUP, fp8_quantize, nvfp4_dequantize, nvfp4_quantize
from plugins.trt import Kernel, Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _shapes(sizes: Sizes) -> Sequence[Sequence[Size]]:
    tokens, columns = sizes["x"]
    return (tokens, columns), (tokens, columns // FP8_GROUP)


def _refusal(sizes: Sizes) -> str:
    columns = sizes["x"][1]
    return "" if columns % FP8_GROUP == 0 else f"{columns} columns are not whole groups of {FP8_GROUP}"


def _launched(name: str, tokens: Size, columns: int, tactic: int, **constants: int | str) -> Kernel:
    """With a thread for each piece of 16 bytes of BF16, or for two."""
    unroll = tactic or 1
    row, block = columns // op.PIECE, op.THREADS * unroll
    return Kernel(
        source=op.SOURCE.path, name=name, macros={"COLUMNS": columns, "UNROLL": unroll, "THREADS": op.THREADS},
        grid=((tokens * row + (block - 1)) // block, 1, 1), threads=op.THREADS, numbers={"pieces": tokens * row},
        constants=constants,
    )  # fmt: skip


def _kernel(sizes: Sizes, *, tactic: int = 0) -> Kernel:
    tokens, columns = sizes["x"]
    strides = {"code_stride": columns // op.PIECE, "row_stride": columns // FP8_GROUP, "group_stride": 1}
    return _launched("fp8_quantize", tokens, columns, tactic, **strides)


def _packed_shapes(sizes: Sizes) -> Sequence[Sequence[Size]]:
    tokens, columns = sizes["x"]
    return ((tokens, columns * 9 // 16),)


def _unpacked_shapes(sizes: Sizes) -> Sequence[Sequence[Size]]:
    tokens, columns = sizes["codes"]
    return ((tokens, columns * 16 // 9),)


def _packing_refusal(sizes: Sizes) -> str:
    columns = sizes["x"][1] if "x" in sizes else sizes["codes"][1] * 16 // 9
    return "" if columns % op.NVFP4_COLUMNS == 0 else f"the kernel takes multiples of {op.NVFP4_COLUMNS} columns, not {columns}"


def _pack(sizes: Sizes, *, tactic: int = 0) -> Kernel:
    """Codes and scales share the rows, of 9/16 byte a value."""
    tokens, columns = sizes["x"]
    row = columns * 9 // 64
    shared = {"code_stride": row, "scale_stride": row, "scales": f"codes + {columns // 8}"}
    return _launched("nvfp4_quantize", tokens, columns, tactic, padding=0, **shared)


def _unpack(sizes: Sizes, *, tactic: int = 0) -> Kernel:
    tokens, row = sizes["codes"]
    columns = row * 16 // 9
    shared = {"code_stride": row // 4, "scale_stride": row, "scales": f"(const u8*)(codes + {columns // 8})"}
    return _launched("nvfp4_dequantize", tokens, columns, tactic, **shared)


def _packed(x: Tensor, input_scale: Tensor) -> Sequence[Tensor]:
    codes, scales = nvfp4_quantize(x, input_scale.view(1))
    return (torch.cat([codes, scales.view(torch.uint8)], 1).view(torch.int8),)


def _unpacked(packed: Tensor, scale_2: Tensor) -> Sequence[Tensor]:
    half = packed.shape[1] * 8 // 9
    codes, scales = packed.view(torch.uint8).split([half, packed.shape[1] - half], 1)
    return (nvfp4_dequantize(codes.contiguous(), scales.contiguous().view(FP8), scale_2.view(1)),)


PLUGINS = (
    Plugin(
        name="fp8_quantize", inputs={"x": "BF16"}, outputs={"codes": "FP8", "scales": "FLOAT"}, attributes={}, shapes=_shapes,
        reference=fp8_quantize, kernel=_kernel, refusal=_refusal, least_sm=89, tactics=(1, 2),
    ),
    Plugin(
        name="nvfp4_pack", inputs={"x": "BF16", "input_scale": "FLOAT"}, outputs={"codes": "INT8"}, attributes={},
        shapes=_packed_shapes, reference=_packed, kernel=_pack, refusal=_packing_refusal, least_sm=89, tactics=(1, 2),
    ),
    Plugin(
        name="nvfp4_unpack", inputs={"codes": "INT8", "scale_2": "FLOAT"}, outputs={"out": "BF16"}, attributes={},
        shapes=_unpacked_shapes, reference=_unpacked, kernel=_unpack, refusal=_packing_refusal, least_sm=89, tactics=(1, 2),
    ),
)  # fmt: skip
