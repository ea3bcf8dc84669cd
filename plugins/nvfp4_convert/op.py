"""The conversion as torch ops: CUDA runs the kernels, CPU the numpy reference, and shapes are known to `torch.export`.

    amax = torch.ops.r1_pipeline.fp8_block_amax(codes, scale_inv)
    weight, weight_scale, weight_scale_2 = torch.ops.r1_pipeline.fp8_block_to_nvfp4(codes, scale_inv, amax, False)

codes F8_E4M3 or U8 [B, n, k] (k a multiple of 16) with scale_inv F32 [B, ceil(n/128), ceil(k/128)], or both without B;
amax F32 [B] is that of every layer fused with the matrix. A NaN or infinite weight makes the amax NaN: the caller refuses.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.nvfp4_convert import reference
from plugins.nvrtc import Source, aligned

__all__ = ["fp8_block_amax", "fp8_block_to_nvfp4"]

BLOCK, GROUP, THREADS = 128, 16, 128
MAX_ELEMENTS = GROUP << 32
"""Blocks of 16 are counted in 32 bits."""
SOURCE = Source(Path(__file__).with_name("kernel.cu"))
Nvfp4Tensors = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("r1_pipeline::fp8_block_amax", mutates_args=(), device_types="cuda")
def fp8_block_amax(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Largest dequantised magnitude of each matrix, rounded to BF16."""
    grid = _checked(codes, scale_inv)
    out = torch.zeros(codes.shape[:-2], dtype=torch.float32, device=codes.device)
    if codes.numel():
        with torch.cuda.device(codes.device):
            tensors = (aligned(codes), aligned(scale_inv), out)
            SOURCE.module(EXACT=0).launch("fp8_block_amax", grid, THREADS, *tensors, *codes.shape[-2:])
    return out


@torch.library.custom_op("r1_pipeline::fp8_block_to_nvfp4", mutates_args=(), device_types="cuda")
def fp8_block_to_nvfp4(codes: Tensor, scale_inv: Tensor, amax: Tensor, exact: bool = False) -> Nvfp4Tensors:
    """weight U8 [B, n, k/2], weight_scale F8_E4M3 [B, n, k/16], weight_scale_2 F32 [B]"""
    grid = _checked(codes, scale_inv, amax)
    out = _outputs(codes)
    if codes.numel():
        with torch.cuda.device(codes.device):
            tensors = (aligned(codes), aligned(scale_inv), aligned(amax), *out)
            SOURCE.module(EXACT=int(exact)).launch("fp8_block_to_nvfp4", grid, THREADS, *tensors, *codes.shape[-2:])
    return out


@fp8_block_amax.register_fake
def _(codes: Tensor, scale_inv: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[:-2], dtype=torch.float32)


@fp8_block_to_nvfp4.register_fake
def _(codes: Tensor, scale_inv: Tensor, amax: Tensor, exact: bool = False) -> Nvfp4Tensors:
    return _outputs(codes)


@fp8_block_amax.register_kernel("cpu")
def _(codes: Tensor, scale_inv: Tensor) -> Tensor:
    _checked(codes, scale_inv)
    out = torch.zeros(codes.shape[:-2])
    for found, matrix, scales in zip(out.view(-1), *_matrices(codes, scale_inv), strict=True):
        found.fill_(float(reference.amax(_numpy(matrix), scales.numpy())))
    return out


@fp8_block_to_nvfp4.register_kernel("cpu")
def _(codes: Tensor, scale_inv: Tensor, amax: Tensor, exact: bool = False) -> Nvfp4Tensors:
    _checked(codes, scale_inv, amax)
    out = _outputs(codes)
    weight, weight_scale = _matrices(out[0], out[1])
    for index, (matrix, scales) in enumerate(zip(*_matrices(codes, scale_inv), strict=True)):
        stored = reference.quantize(_numpy(matrix), scales.numpy(), float(amax.view(-1)[index]), exact)
        weight[index], weight_scale.view(torch.uint8)[index] = (torch.from_numpy(array) for array in stored[:2])
        out[2].view(-1)[index] = float(stored[2])
    return out


def _outputs(codes: Tensor) -> Nvfp4Tensors:
    *batch, n, k = codes.shape
    return (
        codes.new_empty((*batch, n, k // 2), dtype=torch.uint8),
        codes.new_empty((*batch, n, k // GROUP), dtype=torch.float8_e4m3fn),
        codes.new_empty(batch, dtype=torch.float32),
    )


def _checked(codes: Tensor, scale_inv: Tensor, amax: Tensor | None = None) -> tuple[int, int, int]:
    """The grid of tiles, of tensors that the kernels can take."""
    if codes.dim() not in (2, 3) or codes.element_size() != 1 or codes.shape[-1] % GROUP:
        found = f"codes are {codes.dtype} {list(codes.shape)}"
        raise ConfigError(f"{found}, but must be one byte each, [B, n, k] or [n, k], with k a multiple of {GROUP}.")
    if codes.numel() >= MAX_ELEMENTS:
        raise ConfigError(f"{codes.numel()} weights in one call are too many: the kernels take fewer than {MAX_ELEMENTS}.")
    *batch, n, k = codes.shape
    tiles = (*batch, -(-n // BLOCK), -(-k // BLOCK))
    for name, tensor, shape in (("scale_inv", scale_inv, tiles), ("amax", amax, tuple(batch))):
        if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) != (shape, torch.float32, codes.device):
            found = f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise ConfigError(f"{found}, but codes {list(codes.shape)} need float32 {list(shape)} on {codes.device}.")
    return tiles[-1], tiles[-2], batch[0] if batch else 1


def _matrices(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous().view(-1, *tensor.shape[-2:]) for tensor in tensors]


def _numpy(codes: Tensor) -> reference.Array:
    return codes.view(torch.uint8).numpy()
