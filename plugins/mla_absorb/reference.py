"""The two products, a head at a time, in float32: T tokens, A heads, N columns without RoPE and R with, L latents, V values."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["absorb_output", "absorb_query"]


def absorb_query(q: Tensor, w_uk: Tensor) -> Tensor:
    """q [T, A, N + R] and w_uk [A, N, L] -> F32 [T, A, L + R]: q's first N columns times the head's weight | its last R columns"""
    nope, rope = q.float().split((w_uk.shape[1], q.shape[2] - w_uk.shape[1]), -1)
    return torch.cat((torch.einsum("tan,anl->tal", nope, w_uk.float()), rope), -1)


def absorb_output(latent: Tensor, w_uv: Tensor) -> Tensor:
    """latent [T, A, L] and w_uv [A, V, L] -> F32 [T, A, V]"""
    return torch.einsum("tal,avl->tav", latent.float(), w_uv.float())
