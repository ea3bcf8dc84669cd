"""Bytes of one rank: weights, copies, engine and KV cache, as TensorRT-LLM's PyTorch backend lays them out.

Weights are exact (see `params`). Under attention tensor parallelism (TP) everything of attention but q_a and kv_a is
split over the ranks, and the MLA latent cache is *repeated* on each. Under attention data parallelism (ADP) attention,
shared experts, dense layers, embedding and head are repeated, and the cache holds only the rank's own requests.
Routed experts: `ep` ranks hold whole experts, each split over tp / ep of them.

What is not weights is measured, not derived: starts of DeepSeek-R1 on B200 (TensorRT-LLM 1.2.0rc6 to 1.3.0rc10, server
logs of zufayu/ClaudeSkillsE2EPerf @f655ecbe), all with max_num_tokens near 8,192. Of the 39 starts without piecewise
CUDA graphs, which this pipeline does not emit, the KV tokens come out 1.2 % off on average, 4.8 % too few at worst and
never more than 0.1 % too many; the constants were fitted to the same starts. Not measured: Hopper, SM103, and how the
engine's part divides into a fixed and a per-token share, which is an estimate from the sizes of the activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.models.arch import Arch
from pipeline.planner.params import STORAGE, Part, main_parts, mtp_parts

__all__ = ["GIB", "Layout", "RankMemory", "Shares", "block_of", "kv_bytes_per_token", "rank_memory", "tokens_per_block"]

GIB = 2**30

STATIC_BYTES = 2.3 * GIB
"""Tensors that the engine allocates beside the weights before its dry run: 1.8 to 2.6 GiB measured."""
FIXED_BYTES = 6.0 * GIB
"""CUDA context, NCCL, workspaces and CUDA graphs. Estimate; what is measured is this plus the activations."""
ACTIVATION_BYTES = 71
"""Peak activation bytes a token and hidden unit: with FIXED_BYTES, 9.9 GiB at 8,192 tokens, as measured."""
EP_FP4_BYTES = 2.9 * GIB
"""More of it when FP4 experts are spread over ranks: 12.6 to 13.1 GiB measured where EP = 1 takes 10.3."""
DEEPGEMM_SHARE = {False: 0.56, True: 0.17}
"""Copies of the routed experts that the DEEPGEMM backend keeps, as a share of them, by ADP: 1 and 4 starts."""
REPEATED_UNDER_TP = ("q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one instance is spread over ranks."""

    tp: int
    ep: int
    attention_dp: bool

    @property
    def moe_tp(self) -> int:
        """Ranks that share each expert."""
        return self.tp // self.ep

    @property
    def cache_ranks(self) -> int:
        """Ranks whose KV caches hold different requests."""
        return self.tp if self.attention_dp else 1

    def __str__(self) -> str:
        """As TensorRT-LLM's users write it: ADP8+EP8, TP8+EP2, TP4."""
        attention = f"{'ADP' if self.attention_dp else 'TP'}{self.tp}"
        return attention if self.ep == 1 else f"{attention}+EP{self.ep}"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank."""

    visible: int
    fraction: float
    """Share of what is free after loading that the KV cache takes."""
    weights: Mapping[str, int]
    """By module class; `mtp` is the whole MTP layer."""
    copies: Mapping[str, int]
    """Second forms of weights that the engine keeps."""
    engine: int
    kv_bytes_per_token: int

    @property
    def loaded(self) -> int:
        """Weights and their copies."""
        return sum(self.weights.values()) + sum(self.copies.values())

    @property
    def free(self) -> int:
        """What is left for the cache and for reserve; negative when the rank does not even start."""
        return self.visible - self.loaded - self.engine

    @property
    def kv_cache(self) -> int:
        """Bytes that the KV cache takes."""
        return max(0, int(self.free * self.fraction))

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache of this rank holds."""
        return self.kv_cache // self.kv_bytes_per_token

    def sequences(self, tokens: int, block: int) -> int:
        """Sequences of `tokens` tokens that the cache holds, in whole blocks."""
        return self.kv_tokens // (math.ceil(tokens / block) * block)


def rank_memory(
    arch: Arch,
    formats: Mapping[str, str],
    layout: Layout,
    *,
    kv_format: str,
    mtp: int,
    moe_backend: str,
    max_num_tokens: int,
    gpus_per_node: int,
    visible: int,
    fraction: float,
) -> RankMemory:
    """Memory of one rank (they are alike: each holds ceil(experts / ep) experts)."""
    shards = Shares(layout, formats, gpus_per_node)
    weights = dict.fromkeys(("embed", "lm_head", "norm", "router"), 0)
    for part in main_parts(arch):
        fmt = formats.get(part.cls, "bf16")
        weights[part.cls] = weights.get(part.cls, 0) + shards.bytes(part, fmt)
    if mtp:
        fmt = formats.get("mtp", "bf16")
        weights["mtp"] = sum(shards.bytes(part, fmt) for part in mtp_parts(arch, stored=False))
    copies = {"kv_b (absorbed)": _absorbed(arch, formats, shards, mtp)}
    if moe_backend == "DEEPGEMM":
        copies["routed_experts (DEEPGEMM)"] = int(weights["routed_experts"] * DEEPGEMM_SHARE[layout.attention_dp])
    engine = STATIC_BYTES + FIXED_BYTES + ACTIVATION_BYTES * arch.hidden_size * max_num_tokens
    if formats.get("routed_experts") == "nvfp4" and layout.ep > 1:
        engine += EP_FP4_BYTES
    per_token = kv_bytes_per_token(arch, kv_format, mtp)
    return RankMemory(visible, fraction, weights, copies, int(engine), per_token)


def kv_bytes_per_token(arch: Arch, kv_format: str, mtp: int = 0) -> int:
    """Bytes a token of the latent cache, over all layers; MTP layers have theirs too."""
    layers = arch.num_stored_layers if mtp else arch.num_hidden_layers
    return arch.latent_dim * layers * {"fp8": 1, "bf16": 2, "float32": 4}[kv_format]


def tokens_per_block(arch: Arch, sm: int) -> int:
    """Tokens of one cache block: FlashMLA (Hopper, latent of 576) wants 64, else 32 is the engine's default."""
    return 64 if sm == 90 and arch.latent_dim == 576 else 32


def block_of(fmt: str) -> int:
    """Columns that may not be parted, because they share a scale."""
    return STORAGE[fmt].cols or 1


def _absorbed(arch: Arch, formats: Mapping[str, str], shards: Shares, mtp: int) -> int:
    """kv_b a second time, transposed for decoding: prefill multiplies by it, decoding absorbs it."""
    kv_b = [part for part in main_parts(arch) if part.name == "kv_b_proj"]
    total = sum(shards.bytes(part, formats.get("attention", "bf16")) for part in kv_b)
    return total + (total // len(kv_b) * arch.num_nextn_predict_layers if mtp else 0)


@dataclass(frozen=True, slots=True)
class Shares:
    """How many ranks share a tensor."""

    layout: Layout
    formats: Mapping[str, str]
    gpus_per_node: int

    def bytes(self, part: Part, fmt: str) -> int:
        """This rank's share of `part`."""
        return self.share(part, fmt, part.bytes(fmt))

    def share(self, part: Part, fmt: str, size: int) -> int:
        """This rank's share of `size` bytes, which is what `part` takes."""
        if part.cls == "routed_experts":
            held = math.ceil(part.count / self.layout.ep) / part.count
            return math.ceil(size * held / self.layout.moe_tp)
        return math.ceil(size / self._ranks(part, fmt))

    def _ranks(self, part: Part, fmt: str) -> int:
        tp = self.layout.tp
        if self.layout.attention_dp or part.cls in ("norm", "router", "mtp") or part.name in REPEATED_UNDER_TP:
            return 1
        if part.cls in ("shared_experts", "dense_mlp"):
            # NOTE: whole scale blocks only, and dense layers stay inside the node (TensorRT-LLM modeling_deepseekv3).
            width = part.cols if part.name == "down_proj" else part.rows
            ranks = math.gcd(width // block_of(fmt), tp)
            return math.gcd(ranks, self.gpus_per_node) if part.cls == "dense_mlp" else ranks
        return tp
