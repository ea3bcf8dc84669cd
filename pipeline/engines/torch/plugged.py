"""The parts of the graph that plugins compute: `ops(plugins)` is `graph.Ops` with those that engine.json lists as taken.

Each does what the method it stands for does, in BF16; experts stay as the checkpoint stores them (see `EXPERTS`). Two differences:
cosines and sines of RoPE on keys are not rounded to BF16, and attention asks that a row's positions rise by one (padding aside).
Over an FP8 cache decoding rounds queries and softmax weights, too (`plugins.mla_decode`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.engines.torch.graph import PLAIN, Attention, Decoder, Moe, Ops, Weight, Where, seen

__all__ = ["EXPERTS", "Fp8Experts", "Nvfp4Experts", "ops"]


@dataclass(frozen=True, slots=True)
class PagedWhere(Where):
    """What the plugins need beside."""

    cos_sin: Tensor
    """F32 [N, R], cosines, then sines"""
    rows: Tensor
    """I32 [N], each token's row of `cos_sin`"""
    table: Tensor
    """I32 [B, P], `pages`"""
    lengths: Tensor
    """I32 [B], tokens of each row when this step is done"""
    cu_q: Tensor
    """I32 [B + 1], T times 0..B"""


class Fp8Experts(Weight):
    """[E, rows, columns] in E4M3, and a float32 scale for each 128x128."""

    def __init__(self, experts: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__(experts, rows, columns, dtype=torch.float8_e4m3fn)
        self.weight_scale_inv = constant(experts, rows // 128, columns // 128, dtype=torch.float32)


class Nvfp4Experts(Weight):
    """[E, rows, columns / 2], two codes a byte, an E4M3 scale for each 1x16 and a float32 one an expert."""

    def __init__(self, experts: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__(experts, rows, columns // 2, dtype=torch.uint8)
        self.weight_scale = constant(experts, rows, columns // 16, dtype=torch.float8_e4m3fn)
        self.weight_scale_2 = constant(experts, dtype=torch.float32)


def constant(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def fp8_experts(moe: Moe, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """`Moe.mixed` by FP8 products, the shared expert beside them."""
    matrices = moe.gate_up.weight, moe.gate_up.weight_scale_inv, moe.down.weight, moe.down.weight_scale_inv
    return torch.ops.r1_pipeline.moe_fp8_block(x, indices, weights, *matrices, 0, *shared(moe))


def nvfp4_experts(moe: Moe, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """`Moe.mixed` by products of BF16 activations with NVFP4 weights, the shared expert beside them."""
    matrices = (getattr(weight, f"weight{part}") for weight in (moe.gate_up, moe.down) for part in ("", "_scale", "_scale_2"))
    return torch.ops.r1_pipeline.moe_w4a16_nvfp4(x, indices, weights, *matrices, 0, *shared(moe))


def shared(moe: Moe) -> tuple[Tensor, Tensor]:
    """The weights of the expert that every token visits."""
    return moe.shared.gate_up.weight, moe.shared.down.weight


EXPERTS: dict[str, dict[str, Any]] = {
    "fp8_block": {"experts": fp8_experts, "expert_weight": Fp8Experts},
    "nvfp4": {"experts": nvfp4_experts, "expert_weight": Nvfp4Experts},
    "w4a16_nvfp4": {"experts": nvfp4_experts, "expert_weight": Nvfp4Experts},
}
"""Formats in which routed experts can stay, with what computes them."""


def where(decoder: Decoder, positions: Tensor, pages: Tensor) -> PagedWhere:
    """`Decoder.where`, and the rest."""
    at, real = Decoder.where(decoder, positions, pages), positions.clamp(min=0)
    angles = real.flatten().unsqueeze(-1).float() * decoder.inv_freq
    return PagedWhere(
        at.slots, at.pages, at.visible, at.cos, at.sin,
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1) * decoder.arch.attention_factor,
        rows=torch.arange(positions.numel(), dtype=torch.int32, device=positions.device),
        table=pages.to(torch.int32),
        lengths=(real[:, -1] + 1).to(torch.int32),
        cu_q=torch.arange(positions.shape[0] + 1, dtype=torch.int32, device=positions.device) * positions.shape[1],
    )  # fmt: skip


def into_cache(attention: Attention, x: Tensor, cache: Tensor, at: PagedWhere) -> Tensor:
    """`Attention.into_cache` in two kernels."""
    arch, plugin = attention.arch, torch.ops.r1_pipeline
    qkv = plugin.qkv_a(x.flatten(0, 1), attention.qkv_a.weight)
    norms, token = (attention.q_norm.weight, attention.kv_norm.weight), (at.cos_sin, at.rows, at.slots)
    q = plugin.norm_rope_cache(qkv, *norms, *token, cache.view(-1, arch.latent_dim), 1.0, arch.rms_norm_eps)
    return q.unflatten(0, (x.shape[0], x.shape[1]))


def absorbed(attention: Attention, q_nope: Tensor, q_rope: Tensor, cache: Tensor, at: PagedWhere) -> Tensor:
    """`Attention.absorbed`, read straight from the pages."""
    arch, plugin, rows = attention.arch, torch.ops.r1_pipeline, q_nope.shape[:2]
    w_uk, w_uv = attention.kv_b.weight.split((arch.qk_nope_head_dim, arch.v_head_dim), 1)
    query = plugin.absorb_query(torch.cat((q_nope, q_rope), dim=-1).flatten(0, 1), w_uk).unflatten(0, rows)
    seen = cache, at.table, at.lengths, arch.softmax_scale, arch.kv_lora_rank
    return plugin.absorb_output(plugin.mla_decode(query, *seen)[0].flatten(0, 1), w_uv).unflatten(0, rows)


def expanded(attention: Attention, q_nope: Tensor, q_rope: Tensor, cache: Tensor, at: PagedWhere) -> Tensor:
    """`Attention.expanded`: keys and values as one product leaves them, scores in one kernel."""
    arch, latents = attention.arch, seen(cache, at.pages[0], q_nope.dtype).flatten(0, 1)
    latent, k_rope = latents.split((arch.kv_lora_rank, arch.qk_rope_head_dim), -1)
    keys_values = F.linear(latent, attention.kv_b.weight.flatten(0, 1)).unflatten(-1, (arch.num_attention_heads, -1))
    query, ends = torch.cat((q_nope, q_rope), dim=-1)[0], (at.cu_q, F.pad(at.lengths, (1, 0)))
    return torch.ops.r1_pipeline.mla_prefill_kv(query, keys_values, k_rope, *ends, arch.softmax_scale)[0].unsqueeze(0)


def tuned(products: Iterable[Sequence[int]]) -> Callable[[Tensor, Tensor], Tensor]:
    """`F.linear`, for weights of these shapes by the algorithm that the tactic file has for the number of tokens."""
    held = {tuple(shape) for shape in products}

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        if tuple(weight.shape) not in held:
            return F.linear(x, weight)
        return torch.ops.r1_pipeline.tuned_linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    return linear


def ops(plugins: Mapping[str, Any]) -> Ops:
    """The table for engine.json's `plugins`; their ops are registered."""
    taken = plugins["taken"]
    for name in taken:
        import_module(f"plugins.{name}.op")
    changes: dict[str, dict[str, Any]] = {
        "gemm_tactics": {"linear": tuned(plugins["products"])},
        "mla_absorb": {},
        "fused_qkv_a": {"into_cache": into_cache, "where": where},
        "mla_decode": {"absorbed": absorbed, "where": where},
        "mla_prefill": {"expanded": expanded, "where": where},
        "moe_grouped_gemm": EXPERTS.get(plugins["experts"], {}),
        "router_gemm": {"router_dtype": torch.bfloat16, "router_logits": getattr(torch.ops.r1_pipeline, "router_gemm", None)},
        "topk_router": {"route": getattr(torch.ops.r1_pipeline, "topk_router", None)},
    }
    table = PLAIN
    for name in taken:
        table = replace(table, **changes[name])
    return table
