"""The quantisers as torch ops: CUDA runs the kernels, CPU the reference, and shapes are known to `torch.export`.

    codes, scales = torch.ops.r1_pipeline.fp8_quantize(x, column_major)
    codes, scales = torch.ops.r1_pipeline.nvfp4_quantize(x, input_scale, tiled)

x BF16 [N, K]; K a multiple of 128 for FP8 and of 64 for NVFP4. `column_major`: scales of one group lie side by side, N padded
to 4, as DeepGEMM's TMA loads want them. `tiled`: NVFP4 scales [pad128(N), pad4(K/16)] in the 128x4 layout that TensorRT-LLM's
and cuBLAS' GEMMs take; row by row otherwise, which can be sent and concatenated (`tile_nvfp4_scales` afterwards).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.nvrtc import Source, aligned
from plugins.quantize import reference
from plugins.quantize.reference import FP8, FP8_GROUP, NVFP4_GROUP

__all__ = ["check_whole", "fp8_dequantize", "fp8_quantize", "nvfp4_dequantize", "nvfp4_quantize", "tile_nvfp4_scales"]

SOURCE = Source(Path(__file__).with_name("kernel.cu"))
PIECE, WORD, THREADS = 8, 4, 256
"""Values of one 16-byte load; bytes that are stored at once; threads of a block."""
NVFP4_COLUMNS = 64
"""Columns that share a word of scales."""
FULL = 132 * 2048
"""Threads that fill an H200."""
MAX_ELEMENTS = PIECE << 31
"""Pieces are counted in 32 bits."""


@torch.library.custom_op("r1_pipeline::fp8_quantize", mutates_args=(), device_types="cuda")
def fp8_quantize(x: Tensor, column_major: bool = False) -> tuple[Tensor, Tensor]:
    """x BF16 [N, K] -> codes E4M3 [N, K], scales F32 [N, K/128]"""
    _check(x, torch.bfloat16, FP8_GROUP)
    out = _fp8_outputs(x, column_major)
    launch_fp8(aligned(x), *out)
    return out


@torch.library.custom_op("r1_pipeline::fp8_dequantize", mutates_args=(), device_types="cuda")
def fp8_dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """codes E4M3 [N, K], scales F32 [N, K/128] -> BF16 [N, K]"""
    _check(codes, FP8, FP8_GROUP)
    _check_scales(scales, torch.float32, codes.shape[0], codes.shape[1] // FP8_GROUP)
    out = codes.new_empty(codes.shape, dtype=torch.bfloat16)
    codes, scales = _rows(codes, PIECE), _rows(scales, 1)
    strides = codes.stride(0) // PIECE, scales.stride(0)
    _launch("fp8_dequantize", out.numel(), codes, scales, out, out.numel() // PIECE, *strides, columns=out.shape[1])
    return out


@torch.library.custom_op("r1_pipeline::nvfp4_quantize", mutates_args=(), device_types="cuda")
def nvfp4_quantize(x: Tensor, input_scale: Tensor, tiled: bool = False) -> tuple[Tensor, Tensor]:
    """x BF16 [N, K], input_scale F32 [1] -> codes U8 [N, K/2], scales E4M3 [N, K/16] or tiled"""
    _check(x, torch.bfloat16, NVFP4_COLUMNS)
    check_whole(input_scale)
    out = _nvfp4_outputs(x, tiled)
    launch_nvfp4(aligned(x), input_scale, *out, tiled)
    return out


@torch.library.custom_op("r1_pipeline::nvfp4_dequantize", mutates_args=(), device_types="cuda")
def nvfp4_dequantize(codes: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """codes U8 [N, K/2], scales E4M3 [N, K/16], scale_2 F32 [1] -> BF16 [N, K]"""
    _check_nvfp4(codes, scales, scale_2)
    out = codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=torch.bfloat16)
    codes, scales = _rows(codes, WORD), _rows(scales, 1)
    strides = codes.stride(0) // WORD, scales.stride(0)
    arguments = codes, scales, scale_2, out, out.numel() // PIECE, *strides
    _launch("nvfp4_dequantize", out.numel(), *arguments, columns=out.shape[1])
    return out


@torch.library.custom_op("r1_pipeline::tile_nvfp4_scales", mutates_args=(), device_types="cuda")
def tile_nvfp4_scales(scales: Tensor) -> Tensor:
    """Scales E4M3 [N, K/16] row by row -> [pad128(N), K/16] in the 128x4 layout"""
    _check(scales, FP8, NVFP4_COLUMNS // NVFP4_GROUP)
    tiled, scales = _tiled(scales), _rows(scales, WORD)
    arguments = scales, tiled, len(scales), len(tiled), scales.stride(0) // WORD
    columns = tiled.shape[1] * NVFP4_GROUP
    _launch("tile_scales", tiled.numel() // WORD * PIECE, *arguments, columns=columns, UNROLL=1)
    return tiled


def launch_fp8(x: Tensor, codes: Tensor, scales: Tensor, overlap: bool = False) -> None:
    """The kernel alone, into rows of any stride. `overlap`: let it start while the kernel before it on the stream still runs."""
    arguments = x, codes, scales, x.numel() // PIECE, codes.stride(0) // PIECE, *scales.stride()
    size = x.numel() // PIECE / FULL
    form = {"UNROLL": 2 if size > 0.5 else 1, "THREADS": 128 if size > 6 else THREADS} | ({"LARGE": 1} if size > 20 else {})
    _launch("fp8_quantize", x.numel(), *arguments, columns=x.shape[1], overlap=overlap, **form)


def launch_nvfp4(x: Tensor, input_scale: Tensor, codes: Tensor, scales: Tensor, tiled: bool = False, overlap: bool = False) -> None:
    """The kernel alone, into rows of any stride."""
    padding = (len(scales) - len(x)) * scales.shape[1] // WORD
    strides = codes.stride(0) // WORD, 0 if tiled else scales.stride(0) // WORD
    arguments = x, input_scale, codes, scales, x.numel() // PIECE, padding, *strides
    _launch("nvfp4_quantize", x.numel() + padding * PIECE, *arguments, columns=x.shape[1], overlap=overlap)


@fp8_quantize.register_fake
def _(x: Tensor, column_major: bool = False) -> tuple[Tensor, Tensor]:
    return _fp8_outputs(x, column_major)


@fp8_dequantize.register_fake
def _(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.bfloat16)


@nvfp4_quantize.register_fake
def _(x: Tensor, input_scale: Tensor, tiled: bool = False) -> tuple[Tensor, Tensor]:
    return _nvfp4_outputs(x, tiled)


@nvfp4_dequantize.register_fake
def _(codes: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=torch.bfloat16)


@tile_nvfp4_scales.register_fake
def _(scales: Tensor) -> Tensor:
    return _tiled(scales)


@fp8_quantize.register_kernel("cpu")
def _(x: Tensor, column_major: bool = False) -> tuple[Tensor, Tensor]:
    _check(x, torch.bfloat16, FP8_GROUP)
    out = _fp8_outputs(x, column_major)
    for tensor, found in zip(out, reference.fp8_quantize(x), strict=True):
        tensor.copy_(found)
    return out


@fp8_dequantize.register_kernel("cpu")
def _(codes: Tensor, scales: Tensor) -> Tensor:
    _check(codes, FP8, FP8_GROUP)
    _check_scales(scales, torch.float32, codes.shape[0], codes.shape[1] // FP8_GROUP)
    return reference.fp8_dequantize(codes, scales).contiguous()


@nvfp4_quantize.register_kernel("cpu")
def _(x: Tensor, input_scale: Tensor, tiled: bool = False) -> tuple[Tensor, Tensor]:
    _check(x, torch.bfloat16, NVFP4_COLUMNS)
    check_whole(input_scale)
    codes, scales = reference.nvfp4_quantize(x, input_scale)
    return codes, reference.tile_scales(scales) if tiled else scales


@nvfp4_dequantize.register_kernel("cpu")
def _(codes: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    _check_nvfp4(codes, scales, scale_2)
    return reference.nvfp4_dequantize(codes, scales, scale_2)


@tile_nvfp4_scales.register_kernel("cpu")
def _(scales: Tensor) -> Tensor:
    _check(scales, FP8, NVFP4_COLUMNS // NVFP4_GROUP)
    return reference.tile_scales(scales)


def _launch(name: str, elements: int, *arguments: Tensor | int, columns: int, overlap: bool = False, **form: int) -> None:
    """`form`: macros of the kernel; one piece a thread while the chip is not full, then two, unless it says."""
    if not elements:
        return
    pieces = elements // PIECE
    tensor = next(value for value in arguments if isinstance(value, Tensor))
    with torch.cuda.device(tensor.device):
        form = {"UNROLL": 2 if pieces >= 2 * FULL else 1, "THREADS": THREADS} | form
        grid = (-(-pieces // (form["THREADS"] * form["UNROLL"])), 1, 1)
        SOURCE.module(COLUMNS=columns, **form).launch(name, grid, form["THREADS"], *arguments, overlap=overlap)


def _rows(tensor: Tensor, unit: int) -> Tensor:
    """The tensor, or a copy, with each row in one piece and from a multiple of `unit` elements on."""
    even = tensor.stride(1) == 1 and tensor.stride(0) % unit == 0 and tensor.data_ptr() % (unit * tensor.element_size()) == 0
    return tensor if even else aligned(tensor)


def _check(x: Tensor, dtype: torch.dtype, columns: int) -> None:
    if x.dim() != 2 or x.dtype != dtype or x.shape[1] % columns:
        raise ConfigError(f"{x.dtype} {list(x.shape)} cannot be taken: it must be {dtype} [N, C] with C a multiple of {columns}.")
    if x.numel() >= MAX_ELEMENTS:
        raise ConfigError(f"{x.numel()} elements in one call are too many: the kernels take fewer than {MAX_ELEMENTS}.")


def _check_nvfp4(codes: Tensor, scales: Tensor, scale_2: Tensor) -> None:
    _check(codes, torch.uint8, NVFP4_COLUMNS // 2)
    _check_scales(scales, FP8, codes.shape[0], 2 * codes.shape[1] // NVFP4_GROUP)
    check_whole(scale_2)


def _check_scales(scales: Tensor, dtype: torch.dtype, rows: int, groups: int) -> None:
    if scales.dtype != dtype or scales.shape != (rows, groups):
        raise ConfigError(f"scales are {scales.dtype} {list(scales.shape)}: they must be {dtype} [{rows}, {groups}] here.")


def check_whole(scale: Tensor) -> None:
    """ConfigError unless this is one float32, a tensor's scale: kernels would take any bytes for one."""
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ConfigError(f"The tensor's scale is {scale.dtype} {list(scale.shape)}: it must be float32 [1].")


def _fp8_outputs(x: Tensor, column_major: bool) -> tuple[Tensor, Tensor]:
    rows, groups = x.shape[0], x.shape[1] // FP8_GROUP
    codes = torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format)
    if not column_major:
        return codes, x.new_empty((rows, groups), dtype=torch.float32)
    return codes, x.new_empty((groups, (rows + 3) // 4 * 4), dtype=torch.float32).t()[:rows]


def _nvfp4_outputs(x: Tensor, tiled: bool) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((x.shape[0], x.shape[1] // 2), dtype=torch.uint8)
    scales = x.new_empty((x.shape[0], x.shape[1] // NVFP4_GROUP), dtype=FP8)
    return codes, _tiled(scales) if tiled else scales


def _tiled(scales: Tensor) -> Tensor:
    return scales.new_empty(((scales.shape[0] + 127) // 128 * 128, scales.shape[1]))
