"""The quantisation that every kernel must reproduce to the bit, in float32 torch.

FP8, groups of 128 along a row (amax: a group's largest magnitude, at least 2^-33):
    scale = amax / 448            code = e4m3(x * (448 / amax))
NVFP4, groups of 16, with a static `input_scale` for the whole tensor (calibrated amax / 2688):
    scale = e4m3(amax * (1 / (6 * input_scale))), clamped to [2^-9, 448]; 1 for a group of zeros
    code  = e2m1(x * (1 / (scale * input_scale)))
Both round to nearest, ties to even, and saturate. A NaN makes its group NaN when it is dequantised. Infinity makes a group of
FP8 NaN, in NVFP4 it saturates. Products by reciprocals, as in TensorRT-LLM's quantisers, and not `pipeline.formats.nvfp4`'s
divisions: codes and scales differ from it in rare ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fp8_dequantize", "fp8_quantize", "nvfp4_dequantize", "nvfp4_quantize", "tile_scales"]

FP8 = torch.float8_e4m3fn
FP8_GROUP, NVFP4_GROUP = 128, 16
LEAST_AMAX = 2.0**-33
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Where codes change; ties go to the even one."""


def fp8_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x BF16 [N, K] -> codes E4M3 [N, K], scales F32 [N, K/128]"""
    groups = x.float().unflatten(-1, (-1, FP8_GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX)
    largest = torch.full_like(amax, 448)  # tensors, or torch would make products by reciprocals of the divisions
    codes = (groups * (largest / amax)).clamp(-448, 448).to(FP8)
    return codes.flatten(-2), (amax / largest).squeeze(-1)


def fp8_dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """-> BF16 [N, K]"""
    groups = codes.float().unflatten(-1, (-1, FP8_GROUP))
    return (groups * scales.unsqueeze(-1)).flatten(-2).bfloat16()


def nvfp4_quantize(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """x BF16 [N, K] -> codes U8 [N, K/2], the even element in the low nibble, and scales E4M3 [N, K/16]"""
    groups = x.float().unflatten(-1, (-1, NVFP4_GROUP))
    wanted = groups.abs().amax(-1) * (1 / (6 * input_scale))
    scales = wanted.masked_fill(wanted == 0, 1.0).clamp(2.0**-9, 448).to(FP8)
    codes = e2m1(groups * (1 / (scales.float() * input_scale)).unsqueeze(-1)).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def nvfp4_dequantize(codes: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """-> BF16 [N, K]"""
    unpacked = decode_e2m1(torch.stack((codes & 15, codes >> 4), dim=-1)).flatten(-2)
    whole = (scales.float() * scale_2).unsqueeze(-1)
    return (unpacked.unflatten(-1, (-1, NVFP4_GROUP)) * whole).flatten(-2).bfloat16()


def tile_scales(scales: Tensor) -> Tensor:
    """Scales [N, C], bytes -> [pad128(N), pad4(C)], in the order in which tensor cores read them, zeros beyond.

    Tiles of 128 rows by 4 columns; within one, rows r, r + 32, r + 64 and r + 96 lie side by side (cuBLAS' 128x4 layout).
    """
    rows, columns = scales.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8, device=scales.device)
    padded[:rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape).view(scales.dtype)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Float32 values of codes U8: a mantissa bit below 1 counts halves, beyond it the exponent doubles 1 and 1.5."""
    size, sign = (codes & 7).float(), 1 - (codes >> 3).float() * 2
    large = torch.exp2((codes >> 1 & 3).float() - 1) * (1 + (codes & 1).float() / 2)
    return torch.where(size < 2, size / 2, large) * sign


def e2m1(values: Tensor) -> Tensor:
    """Codes U8 of float32 values, saturated; NaN is 6."""
    size = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for index, bound in enumerate(E2M1_BOUNDS):
        code += (size >= bound if index % 2 else size > bound).byte()
    return code.masked_fill(values.isnan(), 7) | torch.signbit(values).byte() << 3
