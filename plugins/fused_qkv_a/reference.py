"""What the kernels must reproduce: float32 arithmetic, rounded to BF16 where a tensor would be written.

    q | latent | k_rope = x @ weight.t()                          [N, Q + L + R] in BF16
    q_a    = bf16(q / rms(q)) * q_norm                            [N, Q] in BF16; rms(v) = sqrt(mean(v^2) + eps)
    cached = bf16(latent / rms(latent)) * kv_norm | rotate(k_rope)     [N, L + R] in BF16, or E4M3 of that / kv_scale

`rotate` turns the pairs (2i, 2i + 1) by a token's angles and puts the first elements of all pairs before the second ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["norm", "qkv_a", "rotate", "tail"]


def qkv_a(x: Tensor, weight: Tensor) -> Tensor:
    """BF16 [N, H] and [Q + L + R, H] -> BF16 [N, Q + L + R]"""
    return (x.float() @ weight.float().t()).bfloat16()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of BF16 [N, D], rounded before it is weighted, as in DeepSeek-V3's published code"""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).bfloat16() * weight


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x BF16 [N, R], cos_sin F32 [N, R]: cosines, then sines -> BF16 [N, R]"""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()


def tail(
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    kv_scale: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """qkv BF16 [N, Q + L + R] -> q_a BF16 [N, Q], and row slots[n] of cache [S, L + R] is written where it is not negative."""
    rope = cache.shape[1] - len(kv_norm)
    q, latent, k_rope = qkv.split((len(q_norm), len(kv_norm), rope), dim=-1)
    row = torch.cat((norm(latent, kv_norm, eps), rotate(k_rope, cos_sin[positions.long()])), dim=-1)
    if cache.dtype == torch.float8_e4m3fn:
        row = (row.float() * (1 / kv_scale)).clamp(-448, 448).to(cache.dtype)
    written = slots >= 0
    cache.view(torch.uint8).index_copy_(0, slots[written].long(), row[written].view(torch.uint8))
    return norm(q, q_norm, eps).contiguous()
