"""What a step has to do: bytes, FLOP, messages and kernels of one rank, before any efficiency.

`columns` turns cases into arrays with one entry a case, so that ten thousand cases cost about as much as one. What
depends on model, formats and layout only is counted once (`shard_of`). Units: seconds at the chip's peak (`*_s`), bytes,
counts. MLA decodes absorbed (128 query heads over one latent of 576, values 512 wide) and prefills with the keys and
values written out (192 and 128 wide).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.models.arch import Arch
from pipeline.planner.params import Part, counted_parts, layer_parts, mtp_layer
from pipeline.planner.perf.case import Machine, PerfCase

__all__ = ["KV_BYTES", "Array", "Columns", "columns", "imbalance", "touched"]

Array = NDArray[np.float64]

OPERANDS = {
    "fp8": "fp8", "fp8_block": "fp8", "fp8_channel": "fp8", "mxfp8": "fp8", "w4a8_awq": "fp8", "w4a8_nvfp4_fp8": "fp8",
    "nvfp4": "fp4", "mxfp4": "fp4",
}  # fmt: skip
"""Weight format -> operand type of its products; what is not named multiplies in BF16."""
REPEATED = ("q_a_proj", "kv_a_proj_with_mqa")
KERNELS_MOE = 22
"""Kernels of a MoE layer on its critical path with every fusion on: 11 of attention, 11 of the MoE with 2 streams."""
KERNELS_DENSE = 16
KV_BYTES = {"fp8": 1.0, "bf16": 2.0, "nvfp4": 0.5625}
"""Of one element of the cache."""
STATIC_GIB = 12.0
"""Of a rank's memory that is neither weights nor KV cache, for cases that bring no `kv_tokens`."""


class Shard(NamedTuple):
    """What one rank holds and does a token, all layers of the main model unless it says otherwise."""

    dense_bytes: float
    """Weights that every step reads: attention, shared experts, dense layers, router, head."""
    dense_s: float
    """Seconds a token at peak for the products with them, the head excepted."""
    head_s: float
    expert_bytes: float
    """One routed expert's share on this rank, one layer."""
    expert_s: float
    """Seconds a routed (token, expert) pair and layer at peak, for this rank's share of the expert."""
    moe_layers: float
    layers: float
    experts: float
    top_k: float
    draft_dense_bytes: float
    """One MTP layer and the head."""
    draft_expert_bytes: float
    loaded_bytes: float
    heads: float
    """Query heads on this rank."""
    hidden: float
    latent: float
    """Elements of the latent a token and layer."""
    kernels: float
    groups: float
    """Groups of experts that a token may route to."""


def _peak(machine: Machine, fmt: str) -> float:
    """FLOP a second of the products with weights in `fmt`; a chip without FP4 multiplies it as BF16."""
    return machine.flops.get(OPERANDS.get(fmt, "bf16"), machine.flops["bf16"])


def _ranks(part: Part, tp: int, attention_dp: bool) -> int:
    """Ranks that share a part that is not a routed expert."""
    alone = attention_dp or part.cls in ("norm", "router") or part.name in REPEATED
    return 1 if alone else tp


def shard_of(machine: Machine, arch: Arch, table: Mapping[str, str], tp: int, ep: int, attention_dp: bool) -> Shard:
    """Count one rank's share of a model whose classes are stored as `table` says."""
    parts = counted_parts(arch)
    plain = [(part, times) for part, times in parts if part.cls not in ("routed_experts", "embed", "norm", "lm_head")]
    head = next(part for part, _ in parts if part.cls == "lm_head")
    share = tp // ep
    routed = [part for part in layer_parts(arch, arch.first_k_dense_replace) if part.cls == "routed_experts"]
    fmt = table["routed_experts"]
    expert = sum(part.bytes(fmt) / part.count for part in routed) / share
    expert_params = sum(part.params / part.count for part in routed) / share
    head_bytes = head.bytes(table.get("lm_head", "bf16")) / _ranks(head, tp, attention_dp)
    moe_layers = sum(arch.is_moe(layer) for layer in range(arch.num_hidden_layers))
    draft_dense, draft_expert = _draft(arch, table, tp, ep, attention_dp)
    sizes = ((part, times / _ranks(part, tp, attention_dp), table.get(part.cls, "bf16")) for part, times in plain)
    counted = [(part.bytes(fmt) * times, 2 * part.params * times / _peak(machine, fmt)) for part, times, fmt in sizes]
    dense, dense_s = sum(size for size, _ in counted) + head_bytes, sum(seconds for _, seconds in counted)
    return Shard(
        dense_bytes=dense,
        dense_s=dense_s,
        head_s=2 * head.params / _ranks(head, tp, attention_dp) / _peak(machine, "bf16"),
        expert_bytes=expert,
        expert_s=2 * expert_params / _peak(machine, fmt),
        moe_layers=moe_layers,
        layers=arch.num_hidden_layers,
        experts=arch.n_routed_experts,
        top_k=arch.num_experts_per_tok,
        draft_dense_bytes=draft_dense + head_bytes,
        draft_expert_bytes=draft_expert,
        loaded_bytes=dense + expert * moe_layers * arch.n_routed_experts / ep,
        heads=arch.num_attention_heads / (1 if attention_dp else tp),
        hidden=arch.hidden_size,
        latent=arch.latent_dim,
        kernels=_kernels(arch, table),
        groups=arch.topk_group,
    )


def _kernels(arch: Arch, table: Mapping[str, str]) -> float:
    """Kernels of all layers: 128-wide FP8 blocks quantise the input of every product in a kernel of its own."""
    blocks = 3 * (table["attention"] == "fp8_block")
    moe = KERNELS_MOE + blocks + 2 * (table["shared_experts"] == "fp8_block")
    dense = KERNELS_DENSE + blocks + 2 * (table["dense_mlp"] == "fp8_block")
    layers = sum(arch.is_moe(layer) for layer in range(arch.num_hidden_layers))
    return moe * layers + dense * (arch.num_hidden_layers - layers)


def _draft(arch: Arch, table: Mapping[str, str], tp: int, ep: int, attention_dp: bool) -> tuple[float, float]:
    """Bytes of the MTP layers on one rank: what every draft reads, and one routed expert's share."""
    fmt = table.get("mtp", "bf16")
    parts, layers = mtp_layer(arch, stored=False), arch.num_nextn_predict_layers
    routed = [part for part in parts if part.cls == "routed_experts"]
    others = [part for part in parts if part.cls not in ("routed_experts", "norm")]
    dense = sum(part.bytes(fmt) / _ranks(part, tp, attention_dp) for part in others)
    return dense * layers, sum(part.bytes(fmt) / part.count for part in routed) * layers * ep / tp


class Columns(NamedTuple):
    """Cases as arrays [cases]."""

    shard: Shard
    bandwidth: Array
    attention_flops: Array
    """FLOP a second of attention over an FP8 or BF16 cache while decoding."""
    prefill_flops: Array
    """Of attention while prefilling, BF16."""
    nvlink: Array
    """Bytes a second between ranks: NVLink, or the network where the instance leaves its domain."""
    tp: Array
    ep: Array
    dp: Array
    """Ranks with requests of their own: tp under attention DP, else 1."""
    adp: Array
    """1 under attention DP, else 0."""
    kv_bytes: Array
    """A token and layer."""
    payload: Array
    """Bytes an element of what the MoE's dispatch carries."""
    concurrency: Array
    isl: Array
    osl: Array
    mtp: Array
    acceptance: Array
    """NaN where the case says nothing."""
    slots: Array
    """Requests that the instance can hold at once."""
    max_num_tokens: Array
    piecewise: Array
    alltoall: Array
    """1 where a token goes only to the ranks of its experts, 0 where it is gathered everywhere."""
    remote: Array
    """Share of a rank's peers that are in other NVLink domains; 0 where all are in its own."""
    separate: Array
    """1 where the experts run as CUTLASS's kernels, which are more than TRTLLM's fused ones."""
    waves: Array
    """1 where all requests start at once (`PerfCase.runner`)."""
    off: dict[str, Array]
    """Optimisation -> 1 where it is switched off."""


def _row(case: PerfCase, shard: Shard, off: Sequence[str]) -> tuple[float, ...]:
    machine, arch = case.machine, case.arch
    kv_flops = machine.flops["bf16" if case.kv_format == "bf16" else "fp8"]
    dp = case.tp if case.attention_dp else 1
    payload = 2.0 if "fp4_allgather" in case.without else {"fp4": 0.5625, "fp8": 1.03}.get(case.precision, 2.0)
    return (
        machine.bandwidth, kv_flops, machine.flops["bf16"], machine.scale_out if case.leaves_domain else machine.nvlink,
        case.tp, case.ep, dp, float(case.attention_dp), arch.latent_dim * KV_BYTES[case.kv_format], payload,
        case.concurrency, case.isl, case.osl, case.mtp, case.acceptance or np.nan, _slots(case, dp, shard),
        case.max_num_tokens, case.piecewise_graphs, case.alltoall,
        max(0.0, 1 - machine.nvlink_domain / case.tp), case.backend == "CUTLASS", case.runner == "inferencex",
        *(float(name in case.without) for name in off),
    )  # fmt: skip


def _slots(case: PerfCase, dp: int, shard: Shard) -> float:
    """Requests that KV cache and max_batch_size admit, over all ranks: TensorRT-LLM's scheduler keeps room for each one's whole
    output before it starts it (GUARANTEED_NO_EVICT, the default)."""
    tokens = case.kv_tokens
    if tokens is None:
        free = case.machine.memory_bytes - shard.loaded_bytes - STATIC_GIB * 2**30
        tokens = max(0.0, 0.8 * free) / (case.arch.latent_dim * case.arch.num_hidden_layers * KV_BYTES[case.kv_format])
    slots = max(1.0, tokens // (case.isl + case.osl))
    return dp * min(slots, case.max_batch_size or np.inf)


def columns(cases: Sequence[PerfCase], off: Sequence[str]) -> Columns:
    """Cases as arrays; `off` names the optimisations that may be switched off."""
    seen: dict[tuple[object, ...], Shard] = {}
    shards = [_shard(case, seen) for case in cases]
    count = len(Columns._fields) - 2
    rows = np.array([_row(case, shard, off) for case, shard in zip(cases, shards, strict=True)], dtype=np.float64)
    table = rows.reshape(len(cases), count + len(off)).T
    shard = Shard(*np.array(shards, dtype=np.float64).reshape(len(cases), len(Shard._fields)).T)
    return Columns(shard, *table[:count], dict(zip(off, table[count:], strict=True)))


def _shard(case: PerfCase, seen: dict[tuple[object, ...], Shard]) -> Shard:
    """Cases of one search share model, machine and formats as objects, so their identity is key enough."""
    key = (id(case.machine), id(case.arch), id(case.formats), case.tp, case.ep, case.attention_dp)
    if key not in seen:
        seen[key] = shard_of(case.machine, case.arch, case.formats, case.tp, case.ep, case.attention_dp)
    return seen[key]


def touched(tokens: Array, cols: Columns, spread: Array, fullest: Array) -> Array:
    """Expected distinct experts that `tokens` tokens route to on one rank (the fullest of them).

    Uniform routing gives E (1 - (1 - k/E)^tokens); `spread` <= 1 shrinks the tokens that count as independent, `fullest`
    scales how far the fullest rank is above the mean.
    """
    shard = cols.shard
    held = shard.experts / cols.ep
    mean = held * (1 - (1 - shard.top_k / shard.experts) ** (tokens**spread))
    return np.minimum(held, mean + fullest * np.sqrt(mean * (1 - mean / held) * 2 * np.log(cols.ep)))


def imbalance(pairs: Array, cols: Columns, skew: Array) -> Array:
    """Load of the fullest of ep ranks over the mean, for `pairs` (token, expert) pairs: Poisson plus a lasting skew."""
    mean = np.maximum(pairs / cols.ep, 1.0)
    return 1 + (skew * (cols.ep > 1)) + np.sqrt(2 * np.log(cols.ep) / mean)
