"""The attention that the kernel must reproduce, in float64 torch, one sequence after the other.

Sequence b has queries cu_q[b] .. cu_q[b + 1] - 1 and keys cu_k[b] .. cu_k[b + 1] - 1 of what is packed; its last query is at its
last key, and none sees a key after its own. So queries may be the last chunk of a sequence, and where there are more of them
than keys, the first see nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["joined", "mla_prefill"]


def mla_prefill(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [Tq, A, D], k [Tk, A, D], v [Tk, A, V], cu_q and cu_k [B + 1] -> out F64 [Tq, A, V], lse F64 [A, Tq].

    lse is the natural logarithm of the sum of exponentials. Nothing to see: zeros, and -inf.
    """
    out = q.new_zeros((len(q), q.shape[1], v.shape[2]), dtype=torch.float64)
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.float64)
    bounds = zip(*(cu[side].tolist() for cu in (cu_q, cu_k) for side in (slice(None, -1), slice(1, None))), strict=True)
    for first_q, last_q, first_k, last_k in bounds:
        queries, keys = slice(first_q, last_q), slice(first_k, last_k)
        scores = torch.einsum("tad,sad->ats", q[queries].double(), k[keys].double()) * scale
        rows, columns = scores.shape[1:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse[:, queries] = scores.logsumexp(-1)
        weights = (scores - lse[:, queries].unsqueeze(-1)).exp().masked_fill(~seen, 0)
        out[queries] = torch.einsum("ats,sav->tav", weights, v[keys].double())
    return out, lse


def joined(q: Tensor, kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """kv [Tk, A, N + V] (k_nope | v) and k_rope [Tk, R], which all heads share -> k [Tk, A, N + R], v [Tk, A, V]; q has N + R"""
    k_nope, v = kv.split((q.shape[2] - k_rope.shape[1], kv.shape[2] - q.shape[2] + k_rope.shape[1]), -1)
    return torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, kv.shape[1], -1)), -1), v
