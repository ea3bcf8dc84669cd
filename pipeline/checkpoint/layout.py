"""What each tensor of a DeepSeek-V3 class checkpoint is, from its name and the `Arch`.

Classes: embed, lm_head, norm, router, attention, o_proj, dense_mlp, shared_experts, routed_experts, mtp (all of the
layers after the last), and other. `linear` marks the weights that a recipe may quantise. In MTP layers these are
the projections of the decoder block; `eh_proj`, which DeepSeek ships in BF16 and runtimes load as such, is not one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.models.arch import Arch

__all__ = ["CLASSES", "Place", "classify", "parameters", "place_of"]

CLASSES = (
    "embed", "lm_head", "norm", "router", "attention", "o_proj", "dense_mlp", "shared_experts", "routed_experts", "mtp",
    "other",
)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_LINEAR = {
    **dict.fromkeys((f"self_attn.{n}" for n in _ATTENTION), "attention"),
    "self_attn.o_proj": "o_proj",
    **dict.fromkeys((f"mlp.{n}_proj" for n in ("gate", "up", "down")), "dense_mlp"),
    **dict.fromkeys((f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")), "shared_experts"),
}
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj")
_TOP = {"model.embed_tokens": "embed", "lm_head": "lm_head", "model.norm": "norm"}
# Runtimes run these pairs as one matrix, with one tensor-wide scale.
_FUSED = {"gate_proj": "up_proj", "q_a_proj": "kv_a_proj_with_mqa"}
_FUSED |= {second: first for first, second in _FUSED.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """What one module (a tensor's name without its last part) is."""

    module: str
    kind: str
    layer: int | None
    linear: bool
    partner: str | None
    """The module that runtimes fuse with this one."""


def place_of(module: str, arch: Arch) -> Place:
    """Classify a module of a known architecture."""
    return classify(module, arch.num_hidden_layers)


def classify(module: str, num_hidden_layers: int) -> Place:
    """Classify a module by its name; one that DeepSeek-V3 does not have is "other"."""
    match = _LAYER.fullmatch(module)
    if match is None:
        return Place(module, _TOP.get(module, "other"), None, False, None)
    layer, rest = int(match[1]), match[2]
    kind = _kind_in_layer(rest)
    linear = kind in _LINEAR.values() or kind == "routed_experts"
    if layer >= num_hidden_layers:
        kind = "mtp"
    return Place(module, kind, layer, linear, _partner(module) if linear else None)


def parameters(arch: Arch) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter, layer by layer; what a complete checkpoint holds, scales aside."""
    yield "model.embed_tokens.weight", (arch.vocab_size, arch.hidden_size)
    for layer in range(arch.num_stored_layers):
        for name, shape in _layer_parameters(arch, layer):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (arch.hidden_size,)
    yield "lm_head.weight", (arch.vocab_size, arch.hidden_size)


def _kind_in_layer(rest: str) -> str:
    if rest in _LINEAR:
        return _LINEAR[rest]
    if _EXPERT.fullmatch(rest):
        return "routed_experts"
    if rest == "mlp.gate":
        return "router"
    return "norm" if rest.endswith("norm") else "other"


def _partner(module: str) -> str | None:
    head, _, leaf = module.rpartition(".")
    return f"{head}.{_FUSED[leaf]}" if leaf in _FUSED else None


def _layer_parameters(arch: Arch, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = arch.hidden_size
    yield from (("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,)))
    yield from _attention(arch)
    if not arch.is_moe(layer):
        yield from _mlp("mlp", hidden, arch.intermediate_size)
    else:
        yield "mlp.gate.weight", (arch.n_routed_experts, hidden)
        yield "mlp.gate.e_score_correction_bias", (arch.n_routed_experts,)
        for expert in range(arch.n_routed_experts):
            yield from _mlp(f"mlp.experts.{expert}", hidden, arch.moe_intermediate_size)
        yield from _mlp("mlp.shared_experts", hidden, arch.moe_intermediate_size * arch.n_shared_experts)
    if layer >= arch.num_hidden_layers:
        yield "embed_tokens.weight", (arch.vocab_size, hidden)
        yield from (("enorm.weight", (hidden,)), ("hnorm.weight", (hidden,)))
        yield "eh_proj.weight", (hidden, 2 * hidden)
        yield from (("shared_head.norm.weight", (hidden,)), ("shared_head.head.weight", (arch.vocab_size, hidden)))


def _attention(arch: Arch) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = arch.hidden_size, arch.num_attention_heads
    yield "self_attn.q_a_proj.weight", (arch.q_lora_rank, hidden)
    yield "self_attn.q_a_layernorm.weight", (arch.q_lora_rank,)
    yield "self_attn.q_b_proj.weight", (heads * arch.qk_head_dim, arch.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (arch.latent_dim, hidden)
    yield "self_attn.kv_a_layernorm.weight", (arch.kv_lora_rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (arch.qk_nope_head_dim + arch.v_head_dim), arch.kv_lora_rank)
    yield "self_attn.o_proj.weight", (hidden, heads * arch.v_head_dim)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
