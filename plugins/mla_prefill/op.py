"""Causal attention of packed sequences with keys and values of each head, as torch ops.

    out, lse = torch.ops.r1_pipeline.mla_prefill(q, k, v, cu_q, cu_k, scale)
    out, lse = torch.ops.r1_pipeline.mla_prefill_kv(q, kv, k_rope, cu_q, cu_k, scale)       # the same, from kv_b's product as it is

q BF16 [Tq, A, 192], k [Tk, A, 192], v [Tk, A, 128]; or kv [Tk, A, 256] (k_nope 128 | v) and k_rope [Tk, 64] of all heads, which
spares the copy that joins them. cu_q, cu_k I32 [B + 1]: sequence b is rows cu[b] .. cu[b + 1] - 1; its last query is at its last
key (keys of earlier chunks come first). cu_q ends at Tq, and cu_k at Tk where Tk = Tq, which is not asked of the device: one
sequence is told by it. -> out BF16 [Tq, A, 128], lse F32 [A, Tq] (natural logarithm; -inf, and zeros: no key).

The kernel needs sm_90 and these widths; other cases are computed in plain torch, which waits for the device. Its work is found
on the device, so a step can be captured in a graph. No sequence is split: few heads and few queries leave the chip idle. What
is NaN or infinite in a key spoils the queries that see it; in a value, queries of the same block of 128, too, that do not.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.mla_prefill import reference, tactics
from plugins.nvrtc import Source, heads_matrix, processors, tensor_map

__all__ = ["has_kernel", "launch", "mla_prefill", "mla_prefill_kv"]

SOURCE = Source(Path(__file__).with_name("sm90_kernel.cu"))
NOPE, ROPE, VALUES = 128, 64, 128
ROWS = 128
"""Queries of a CTA, and keys of a block."""
THREADS, SHARED = 384, 3 * ROWS * 128 + 2 * 5 * ROWS * 128 + 256 + 1024
"""Threads of a CTA; bytes of its queries, two blocks of keys and values, barriers, and their alignment."""
L2_BYTES = 32 << 20
"""Keys and values that are in use at a time."""
NOWHERE = ctypes.c_void_p(None)


@torch.library.custom_op("r1_pipeline::mla_prefill", mutates_args=(), device_types="cuda")
def mla_prefill(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """-> out BF16 [Tq, A, V], lse F32 [A, Tq]"""
    _check(q, k, v, cu_q, cu_k, scale)
    if not has_kernel(q, ROPE, v.shape[2]) or not len(k):
        return _plain(q, k, v, cu_q, cu_k, scale)
    name = _fastest(q, k, cu_q)

    def theirs() -> tuple[Tensor, Tensor]:
        rows = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        return tactics.THEIRS[name](*rows, cu_q.contiguous(), cu_k.contiguous(), scale)

    return tactics.TABLE.attempt(name, theirs, lambda: _ours(q, k[..., :NOPE], k[..., NOPE:], v, cu_q, cu_k, scale))


@torch.library.custom_op("r1_pipeline::mla_prefill_kv", mutates_args=(), device_types="cuda")
def mla_prefill_kv(
    q: Tensor, kv: Tensor, k_rope: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """-> out BF16 [Tq, A, V], lse F32 [A, Tq]"""
    _check_kv(q, kv, k_rope)
    _check_ends(cu_q, cu_k, scale)
    values = kv.shape[2] - q.shape[2] + k_rope.shape[1]
    if not has_kernel(q, k_rope.shape[1], values) or not len(kv):
        return _plain(q, *reference.joined(q, kv, k_rope), cu_q, cu_k, scale)
    return _ours(q, kv[..., :NOPE], k_rope.unsqueeze(1), kv[..., NOPE:], cu_q, cu_k, scale)


def _ours(
    q: Tensor, key: Tensor, rope: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The kernel's results, of what `launch` takes."""
    out, lse = _outputs(q, VALUES)
    launch(q, key, rope, value, cu_q, cu_k, out, lse, scale)
    return out, lse


def launch(
    q: Tensor,
    key: Tensor,
    rope: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    overlap: bool = False,
) -> None:
    """The kernel alone: key [Tk, A, 128], rope [Tk, A or 1, 64], value [Tk, A, 128], views of anything.

    `overlap`: let it start while the kernel before it on the stream still runs.
    """
    rows, heads, _ = q.shape
    sequences, many = len(cu_q) - 1, processors(q.device)
    matrices = [heads_matrix(x) for x in (q, key, rope, value)]
    maps = (tensor_map(matrix, ROWS) for matrix, _ in matrices)
    pitches = (pitch for _, pitch in matrices)
    pieces = (-(-rows // ROWS) + sequences) * heads
    with torch.cuda.device(q.device):
        ends = cu_q.contiguous(), cu_k.contiguous()
        taken = torch.zeros(1, dtype=torch.int32, device=q.device) if pieces > many else NOWHERE
        arguments = *maps, *ends, out, lse, taken, sequences, heads, rows, *pitches, scale / math.log(2)
        module = SOURCE.module(L2_BYTES=L2_BYTES)
        module.launch("mla_prefill", (min(pieces, many), 1, 1), THREADS, *arguments, overlap=overlap, shared=SHARED)


def has_kernel(q: Tensor, rope: int, values: int) -> bool:
    """Whether the kernel takes these widths on this device, and has something to do."""
    widths = q.shape[2] == NOPE + ROPE and rope == ROPE and values == VALUES
    return widths and q.numel() > 0 and torch.cuda.get_device_capability(q.device) == (9, 0)


def _fastest(q: Tensor, k: Tensor, cu_q: Tensor) -> str:
    """Of the implementations that take these shapes, the measured choice."""
    batch = max(1, len(cu_q) - 1)
    sizes = q.shape[1], batch, max(1, len(q) // batch), max(1, len(k) // batch)
    names = tactics.present(alone=len(cu_q) == 2 and len(q) == len(k) and len(q) % ROWS == 0)
    return tactics.TABLE.choose((torch.cuda.get_device_name(q.device),), sizes, names)


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
    _check_ends(cu_q, cu_k, scale)


def _check_ends(cu_q: Tensor, cu_k: Tensor, scale: float) -> None:
    if (cu_q.dtype, cu_k.dtype) != (torch.int32, torch.int32) or cu_q.dim() != 1 or cu_q.shape != cu_k.shape or not len(cu_q):
        found = f"cu_q is {cu_q.dtype} {list(cu_q.shape)}, cu_k {cu_k.dtype} {list(cu_k.shape)}"
        raise ConfigError(f"{found}: they must be int32 [B + 1], both.")
    if not scale > 0:
        raise ConfigError(f"The softmax scale {scale} must be above 0.")


def _check_kv(q: Tensor, kv: Tensor, k_rope: Tensor) -> None:
    fits = q.dim() == kv.dim() == 3 and k_rope.dim() == 2 and len(k_rope) == len(kv) and kv.shape[1] == q.shape[1]
    widths = fits and k_rope.shape[1] <= q.shape[2] < kv.shape[2] + k_rope.shape[1]
    if not widths or {q.dtype, kv.dtype, k_rope.dtype} != {torch.bfloat16}:
        found = ", ".join(f"{name} is {x.dtype} {list(x.shape)}" for name, x in (("q", q), ("kv", kv), ("k_rope", k_rope)))
        raise ConfigError(f"{found}: they must be bfloat16 [Tq, A, N + R], [Tk, A, N + V] and [Tk, R].")
