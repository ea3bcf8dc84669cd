"""Causal attention of packed sequences with keys and values of each head, as torch ops.

    out, lse = torch.ops.r1_pipeline.mla_prefill(q, k, v, cu_q, cu_k, scale)
    out, lse = torch.ops.r1_pipeline.mla_prefill_kv(q, kv, k_rope, cu_q, cu_k, scale)       # the same, from kv_b's product as it is

q BF16 [Tq, A, 192], k [Tk, A, 192], v [Tk, A, 128]; or kv [Tk, A, 256] (k_nope 128 | v) and k_rope [Tk, 64] of all heads, which
spares the copy that joins them. cu_q, cu_k I32 [B + 1]: sequence b is rows cu[b] .. cu[b + 1] - 1; its last query is at its last
key (keys of earlier chunks come first). -> out BF16 [Tq, A, 128], lse F32 [A, Tq] (natural logarithm; -inf, and zeros: no key).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.mla_prefill import reference

__all__ = ["mla_prefill", "mla_prefill_kv"]


@torch.library.custom_op("r1_pipeline::mla_prefill", mutates_args=(), device_types="cuda")
def mla_prefill(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """-> out BF16 [Tq, A, V], lse F32 [A, Tq]"""
    _check(q, k, v, cu_q, cu_k, scale)
    return _plain(q, k, v, cu_q, cu_k, scale)


@torch.library.custom_op("r1_pipeline::mla_prefill_kv", mutates_args=(), device_types="cuda")
def mla_prefill_kv(
    q: Tensor, kv: Tensor, k_rope: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """-> out BF16 [Tq, A, V], lse F32 [A, Tq]"""
    _check_kv(q, kv, k_rope)
    return mla_prefill(q, *reference.joined(q, kv, k_rope), cu_q, cu_k, scale)


@mla_prefill.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, v.shape[2])


@mla_prefill_kv.register_fake
def _(q: Tensor, kv: Tensor, k_rope: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, kv.shape[2] - q.shape[2] + k_rope.shape[1])


@mla_prefill.register_kernel("cpu")
def _plain(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v, cu_q, cu_k, scale)
    out, lse = reference.mla_prefill(q, k, v, cu_q, cu_k, scale)
    return out.bfloat16(), lse.float()


@mla_prefill_kv.register_kernel("cpu")
def _(q: Tensor, kv: Tensor, k_rope: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _check_kv(q, kv, k_rope)
    return _plain(q, *reference.joined(q, kv, k_rope), cu_q, cu_k, scale)


def _outputs(q: Tensor, values: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], values)), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> None:
    fits = q.dim() == k.dim() == v.dim() == 3 and k.shape[1:] == q.shape[1:] and v.shape[:2] == k.shape[:2]
    if not fits or {q.dtype, k.dtype, v.dtype} != {torch.bfloat16}:
        found = ", ".join(f"{name} is {x.dtype} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ConfigError(f"{found}: they must be bfloat16 [Tq, A, D], [Tk, A, D] and [Tk, A, V].")
    if (cu_q.dtype, cu_k.dtype) != (torch.int32, torch.int32) or cu_q.dim() != 1 or cu_q.shape != cu_k.shape or not len(cu_q):
        found = f"cu_q is {cu_q.dtype} {list(cu_q.shape)}, cu_k {cu_k.dtype} {list(cu_k.shape)}"
        raise ConfigError(f"{found}: they must be int32 [B + 1], both.")
    if not scale > 0:
        raise ConfigError(f"The softmax scale {scale} must be above 0.")


def _check_kv(q: Tensor, kv: Tensor, k_rope: Tensor) -> None:
    fits = q.dim() == kv.dim() == 3 and k_rope.dim() == 2 and len(k_rope) == len(kv) and k_rope.dtype == torch.bfloat16
    if not fits or k_rope.shape[1] > q.shape[2] or kv.shape[2] <= q.shape[2] - k_rope.shape[1]:
        found = f"q is {list(q.shape)}, kv {list(kv.shape)}, k_rope {k_rope.dtype} {list(k_rope.shape)}"
        raise ConfigError(f"{found}: they must be bfloat16 [Tq, A, N + R], [Tk, A, N + V] and [Tk, R].")
