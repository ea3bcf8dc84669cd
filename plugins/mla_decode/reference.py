"""The attention that the kernels must reproduce, in float64 torch, one sequence after the other.

A sequence of length S has its latents in pages of a shared cache: token t is row t % page of page table[t // page]. Each row is
latent | rope. A head's score of token t is q · row_t * scale over all D columns, its output the softmax-weighted sum of the
latents alone. Of `T` queries the last one is at the sequence's last token, and each sees no token after its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mla_decode"]


def mla_decode(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int, kv_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """q [B, T, A, D], cache [pages, page, D], table [B, P], lengths [B] -> out F64 [B, T, A, latent], lse F64 [B, T, A].

    The cache's elements stand for themselves times kv_scale. Nothing to see: zeros, and a logarithm of the sum of -inf.
    """
    outs, sums = [], []
    for queries, pages, length in zip(q.double(), table.long(), lengths.tolist(), strict=True):
        rows = cache[pages[: -(-length // cache.shape[1])]].flatten(0, 1)[:length].double() * kv_scale
        scores = queries @ rows.t() * scale  # [T, A, S]
        last = torch.arange(length - len(queries), length, device=q.device).view(-1, 1, 1)
        unseen = torch.arange(length, device=q.device) > last
        scores = scores.masked_fill(unseen, float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(unseen, 0)
        outs.append(weights @ rows[:, :latent])
        sums.append(lse)
    if not outs:
        return q.new_zeros((*q.shape[:-1], latent), dtype=torch.float64), q.new_zeros(q.shape[:-1], dtype=torch.float64)
    return torch.stack(outs), torch.stack(sums)
