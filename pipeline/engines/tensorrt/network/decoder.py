"""One step of the model as a network: write the tokens' latents into the caches, return logits of the rows asked for.

Inputs                                              outputs
    tokens      INT32 [B, S]                            logits    float32 [L, V]
    or hidden   [B, S, H], from the segment before      or states [B, S, H], the hidden of the segment after (and of the MTP layer)
    positions   INT32 [B, S]                            present.i the caches, in place
    starts      INT32 [B]                               dropped   INT32 [1], see `moe.py`
    logit_rows  INT32 [L], into the B * S tokens
    keys        INT64 [1], rows of the cache in sight (expanded form)
    cache.i     [B, 1, M, D], one a layer

The MTP network takes both the next tokens and the hidden states of the tokens before them.
"""

from __future__ import annotations

import numpy as np

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.attention import Where, attention, compute_type, rope_tables
from pipeline.engines.tensorrt.network.collectives import all_reduce
from pipeline.engines.tensorrt.network.linear import linear
from pipeline.engines.tensorrt.network.moe import moe
from pipeline.engines.tensorrt.network.norm import rms_norm, swiglu
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.weights import Weights

__all__ = ["define"]


def define(net: Graph, spec: Spec, weights: Weights) -> None:
    """Fill `net` with the network that `spec` describes."""
    at = _where(net, spec)
    x = _entry(net, spec, weights)
    dropped: list[Tensor] = []
    for number in spec.layers:
        with net.scope(f"layers.{number}"):
            x = _layer(net, spec, weights, number, x, at, dropped)
    _exit(net, spec, weights, x)
    if dropped:
        total = dropped[0]
        for more in dropped[1:]:
            total = net.add(total, more)
        net.output(total, "dropped")


def _range(spec: Spec, *rest: int, tokens: bool = False) -> tuple[list[int], list[int], list[int]]:
    """Least, usual and largest shape of an input over rows, and tokens of a row."""
    usual = max(spec.max_tokens // 2, 1)
    shapes = ((1, 1), (max(spec.max_batch // 2, 1), usual), (spec.max_batch, spec.max_tokens))
    least, middle, most = ([batch, *([count] if tokens else []), *rest] for batch, count in shapes)
    return least, middle, most


def _where(net: Graph, spec: Spec) -> Where:
    """The inputs that all layers read, and what follows from them."""
    kinds = net.trt.DataType
    positions = net.input("positions", kinds.INT32, (-1, -1), range=_range(spec, tokens=True))
    starts = net.input("starts", kinds.INT32, (-1,), range=_range(spec))
    with net.scope("where"):
        lengths = net.add(starts, net.cast(net.cut(net.shape(positions), 0, 1, 2), kinds.INT32))
        keys = mask = None
        if spec.form == "expanded":
            keys = net.shape_input("keys", (1, max(spec.max_seq_len // 2, 1), spec.max_seq_len))
        elif spec.max_tokens > 1:
            rows = net.constant(np.arange(spec.max_seq_len, dtype=np.int32).reshape(1, 1, 1, -1))
            folded = net.reshape(net.expand(net.reshape(positions, (0, 0, 1)), 2, spec.heads), (0, 1, -1, 1))
            mask = net.invert(net.less(folded, rows))
        cos, sin = rope_tables(net, spec)
    return Where(cos, sin, positions, starts, lengths, keys, mask)


def _entry(net: Graph, spec: Spec, weights: Weights) -> Tensor:
    """The first layer's input [B, S, H]."""
    kinds, dtype, hidden_size = net.trt.DataType, compute_type(net, spec), spec.arch.hidden_size
    tokens = hidden = None
    if spec.embeds:
        tokens = net.input("tokens", kinds.INT32, (-1, -1), range=_range(spec, tokens=True))
    if spec.is_draft or not spec.embeds:
        hidden = net.input("hidden", dtype, (-1, -1, hidden_size), range=_range(spec, hidden_size, tokens=True))
    if tokens is None:
        return hidden
    prefix = f"model.layers.{spec.first_layer}" if spec.is_draft else "model"
    table = weights.vector(f"{prefix}.embed_tokens")
    with net.scope("embed"):
        x = net.gather(net.constant(table.value.astype(net.numpy[dtype], copy=False), table.name), tokens)
        if hidden is None:
            return x
        parts = [
            rms_norm(net, part, weights.vector(f"{prefix}.{norm}"), spec.arch) for part, norm in ((x, "enorm"), (hidden, "hnorm"))
        ]
        return linear(net, net.concat(parts, 2), weights.matrix(f"{prefix}.eh_proj"))


def _layer(net: Graph, spec: Spec, weights: Weights, number: int, x: Tensor, at: Where, dropped: list[Tensor]) -> Tensor:
    """[B, S, H] -> [B, S, H]"""
    arch, prefix = spec.arch, f"model.layers.{number}"
    shape = (-1, 1, spec.max_seq_len, arch.latent_dim)
    cache = net.input(f"cache.{number}", compute_type(net, spec), shape, range=_range(spec, *shape[1:]))
    with net.scope("attn"):
        normed = rms_norm(net, x, weights.vector(f"{prefix}.input_layernorm"), arch)
        attended, present = attention(net, spec, weights, f"{prefix}.self_attn", normed, cache, at)
        net.output(present, f"present.{number}")
        if spec.ranks > 1 and spec.parallel == "tp":
            attended = all_reduce(net, spec, attended)
        x = net.add(x, attended)
    with net.scope("mlp"):
        normed = rms_norm(net, x, weights.vector(f"{prefix}.post_attention_layernorm"), arch)
        flat = net.reshape(normed, (-1, arch.hidden_size))
        if arch.is_moe(number):
            y = moe(net, spec, weights, f"{prefix}.mlp", flat, dropped)
        else:
            y = swiglu(net, flat, *(weights.matrix(f"{prefix}.mlp.{name}_proj") for name in ("gate", "up", "down")))
        return net.add(x, net.reshape_like(y, x))


def _exit(net: Graph, spec: Spec, weights: Weights, x: Tensor) -> None:
    """Logits of the rows asked for, or the hidden states."""
    kinds, arch = net.trt.DataType, spec.arch
    if not spec.has_head:
        net.output(x, "states")
        return
    rows = net.input("logit_rows", kinds.INT32, (-1,), range=((1,), (spec.max_batch,), (spec.max_batch * spec.max_tokens,)))
    prefix = f"model.layers.{spec.first_layer}.shared_head" if spec.is_draft else ""
    norm, head = (f"{prefix}.norm", f"{prefix}.head") if prefix else ("model.norm", "lm_head")
    with net.scope("head"):
        x = rms_norm(net, x, weights.vector(norm), arch)
        wanted = net.gather(net.reshape(x, (-1, arch.hidden_size)), rows)
        net.output(net.float32(linear(net, wanted, weights.matrix(head))), "logits")
    if spec.mtp and not spec.is_draft:
        net.output(x, "states")
