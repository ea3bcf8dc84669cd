"""The layers that language models brought: quantisation, rotary embedding, cache, attention, mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pipeline.engines.tensorrt.interpreter.layers import wide
from pipeline.formats.numerics import E4M3, E4M3_MAX, Array, encode_e2m1, encode_e4m3

__all__ = ["SPECIAL"]

Values = Sequence[Any]
Lookup = Callable[[Any], Any]
_FP4 = np.dtype(ml_dtypes.float4_e2m1fn)


def _spread(scale: Array, shape: tuple[int, ...]) -> Array:
    """A scale a tensor or a block, as something that broadcasts to `shape`."""
    scale = scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(())
    for position, size in enumerate(shape):
        scale = np.repeat(scale, size // scale.shape[position], position)
    return scale


def _quantize(trt: Any, layer: Any, x: Values, lookup: Lookup) -> Array:
    scaled = x[0].astype(np.float32) / _spread(x[1], x[0].shape)
    if layer.get_output(0).dtype == trt.DataType.FP8:
        return encode_e4m3(scaled)
    return np.clip(np.rint(scaled), -128, 127).astype(np.int8)


def _dequantize(trt: Any, layer: Any, x: Values, lookup: Lookup) -> Array:
    value, scale = x[0].astype(np.float32), x[1].astype(np.float32)
    if scale.ndim == 1 and scale.size > 1:
        return value * scale.reshape([-1 if place == layer.axis else 1 for place in range(value.ndim)])
    return value * _spread(scale, value.shape)


def _dynamic_quantize(trt: Any, layer: Any, x: Values, lookup: Lookup) -> tuple[Array, Array]:
    """E2M1 in blocks of 16 along the last axis; the E4M3 scale is the block's largest magnitude over 6, in units of the scale."""
    static = x[1].astype(np.float32).reshape(())
    blocks = x[0].astype(np.float32).reshape(*x[0].shape[:-1], -1, 16)
    scales = encode_e4m3(np.minimum(np.abs(blocks).max(-1) / (6 * static), E4M3_MAX))
    divisor = scales.astype(np.float32)[..., None] * static
    codes = encode_e2m1(np.divide(blocks, divisor, out=np.zeros_like(blocks), where=divisor > 0))
    return codes.view(_FP4).reshape(x[0].shape), scales.astype(E4M3)


def _rotary(trt: Any, layer: Any, x: Values, lookup: Lookup) -> Array:
    value, cos, sin = wide(x[0]), wide(x[1])[x[3]][:, None], wide(x[2])[x[3]][:, None]
    assert layer.interleaved and layer.rotary_embedding_dim in (0, value.shape[-1]), layer.name
    first, second = value[..., 0::2], value[..., 1::2]
    return np.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(value.shape)


def _cache_update(trt: Any, layer: Any, x: Values, lookup: Lookup) -> Array:
    cache, new = x[0].copy(), x[1]
    for row, start in enumerate(x[2]):
        cache[row, :, start : start + new.shape[2]] = new[row]
    return cache


def _attention(trt: Any, layer: Any, x: Values, lookup: Lookup) -> Array:
    settings = layer.attention
    query, key, value = (wide(lookup(settings.get_input(index))) for index in range(3))
    groups = query.shape[1] // key.shape[1]
    scores = query @ np.repeat(key, groups, 1).swapaxes(-1, -2)
    scores = np.where(_visible(trt, settings, scores.shape, lookup), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ np.repeat(value, groups, 1)


def _visible(trt: Any, settings: Any, shape: tuple[int, ...], lookup: Lookup) -> Array:
    """Which keys each query sees, broadcast to [B, A, S, K]."""
    rows, _, queries, keys = shape
    lengths = lookup(settings.key_value_lengths)
    lengths = np.full(rows, keys) if lengths is None else lengths
    key, query = np.arange(keys), np.arange(queries)[:, None]
    seen = np.broadcast_to(key < lengths[:, None, None, None], (rows, 1, queries, keys))
    if settings.causal_kind == trt.CausalMaskKind.LOWER_RIGHT:
        seen = seen & (key <= query + (lengths - queries)[:, None, None, None])
    elif settings.causal_kind == trt.CausalMaskKind.UPPER_LEFT:
        seen = seen & (key <= query)
    mask = lookup(settings.mask)
    return seen if mask is None else seen & mask


def _moe(trt: Any, layer: Any, x: Values, lookup: Lookup) -> Array:
    """Hidden [1, N, H], experts and shares [1, N, K], gate and up [E, H, I], down [E, I, H]; SwiGLU. Last, with FP8, the scale of
    the argument of `down`."""
    hidden, experts, shares, gate, up, down = (wide(value) for value in x[:6])
    scale = x[9] if len(x) > 9 else None
    out = np.zeros(hidden.shape, np.float32)
    for place in np.ndindex(*experts.shape):
        row, expert = hidden[place[:2]], experts[place]
        gated = row @ gate[expert]
        inner = gated / (1 + np.exp(-gated)) * (row @ up[expert])
        if scale is not None:
            inner = encode_e4m3(inner / scale).astype(np.float32) * scale
        out[place[:2]] += shares[place] * (inner @ down[expert])
    return out


SPECIAL: dict[str, Callable[[Any, Any, Values, Lookup], Any]] = {
    "QUANTIZE": _quantize, "DEQUANTIZE": _dequantize, "DYNAMIC_QUANTIZE": _dynamic_quantize, "ROTARY_EMBEDDING": _rotary,
    "KV_CACHE_UPDATE": _cache_update, "ATTENTION_OUTPUT": _attention, "MOE": _moe,
}  # fmt: skip
"""Layer type -> its function; `lookup` gives the value of a tensor, None for None."""
