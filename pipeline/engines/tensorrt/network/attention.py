"""Multi-head latent attention in TensorRT layers, over a cache of latents [B, 1, M, L + R] that is written in place.

Shape legend: B rows, S tokens a row, M rows of the cache, A heads, L kv_lora, R rope, D = L + R, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.linear import Named, Stored, linear
from pipeline.engines.tensorrt.network.norm import rms_norm
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.plugins import offered
from pipeline.engines.tensorrt.weights import Weights

__all__ = ["Where", "attention", "compute_type", "rope_tables"]


@dataclass(frozen=True, slots=True)
class Where:
    """What every layer of one network shares."""

    cos: Tensor
    sin: Tensor
    """[M, R/2]"""
    positions: Tensor
    """[B, S]; where padding stands does not matter, its results are not read."""
    starts: Tensor
    """[B], first row of the cache that this step writes."""
    lengths: Tensor
    """[B], starts + S."""
    keys: Tensor | None
    """INT64 [1], rows of the cache that any row of the batch can see (expanded)."""
    mask: Tensor | None
    """[B, 1, S * A, M], what each folded query sees (absorbed, for more than one token)."""


def rope_tables(net: Graph, spec: Spec) -> tuple[Tensor, Tensor]:
    """Cos and sin, each [M, R/2]."""
    angles = np.outer(np.arange(spec.max_seq_len), np.array(spec.arch.inv_freq()))
    factor, dtype = spec.arch.attention_factor, net.numpy[compute_type(net, spec)]
    return net.constant((np.cos(angles) * factor).astype(dtype)), net.constant((np.sin(angles) * factor).astype(dtype))


def compute_type(net: Graph, spec: Spec) -> object:
    """TensorRT's type of activations."""
    return {"bfloat16": net.trt.DataType.BF16, "float32": net.trt.DataType.FLOAT}[spec.dtype]


def attention(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, cache: Tensor, at: Where) -> tuple[Tensor, Tensor]:
    """[B, S, H] and the cache -> [B, S, H] and the cache with this step's latents."""
    arch = spec.arch
    q = rms_norm(net, linear(net, x, weights.matrix(f"{prefix}.q_a_proj")), weights.vector(f"{prefix}.q_a_layernorm"), arch)
    q = linear(net, q, weights.heads(f"{prefix}.q_b_proj", arch.qk_head_dim, spec))
    q = net.reshape(q, (0, 0, spec.heads, arch.qk_head_dim), after=(0, 2, 1, 3))
    q_rope = net.rope(net.last(q, arch.qk_nope_head_dim, arch.qk_head_dim), at.cos, at.sin, at.positions)
    q_nope = net.last(q, 0, arch.qk_nope_head_dim)
    cache = net.update_cache(cache, _latents(net, spec, weights, prefix, x, at), at.starts)
    kv_b = weights.dequantized_heads(f"{prefix}.kv_b_proj", arch.qk_nope_head_dim + arch.v_head_dim, spec)
    form = _absorbed if spec.form == "absorbed" else _expanded
    out = form(net, spec, q_nope, q_rope, cache, kv_b, at)
    out = net.reshape(out, (0, 0, spec.heads * arch.v_head_dim), before=(0, 2, 1, 3))
    return linear(net, out, weights.columns(f"{prefix}.o_proj", spec)), cache


def _latents(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, at: Where) -> Tensor:
    """[B, S, H] -> [B, 1, S, D], normalised latents and rotated keys."""
    arch = spec.arch
    kv = linear(net, x, weights.matrix(f"{prefix}.kv_a_proj_with_mqa"))
    latent = rms_norm(net, net.last(kv, 0, arch.kv_lora_rank), weights.vector(f"{prefix}.kv_a_layernorm"), arch)
    rope = net.reshape(net.last(kv, arch.kv_lora_rank, arch.latent_dim), (0, 1, -1, arch.qk_rope_head_dim))
    rope = net.rope(rope, at.cos, at.sin, at.positions)
    return net.concat([net.reshape(latent, (0, 1, -1, arch.kv_lora_rank)), rope], 3)


def _scaled(net: Graph, spec: Spec, query: Tensor) -> Tensor:
    """Times the softmax's scale, in float32: rounded to BF16 the scale would change every score by up to 0.4 %."""
    return net.cast(net.scale(net.float32(query), spec.arch.softmax_scale), query.dtype)


def _absorbed(net: Graph, spec: Spec, q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Named, at: Where) -> Tensor:
    """Queries [B, A, S, …] -> [B, A, S, v], over the latents of the cache."""
    arch = spec.arch
    w_uk, w_uv = np.split(kv_b.value[None], [arch.qk_nope_head_dim], axis=2)
    query = net.concat([net.matmul(q_nope, net.constant(w_uk, f"{kv_b.name}.uk")), q_rope], 3)
    if out := _one_kernel(net, spec, query, cache, at):
        return net.matmul(out, net.constant(w_uv, f"{kv_b.name}.uv"), transpose=True)
    folded = net.reshape(_scaled(net, spec, query), (0, 1, -1, arch.latent_dim), before=(0, 2, 1, 3))
    out = net.attention(folded, cache, cache, lengths=at.lengths if at.mask is None else None, mask=at.mask)
    out = net.last(net.reshape(out, (0, -1, spec.heads, arch.latent_dim), after=(0, 2, 1, 3)), 0, arch.kv_lora_rank)
    return net.matmul(out, net.constant(w_uv, f"{kv_b.name}.uv"), transpose=True)


def _one_kernel(net: Graph, spec: Spec, query: Tensor, cache: Tensor, at: Where) -> Tensor | None:
    """[B, A, S, D] -> [B, A, S, L] by a plugin, which scales queries itself, and lets each see what came before it."""
    arch = spec.arch
    if spec.dtype != "bfloat16":
        return None
    shapes = (-1, -1, spec.heads, arch.latent_dim), tuple(cache.shape), (-1,)
    attributes = {"scale": float(arch.softmax_scale), "latent": arch.kv_lora_rank, "kv_scale": 1.0}
    made = offered(net, "mla_decode", shapes, **attributes)
    return net.transpose(made(net.transpose(query, (0, 2, 1, 3)), cache, at.lengths)[0], (0, 2, 1, 3)) if made else None


def _expanded(net: Graph, spec: Spec, q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Named, at: Where) -> Tensor:
    """The same, over keys and values made from the latents."""
    arch = spec.arch
    latents = net.cut_to(cache, 2, at.keys)
    weight = kv_b.value.reshape(-1, arch.kv_lora_rank)
    flat = net.last(net.reshape(latents, (0, -1, arch.latent_dim)), 0, arch.kv_lora_rank)
    kv = linear(net, flat, Stored(kv_b.name.removesuffix(".weight"), "bf16", {"weight": weight}, weight.shape))
    kv = net.reshape(kv, (0, 0, spec.heads, -1), after=(0, 2, 1, 3))
    nope, value = net.last(kv, 0, arch.qk_nope_head_dim), net.last(kv, arch.qk_nope_head_dim, kv.shape[3])
    rope = net.expand(net.last(latents, arch.kv_lora_rank, arch.latent_dim), 1, spec.heads)
    key, query = net.concat([nope, rope], 3), net.concat([q_nope, q_rope], 3)
    value = net.pad_last(value, arch.qk_head_dim) if arch.v_head_dim < arch.qk_head_dim else value
    fused = spec.dtype == "bfloat16" and arch.qk_head_dim <= 256
    out = net.attention(_scaled(net, spec, query), key, value, lengths=at.lengths, causal=True, fused=fused)
    return net.last(out, 0, arch.v_head_dim)
