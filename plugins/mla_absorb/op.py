"""The products around absorbed attention as torch ops, without a transpose or a copy of any tensor.

    query = torch.ops.r1_pipeline.absorb_query(q, w_uk)
    out = torch.ops.r1_pipeline.absorb_output(latent, w_uv)

q BF16 [T, A, N + R] (RoPE applied), w_uk BF16 [A, N, L] -> query BF16 [T, A, L + R], as `mla_decode` takes it: q's first N columns
into the latent space, the last R as they are. latent BF16 [T, A, L], w_uv BF16 [A, V, L] -> BF16 [T, A, V]. Weights may be views of
kv_b's [A, N + V, L].

On CUDA the query's product is the faster of our kernel (sm_90, N = 128, L = 512, R = 64) and cuBLAS (`tactics`). The output's is
cuBLAS's: there is nothing else to do in it, and a kernel of ours was slower at every size, hot and cold. CPU runs the reference.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.mla_absorb import reference, tactics
from plugins.nvrtc import Source, heads_matrix, tensor_map
from plugins.tactics import OURS

__all__ = ["absorb_output", "absorb_query", "has_kernel", "launch"]

SOURCE = Source(Path(__file__).with_name("sm90_kernel.cu"))
NOPE, ROPE, LATENT = 128, 64, 512
TOKENS = 64
"""Of a tile of x."""
THREADS, SHARED = 160, 8 * TOKENS * 128 + 2 * 2 * TOKENS * 128 + 64 + 1024
"""Threads of a CTA; bytes of half a head's weight, two tiles of x, barriers, and their alignment."""


@torch.library.custom_op("r1_pipeline::absorb_query", mutates_args=(), device_types="cuda")
def absorb_query(q: Tensor, w_uk: Tensor) -> Tensor:
    """BF16 [T, A, N + R] and [A, N, L] -> [T, A, L + R]"""
    _check(q, w_uk, output=False)
    out, name = _query(q, w_uk), "bmm"
    if has_kernel(q, w_uk):
        name = tactics.TABLE.choose((torch.cuda.get_device_name(q.device),), (q.shape[1], len(q)), tactics.present())
    (launch if name == OURS else tactics.bmm_query)(q, w_uk, out)
    return out


@torch.library.custom_op("r1_pipeline::absorb_output", mutates_args=(), device_types="cuda")
def absorb_output(latent: Tensor, w_uv: Tensor) -> Tensor:
    """BF16 [T, A, L] and [A, V, L] -> [T, A, V]"""
    _check(latent, w_uv, output=True)
    out = _output(latent, w_uv)
    tactics.bmm_output(latent, w_uv, out)
    return out


def launch(x: Tensor, weight: Tensor, out: Tensor, overlap: bool = False) -> None:
    """The kernel alone: x [T, A, 192] and weight [A, 128, 512] to out [T, A, 576].

    `overlap`: let it start, and load its weights, while the kernel before it on the stream still runs.
    """
    tokens, heads, _ = x.shape
    matrix, columns = heads_matrix(x)
    rows, pitch = _weight_matrix(weight)
    maps = tensor_map(matrix, TOKENS), tensor_map(rows, TOKENS)
    with torch.cuda.device(x.device):
        arguments = *maps, matrix, out, tokens, heads, columns, matrix.stride(0), pitch
        SOURCE.module().launch("mla_absorb", (2 * heads, 1, 1), THREADS, *arguments, overlap=overlap, shared=SHARED)


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these widths on this device, and has something to do."""
    widths = x.shape[2] == NOPE + ROPE and weight.shape[1:] == (NOPE, LATENT)
    return widths and x.numel() > 0 and torch.cuda.get_device_capability(x.device) == (9, 0)


@absorb_query.register_fake
def _query(q: Tensor, w_uk: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:2], w_uk.shape[2] + q.shape[2] - w_uk.shape[1]))


@absorb_output.register_fake
def _output(latent: Tensor, w_uv: Tensor) -> Tensor:
    return latent.new_empty((*latent.shape[:2], w_uv.shape[1]))


@absorb_query.register_kernel("cpu")
def _(q: Tensor, w_uk: Tensor) -> Tensor:
    _check(q, w_uk, output=False)
    return reference.absorb_query(q, w_uk).bfloat16().contiguous()


@absorb_output.register_kernel("cpu")
def _(latent: Tensor, w_uv: Tensor) -> Tensor:
    _check(latent, w_uv, output=True)
    return reference.absorb_output(latent, w_uv).bfloat16().contiguous()


def _weight_matrix(weight: Tensor) -> tuple[Tensor, int]:
    """weight [A, N, L] as a matrix of rows, and the rows from one head to the next; copied only where it must be."""
    heads, height, width = weight.shape
    head, row, one = weight.stride()
    if one != 1 or row % 8 or row < width or head % row or head < height * row or weight.data_ptr() % 16:
        weight = weight.clone(memory_format=torch.contiguous_format)
        head, row, _ = weight.stride()
    return weight.as_strided(((heads - 1) * (head // row) + height, width), (row, 1)), head // row


def _check(x: Tensor, weight: Tensor, output: bool) -> None:
    heads = x.dim() == weight.dim() == 3 and len(weight) == x.shape[1]
    fits = heads and (x.shape[2] == weight.shape[2] if output else x.shape[2] >= weight.shape[1])
    if not fits or {x.dtype, weight.dtype} != {torch.bfloat16}:
        found = f"x is {x.dtype} {list(x.shape)} and weight {weight.dtype} {list(weight.shape)}"
        raise ConfigError(f"{found}: they must be bfloat16 [T, A, N + R] and [A, N, L], or [T, A, L] and [A, V, L].")
