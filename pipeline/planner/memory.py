"""Bytes of one rank: weights, copies, engine and KV cache, as TensorRT-LLM's PyTorch backend lays them out.

Weights are exact (see `params`). Under attention tensor parallelism (TP) everything of attention but q_a and kv_a is
split over the ranks, and the MLA latent cache is *repeated* on each. Under attention data parallelism (ADP) attention,
shared experts, dense layers, embedding and head are repeated, and the cache holds only the rank's own requests.
Routed experts: `ep` ranks hold whole experts, each split over tp / ep of them. Pipeline stages hold consecutive layers, the
first ones one more where they do not divide; embedding with the first, head and MTP layer with the last.

What is neither weights nor cache is in `overhead`. The KV tokens of 48 published starts of DeepSeek-R1 on B200 come out
within the errors that `scripts/calibrate_memory.py` prints, cross-validated by configuration.

    memory_of(setup)                              one RankMemory a pipeline stage; the ranks of a stage are alike
    kv_tokens(setup, max_num_tokens=array, ...)   tokens that one rank's cache holds, for many limits at once
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.models.arch import Arch
from pipeline.planner.overhead import Amount, engine_bytes
from pipeline.planner.params import Part, block_of, embedding_parts, layer_parts, mtp_layer
from pipeline.planner.setup import Layout, Setup

__all__ = [
    "GIB", "KV_BITS", "Layout", "RankMemory", "Shares", "kv_bytes_per_token", "kv_tokens", "memory_of", "stage_layers",
    "tokens_per_block",
]  # fmt: skip

GIB = 2**30

KV_BITS = {"nvfp4": 4.5, "fp8": 8, "bf16": 16, "float32": 32}
"""Bits of one cached value; NVFP4 with its scale for every 16."""
REPEATED_UNDER_TP = ("q_a_proj", "kv_a_proj_with_mqa")
MTP_COUNTED_FROM = (1, 3)
"""Version line from which the MTP layer's cache is assumed to be counted; 1.2.0rc6 divided by the main layers' bytes alone
(every one of its 13 starts with MTP), and then took the MTP layer's on top."""


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
    overhead: Mapping[str, int]
    """What the engine takes beside weights and cache, by cause."""
    kv_bytes_per_token: int
    kv_bytes_counted: int
    """Bytes a token by which the engine divides; without the MTP layer in older lines."""

    @property
    def loaded(self) -> int:
        """Weights and their copies."""
        return sum(self.weights.values()) + sum(self.copies.values())

    @property
    def engine(self) -> int:
        """All overhead."""
        return sum(self.overhead.values())

    @property
    def free(self) -> int:
        """What is left for the cache and for reserve; negative when the rank does not even start."""
        return self.visible - self.loaded - self.engine

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache of this rank holds."""
        return max(0, int(self.free * self.fraction)) // max(1, self.kv_bytes_counted)

    @property
    def kv_cache(self) -> int:
        """Bytes that the KV cache takes."""
        return self.kv_tokens * self.kv_bytes_per_token

    def sequences(self, tokens: int, block: int) -> int:
        """Sequences of `tokens` tokens that the cache holds, in whole blocks."""
        return self.kv_tokens // (math.ceil(tokens / block) * block)


def memory_of(setup: Setup) -> tuple[RankMemory, ...]:
    """Memory of one rank of each pipeline stage (the ranks of a stage are alike: each holds ceil(experts / ep) experts)."""
    return tuple(_stage(setup, stage) for stage in range(setup.layout.pp))


def kv_tokens(setup: Setup, *, max_num_tokens: Amount | None = None, max_batch_size: Amount | None = None) -> Amount:
    """Tokens that the cache of one rank holds (of the fullest stage); arrays give an array.

    `max_batch_size` counts through the CUDA graphs, which are captured up to it or to `graph_batch`, whichever is less.
    """
    captured = max_batch_size
    if captured is not None and setup.graph_batch is not None:
        captured = np.minimum(captured, setup.graph_batch)
    overhead = sum(engine_bytes(setup, tokens=max_num_tokens, captured=captured).values())
    tokens = [
        np.maximum(0, (rank.visible - rank.loaded - overhead) * rank.fraction) // max(1, rank.kv_bytes_counted)
        for rank in memory_of(setup)
    ]
    return np.minimum.reduce(tokens)


def stage_layers(arch: Arch, pp: int, stage: int) -> range:
    """Main layers of one pipeline stage; the first stages hold one more where they do not divide."""
    base, extra = divmod(arch.num_hidden_layers, pp)
    start = stage * base + min(stage, extra)
    return range(start, start + base + (stage < extra))


def kv_bytes_per_token(arch: Arch, kv_format: str, mtp: int = 0) -> int:
    """Bytes a token of the latent cache, over all layers; MTP layers have theirs too."""
    layers = arch.num_stored_layers if mtp else arch.num_hidden_layers
    return _latent_bytes(arch, kv_format, layers)


def tokens_per_block(arch: Arch, sm: int) -> int:
    """Tokens of one cache block: FlashMLA (Hopper, latent of 576) wants 64, else 32 is the engine's default."""
    return 64 if sm == 90 and arch.latent_dim == 576 else 32


def _latent_bytes(arch: Arch, kv_format: str, layers: int) -> int:
    return math.ceil(arch.latent_dim * KV_BITS[kv_format] / 8) * layers


def _stage(setup: Setup, stage: int) -> RankMemory:
    arch, pp = setup.arch, setup.layout.pp
    layers, last = stage_layers(arch, pp, stage), stage == pp - 1
    shards = Shares(setup.layout, setup.formats, setup.hw.num_devices, setup.expert_slots)
    drafts = arch.num_nextn_predict_layers if setup.mtp and last else 0
    counted = drafts if setup.line >= MTP_COUNTED_FROM else 0
    overhead = {name: int(size) for name, size in engine_bytes(setup).items()}
    return RankMemory(
        visible=int(setup.hw.memory_bytes),
        fraction=setup.fraction,
        weights=_weights(setup, shards, layers, first=stage == 0, last=last),
        copies=_copies(setup, shards, layers, drafts),
        overhead=overhead,
        kv_bytes_per_token=_latent_bytes(arch, setup.kv_format, len(layers) + drafts),
        kv_bytes_counted=_latent_bytes(arch, setup.kv_format, len(layers) + counted),
    )


def _weights(setup: Setup, shards: Shares, layers: range, *, first: bool, last: bool) -> dict[str, int]:
    """Bytes by class: a dense and a MoE layer, as often as the stage has them, and what stands at the ends."""
    arch, formats = setup.arch, setup.formats
    weights = dict.fromkeys(("embed", "lm_head", "norm", "router"), 0)

    def add(part: Part, times: int) -> None:
        size = shards.bytes(part, formats.get(part.cls, "bf16"))
        weights[part.cls] = weights.get(part.cls, 0) + size * times

    for part in embedding_parts(arch):
        add(part, int(first if part.cls == "embed" else last))
    for is_moe in (False, True):
        alike = [layer for layer in layers if arch.is_moe(layer) == is_moe]
        for part in layer_parts(arch, alike[0]) if alike else ():
            add(part, len(alike))
    if setup.mtp and last:
        fmt = formats.get("mtp", "bf16")
        layer = sum(shards.bytes(part, fmt) for part in mtp_layer(arch, stored=False))
        weights["mtp"] = layer * arch.num_nextn_predict_layers
    return weights


def _copies(setup: Setup, shards: Shares, layers: range, drafts: int) -> dict[str, int]:
    """kv_b a second time, transposed for decoding: prefill multiplies by it, decoding absorbs it. And DEEPGEMM's scales:
    one byte for each row of a block of 128, instead of four for the whole block."""
    parts = layer_parts(setup.arch, setup.arch.num_hidden_layers - 1)
    (kv_b,) = (part for part in parts if part.name == "kv_b_proj")
    fmt = setup.formats.get("attention", "bf16")
    copies = {"kv_b (absorbed)": shards.bytes(kv_b, fmt) * (len(layers) + drafts)}
    if setup.moe_backend == "DEEPGEMM":
        moe = sum(setup.arch.is_moe(layer) for layer in layers) + drafts
        experts = sum(shards.share(part, fmt, part.params // 128) for part in parts if part.cls == "routed_experts")
        copies["routed_experts (scales)"] = experts * moe
    return copies


@dataclass(frozen=True, slots=True)
class Shares:
    """How many ranks share a tensor."""

    layout: Layout
    formats: Mapping[str, str]
    gpus_per_node: int
    expert_slots: int | None = None
    """Places for experts where a load balancer repeats some; None: one an expert."""

    def bytes(self, part: Part, fmt: str) -> int:
        """This rank's share of `part`."""
        return self.share(part, fmt, part.bytes(fmt))

    def share(self, part: Part, fmt: str, size: int) -> int:
        """This rank's share of `size` bytes, which is what `part` takes."""
        if part.cls == "routed_experts":
            held = math.ceil((self.expert_slots or part.count) / self.layout.ep) / part.count
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
