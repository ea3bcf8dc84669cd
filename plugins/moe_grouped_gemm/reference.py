"""The mixture of experts that the kernels must reproduce, in float64 torch, one token and expert after the other.

Expert e of token t gives `down_e(silu(gate) * up)`, gate and up being the halves of `gate_up_e(x_t)`; a token's result is the
sum over its K experts, each times its weight. Experts outside [first_expert, first_expert + E) are other ranks': they add nothing.

    FP8     x and silu(gate) * up are quantised in groups of 128 along a row, as `plugins.quantize` does; weights are E4M3 times
            a float32 scale for each 128x128
    NVFP4   x is BF16, silu(gate) * up is rounded to BF16; weights are E2M1 times an E4M3 scale for each 1x16 times the expert's

A NaN in a row of x makes that token NaN, and no other; so does infinity in FP8. In NVFP4 infinity is multiplied as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from plugins.quantize.reference import FP8_GROUP, NVFP4_GROUP, decode_e2m1, fp8_quantize

__all__ = ["Weights", "experts", "fp8_weight", "nvfp4_weight", "rounded", "through_fp8", "weight_of"]

Weights = tuple[Tensor, ...]
"""FP8: codes E4M3 [E, n, k], scales F32 [E, n/128, k/128]. NVFP4: codes U8 [E, n, k/2], scales E4M3 [E, n, k/16] and F32 [E]."""


def experts(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Weights, down: Weights, first_expert: int = 0) -> Tensor:
    """x [T, H], indices and weights [T, K], gate_up [E, 2I, H], down [E, H, I] -> F64 [T, H]"""
    nvfp4, out = len(gate_up) == 3, torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, chosen in enumerate((indices - first_expert).tolist()):
        for place, number in enumerate(chosen):
            if 0 <= number < len(gate_up[0]):
                gate, up = (rounded(x[token], nvfp4) @ weight_of(gate_up, number).t()).chunk(2)
                inner = rounded(silu(gate) * up, nvfp4)
                out[token] += weights[token, place].double() * (inner @ weight_of(down, number).t())
    return out


def weight_of(weights: Weights, expert: int) -> Tensor:
    """One expert's matrix in float64."""
    return (nvfp4_weight if len(weights) == 3 else fp8_weight)(*(part[expert] for part in weights))


def rounded(rows: Tensor, nvfp4: bool) -> Tensor:
    """Activations as the products take them, in float64."""
    return rows.bfloat16().double() if nvfp4 else through_fp8(rows)


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
