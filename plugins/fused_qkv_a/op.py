"""The way into latent attention as torch ops: CUDA runs the kernels, CPU the reference, and shapes are known to `torch.export`.

    qkv = torch.ops.r1_pipeline.qkv_a(x, weight)
    q_a = torch.ops.r1_pipeline.norm_rope_cache(qkv, q_norm, kv_norm, cos_sin, positions, slots, cache, kv_scale, eps)
    q_a = fused_qkv_a(x, weight, q_norm, ...)          # both

x BF16 [N, H], weight BF16 [Q + L + R, H]: 7168 to 1536 + 512 + 64 in DeepSeek-V3/R1 and Kimi-K2. Up to 32 tokens the product is
a kernel of ours, which loads its weights before it waits for x; beyond, cuBLAS. cache [S, L + R] in BF16 or E4M3 is written in
place, at slots I64 [N] (negative: not at all); positions I32 [N] are rows of cos_sin F32 [P, R]: cosines, then sines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.fused_qkv_a import reference
from plugins.nvrtc import Source, aligned
from plugins.router_gemm import op as gemm

__all__ = ["fused_qkv_a", "norm_rope_cache", "qkv_a"]

SOURCE = Source(Path(__file__).with_name("kernel.cu"))
FEW_TOKENS = 32
FP8 = torch.float8_e4m3fn
STORE = 8
"""Bytes that the second kernel writes at once: rows of the cache begin at multiples, if the first one does."""


@torch.library.custom_op("r1_pipeline::qkv_a", mutates_args=(), device_types="cuda")
def qkv_a(x: Tensor, weight: Tensor) -> Tensor:
    """BF16 x [N, H] and weight [Q + L + R, H] -> BF16 [N, Q + L + R]"""
    gemm.check(x, weight)
    if not 0 < len(x) <= FEW_TOKENS or not gemm.has_kernel(x, weight):
        return torch.nn.functional.linear(x, weight)
    out = x.new_empty((len(x), len(weight)))
    gemm.launch(aligned(x), aligned(weight), out)
    return out


@torch.library.custom_op("r1_pipeline::norm_rope_cache", mutates_args=("cache",), device_types="cuda")
def norm_rope_cache(
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
    """-> q_a BF16 [N, Q]; rows of the cache are written in place"""
    _check(qkv, q_norm, kv_norm, cos_sin, positions, slots, cache)
    if not has_kernel(q_norm, kv_norm, cache) or cache.data_ptr() % STORE:
        return reference.tail(qkv, q_norm, kv_norm, cos_sin, positions, slots, cache, kv_scale, eps)
    q_a = qkv.new_empty((len(qkv), len(q_norm)))
    if len(qkv):
        inputs = (aligned(tensor) for tensor in (qkv, q_norm, kv_norm, cos_sin, positions, slots))
        launch(*inputs, cache, q_a, kv_scale, eps)
    return q_a


def fused_qkv_a(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """x BF16 [N, H] -> q_a BF16 [N, Q], through both ops; `rest` is what the second takes after qkv."""
    return torch.ops.r1_pipeline.norm_rope_cache(torch.ops.r1_pipeline.qkv_a(x, weight), *rest)


def launch(
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    q_a: Tensor,
    kv_scale: float,
    eps: float,
    overlap: bool = False,
) -> None:
    """The second kernel alone, from and into `aligned` tensors.

    `overlap`: let it start while the kernel before it on the stream still runs.
    """
    q, latent, rope = len(q_norm), len(kv_norm), cache.shape[1] - len(kv_norm)
    with torch.cuda.device(qkv.device):
        module = SOURCE.module(**macros(q, latent, rope, cache.dtype == FP8))
        arguments = qkv, q_norm, kv_norm, cos_sin, positions, slots, cache, q_a, float(eps), 1.0 / kv_scale
        module.launch("norm_rope_cache", (len(qkv), 1, 1), threads(q, latent), *arguments, overlap=overlap)


def macros(q: int, latent: int, rope: int, fp8: bool) -> dict[str, int]:
    """What the second kernel is compiled with."""
    return {"Q": q, "LATENT": latent, "ROPE": rope, "FP8": int(fp8)}


def threads(q: int, latent: int) -> int:
    """Of its CTA: 8 values each, and a warp for the rope."""
    return (q + latent) // 8 + 32


def has_kernel(q_norm: Tensor, kv_norm: Tensor, cache: Tensor) -> bool:
    """Whether the second kernel takes these sizes."""
    return fits(len(q_norm), len(kv_norm), cache.shape[1] - len(kv_norm))


def fits(q: int, latent: int, rope: int) -> bool:
    """Whether it splits these sizes into warps."""
    return q % 256 == 0 and latent % 256 == 0 and rope % 8 == 0 and 0 < rope <= 256 and threads(q, latent) <= 1024


@qkv_a.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@qkv_a.register_kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    gemm.check(x, weight)
    return reference.qkv_a(x, weight)


@norm_rope_cache.register_fake
def _(qkv: Tensor, q_norm: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0], q_norm.shape[0]))


@norm_rope_cache.register_kernel("cpu")
def _(qkv: Tensor, *rest: Any) -> Tensor:
    _check(qkv, *rest[:6])
    return reference.tail(qkv, *rest)


def _check(qkv: Tensor, q_norm: Tensor, kv_norm: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> None:
    columns, rope = len(q_norm) + cache.shape[-1], cache.shape[-1] - len(kv_norm)
    if qkv.dim() != 2 or qkv.shape[1] != columns or {qkv.dtype, q_norm.dtype, kv_norm.dtype} != {torch.bfloat16}:
        found = f"qkv is {qkv.dtype} {list(qkv.shape)}, the norms {q_norm.dtype} and {kv_norm.dtype}"
        raise ConfigError(f"{found}: they must be bfloat16, and qkv [N, {columns}] for this cache and q_norm.")
    if cache.dim() != 2 or cache.dtype not in (torch.bfloat16, FP8) or not cache.is_contiguous():
        found = f"cache is {cache.dtype} {list(cache.shape)}"
        raise ConfigError(f"{found}: it must be bfloat16 or float8_e4m3fn [S, L + R], contiguous.")
    if (cos_sin.dtype, cos_sin.shape[1], positions.dtype, slots.dtype) != (torch.float32, rope, torch.int32, torch.int64):
        found = f"cos_sin {cos_sin.dtype} {list(cos_sin.shape)}, positions {positions.dtype}, slots {slots.dtype}"
        raise ConfigError(f"{found}: they must be float32 [P, {rope}], int32 and int64.")
    if not positions.shape == slots.shape == (len(qkv),):
        raise ConfigError(f"positions are {list(positions.shape)} and slots {list(slots.shape)}: they must be [{len(qkv)}], both.")
