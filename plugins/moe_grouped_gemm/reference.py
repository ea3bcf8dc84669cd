"""The mixture of experts that the kernels must reproduce, in float64 torch, one token and expert after the other.

Expert e of token t gives `down_e(silu(gate) * up)`, gate and up being the halves of `gate_up_e(x_t)`; a token's result is the
sum over its K experts, each times its weight. Experts outside [first_expert, first_expert + E) are other ranks': they add nothing.

    FP8     x and silu(gate) * up are quantised in groups of 128 along a row, as `plugins.quantize` does; weights are E4M3 times
            a float32 scale for each 128x128
    NVFP4   x is BF16, silu(gate) * up is rounded to BF16; weights are E2M1 times an E4M3 scale for each 1x16 times the expert's

A NaN in a row of x makes that token NaN, and no other; so does infinity in FP8. In NVFP4 infinity is multiplied as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plugins.quantize.reference import FP8_GROUP, NVFP4_GROUP, decode_e2m1, fp8_quantize

__all__ = ["fp8_weight", "moe_fp8_block", "moe_w4a16_nvfp4", "nvfp4_weight", "through_fp8"]


def moe_fp8_block(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    first_expert: int = 0,
) -> Tensor:
    """x [T, H], indices and weights [T, K], gate_up [E, 2I, H], down [E, H, I], scales [E, rows/128, columns/128] -> F64 [T, H]"""

    def expert(number: int, row: Tensor) -> Tensor:
        gate, up = (through_fp8(row) @ fp8_weight(gate_up[number], gate_up_scale[number]).t()).chunk(2)
        return through_fp8(torch.nn.functional.silu(gate) * up) @ fp8_weight(down[number], down_scale[number]).t()

    return _mixture(x, indices, weights, expert, first_expert, len(gate_up))


def moe_w4a16_nvfp4(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    first_expert: int = 0,
) -> Tensor:
    """gate_up U8 [E, 2I, H/2], down U8 [E, H, I/2], scales E4M3 [E, rows, columns/16], scales_2 F32 [E] -> F64 [T, H]"""

    def expert(number: int, row: Tensor) -> Tensor:
        first = nvfp4_weight(gate_up[number], gate_up_scale[number], gate_up_scale_2[number])
        gate, up = (row.double() @ first.t()).chunk(2)
        inner = (torch.nn.functional.silu(gate) * up).bfloat16().double()
        return inner @ nvfp4_weight(down[number], down_scale[number], down_scale_2[number]).t()

    return _mixture(x, indices, weights, expert, first_expert, len(gate_up))


def through_fp8(rows: Tensor) -> Tensor:
    """Quantised in groups of 128 and back, in float64."""
    codes, scales = fp8_quantize(rows)
    return (codes.double().unflatten(-1, (-1, FP8_GROUP)) * scales.double().unsqueeze(-1)).flatten(-2)


def fp8_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """E4M3 [n, k] times F32 [n/128, k/128], in float64."""
    return codes.double() * scales.double().repeat_interleave(FP8_GROUP, 0).repeat_interleave(FP8_GROUP, 1)


def nvfp4_weight(codes: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """U8 [n, k/2] of E2M1, the even element in the low nibble, times E4M3 [n, k/16] times F32 [], in float64."""
    values = decode_e2m1(torch.stack((codes & 15, codes >> 4), dim=-1)).flatten(-2).double()
    return (values.unflatten(-1, (-1, NVFP4_GROUP)) * scales.double().unsqueeze(-1)).flatten(-2) * scale_2.double()


def _mixture(
    x: Tensor, indices: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor], first_expert: int, experts: int
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, chosen in enumerate((indices - first_expert).tolist()):
        for place, number in enumerate(chosen):
            if 0 <= number < experts:
                out[token] += weights[token, place].double() * expert(number, x[token])
    return out
