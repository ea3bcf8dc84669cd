"""How long a step takes: the work of `work.py` over a few calibrated efficiencies, term by term.

A product that streams weights takes the longer of its bytes and its FLOP (smoothly: `_longer`). What remains at batch 1
is the latency of some 1,300 kernels and 120 collectives, which no bandwidth shortens. All results in seconds, [cases].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.planner.perf.work import Array, Columns, imbalance, touched

__all__ = [
    "COEFFICIENTS", "FIRST_TOKEN", "LIMIT", "SHARES", "SWITCHES", "accepted", "bounded", "decode_terms", "draft_terms",
    "link_speed", "prefill_terms", "start_s",
]  # fmt: skip

COEFFICIENTS: dict[str, tuple[float, float]] = {
    "kernel_us": (4.0, 0.4),  # a kernel's latency inside a CUDA graph, dependent launch included
    "cutlass_kernels": (7.0, 0.3),  # more a MoE layer with CUTLASS than with TRTLLM; blog 1: 253 to 299 tokens/s, 28 us a layer
    "allreduce_us": (8.0, 0.5),  # one fused all-reduce + RMSNorm of a small message inside the NVLink domain
    "alltoall_us": (25.0, 0.5),  # dispatch or all-gather of one MoE layer under attention DP, the wait for peers included
    "dense_memory": (0.7, 0.2),  # share of peak bandwidth
    "expert_memory": (0.7, 0.2),
    "kv_memory": (0.6, 0.3),
    "dense_flops": (0.6, 0.3),  # share of peak FLOP
    "expert_flops": (0.45, 0.3),
    "attention_flops": (0.4, 0.3),
    "link": (0.6, 0.3),  # share of peak link bandwidth, packing included; two H200 without it: 0.45 (bench_planner_collectives)
    "network": (0.7, 0.05),  # of a network card's, between NVLink domains; no point measures it
    "passes": (40.0, 0.4),  # reads and writes of a hidden vector a token and layer beside the products
    "host_us": (300.0, 0.7),  # a step's scheduling that overlap does not hide
    "sequence_us": (8.0, 0.7),  # a sequence's: sampling, cache blocks, answers
    "spread": (0.95, 0.05),  # exponent of independent routing
    "skew": (0.1, 0.5),  # lasting load of the hottest rank over the mean
    "draft_us": (150.0, 0.5),  # one MTP draft beside its layer
    "acceptance": (0.9, 0.1),  # accepted drafts over the published ones at batch 1
    "acceptance_doubling": (1.03, 0.05),  # more of them a doubling of the total length
    "plain_prompts": (0.9, 0.1),  # of them where random prompts come without a chat template
    "narrow": (0.05, 0.5),  # bandwidth lost a doubling of the ranks that share an expert
    "fullest": (1.0, 0.3),  # spread of experts over ranks, 1 = independent routing
    "piecewise": (0.6, 0.4),  # of a context step's fixed cost that piecewise CUDA graphs leave
    "prefill_fixed_ms": (20.0, 0.7),  # a step with context runs outside the CUDA graph
    "prefill_flops": (0.4, 0.3),
    "prefill_attention": (0.35, 0.4),
    "prefill_passes": (60.0, 0.5),
    "adp_share": (0.85, 0.3),  # exponent: contexts of ranks that run side by side; blog 10 balances 54 to 88 % of 8 ranks
}
"""Coefficient -> (prior median, standard deviation of its log)."""
SHARES = {"dense_memory", "expert_memory", "kv_memory", "dense_flops", "expert_flops", "attention_flops", "link", "network"} | {
    "prefill_flops", "prefill_attention"
}  # fmt: skip
"""Coefficients that are shares of a peak, which nothing exceeds."""
LIMIT = 0.95
FIRST_TOKEN: dict[str, tuple[float, float]] = {
    "client_ms": (40.0, 0.7),  # tokenizer, HTTP, answer
    "waves_ms": (60.0, 0.7),  # more where all requests start at once and stay in waves, as InferenceX sends them
    "waves": (0.05, 0.7),  # share of the other requests whose prompts are then in front
    "balance_wait": (0.3, 0.7),  # share of 60 steps that attention-DP ranks wait for prompts on all of them
    "draft_first": (0.5, 0.7),  # more of a prompt's own time with MTP
}
"""The same for what only TTFT depends on."""

SWITCHES = ("absorption", "topk_fusion", "router_gemm", "multi_stream", "cuda_graph", "overlap")
"""Optimisations that a case can switch off inside a step; the others are other cases (`ablate`)."""
UNFUSED = {"topk_fusion": 16, "router_gemm": 2, "multi_stream": 5}
"""Kernels more a MoE layer without: 18 PyTorch operations instead of 2; two casts; five that ran beside others."""
OVERLAPPED_US = 1500.0
"""Host work of a step that the overlap scheduler hides. Estimate: blog 3 gains 4 % by it at about 40 ms a step."""
DEFAULT_DRAFTS = (0.0, 0.92, 1.58, 1.82, 1.99, 2.05)
"""Drafts accepted a step for mtp = 0 .. 5 at batch 1 (TensorRT-LLM blog 1)."""


def bounded(logs: Mapping[str, Array]) -> dict[str, Array]:
    """Coefficients from their logs, shares of a peak kept below `LIMIT` whatever the effects add up to."""
    return {name: np.exp(np.minimum(value, np.log(LIMIT)) if name in SHARES else value) for name, value in logs.items()}


def _longer(first: Array, second: Array) -> Array:
    """A smooth maximum: partly overlapped, never shorter than either."""
    return (first**4 + second**4) ** 0.25


def expert_s(cols: Columns, e: Mapping[str, Array], tokens: Array, flops: Array) -> Array:
    """Routed experts of all layers for `tokens` tokens of the instance."""
    shard = cols.shard
    speed = cols.bandwidth * e["expert_memory"] * (1 - e["narrow"]) ** np.log2(cols.tp / cols.ep)
    read = touched(tokens, cols, e["spread"], e["fullest"]) * shard.expert_bytes / speed
    pairs = tokens * shard.top_k
    compute = pairs / cols.ep * imbalance(pairs, cols, e["skew"]) * shard.expert_s / flops
    return shard.moe_layers * _longer(read, compute)


def dense_s(cols: Columns, e: Mapping[str, Array], tokens: Array, flops: Array) -> Array:
    """Every product with weights that are not routed, for `tokens` tokens of a rank."""
    read = cols.shard.dense_bytes / (cols.bandwidth * e["dense_memory"])
    return _longer(read, tokens * cols.shard.dense_s / flops)


def comm_s(cols: Columns, e: Mapping[str, Array], tokens: Array) -> tuple[Array, Array]:
    """Latency and transfer of all collectives for `tokens` tokens of a rank."""
    shard, tp = cols.shard, cols.tp
    many = tp > 1
    reduces = 2 * shard.layers
    reduce_bytes = reduces * tokens * shard.hidden * 2 * 2 * (tp - 1) / tp
    chosen = (tp - 1) * (1 - (1 - 1 / cols.ep) ** shard.top_k)  # ranks other than its own that a token goes to
    chosen = np.where(cols.remote, np.minimum(shard.groups, chosen) * cols.remote, chosen)  # once a node, then over NVLink
    distinct = np.where(cols.alltoall, chosen, tp - 1)
    moe_bytes = shard.moe_layers * tokens * shard.hidden * distinct * (cols.payload + 2)
    latency = np.where(cols.adp, 2 * shard.moe_layers, reduces) * start_s(cols, e)
    return many * latency, many * np.where(cols.adp, moe_bytes, reduce_bytes) / link_speed(cols, e)


def start_s(cols: Columns, e: Mapping[str, Array]) -> Array:
    """Latency of one collective: an all-reduce, or half of what carries tokens to experts and back under attention DP."""
    reach = 1 + np.log2(np.maximum(cols.tp, 1)) / 3  # 2 at 8 ranks
    return np.where(cols.adp, e["alltoall_us"], e["allreduce_us"]) * 1e-6 * reach / 2


def link_speed(cols: Columns, e: Mapping[str, Array]) -> Array:
    """Bytes a second that a rank receives of a collective."""
    return cols.nvlink * np.where(cols.remote, e["network"], e["link"])


def decode_terms(cols: Columns, e: Mapping[str, Array], batch: Array, context: Array) -> dict[str, Array]:
    """One decoding step of `batch` sequences (over all ranks) whose caches hold `context` tokens each."""
    shard, width = cols.shard, 1 + cols.mtp
    local = np.maximum(batch / cols.dp, 1.0)
    tokens = local * width
    cached = local * context * shard.layers
    kv_read = cached * cols.kv_bytes / (cols.bandwidth * e["kv_memory"])
    rows = np.maximum(shard.heads * width, 64)  # rows of a tensor-core tile
    kv_flops = cached * rows * 2 * (shard.latent + shard.latent - 64) / (cols.attention_flops * e["attention_flops"])
    latency, transfer = comm_s(cols, e, tokens)
    head = tokens * shard.head_s / e["dense_flops"]
    kernels = shard.kernels + shard.moe_layers * (_unfused(cols) + cols.separate * e["cutlass_kernels"])
    return {
        "kernels": kernels * e["kernel_us"] * 1e-6 + cols.off["cuda_graph"] * e["prefill_fixed_ms"] * 1e-3,
        "collective_latency": latency,
        "collective_transfer": transfer,
        "dense": dense_s(cols, e, tokens, e["dense_flops"]) + head,
        "experts": expert_s(cols, e, np.maximum(batch, 1) * width, e["expert_flops"]),
        "attention": _longer(kv_read, kv_flops) + cols.off["absorption"] * _expand_s(cols, e, cached),
        "elementwise": tokens * shard.layers * e["passes"] * shard.hidden * 2 / cols.bandwidth,
        "host": (e["host_us"] + local * e["sequence_us"] + cols.off["overlap"] * OVERLAPPED_US) * 1e-6,
    }


def _unfused(cols: Columns) -> Array:
    """Kernels more a MoE layer where a fusion is switched off."""
    return sum(UNFUSED[name] * cols.off[name] for name in UNFUSED)


def _expand_s(cols: Columns, e: Mapping[str, Array], cached: Array) -> Array:
    """Without absorption every step writes out keys and values of the whole cache: [cached, 512] x [512, 256] a head."""
    flops = cached * cols.shard.heads * 2 * 512 * 256 / (cols.prefill_flops * e["dense_flops"])
    return flops + cached * cols.shard.heads * (192 + 128) * 2 * 2 / (cols.bandwidth * e["kv_memory"])


def draft_terms(cols: Columns, e: Mapping[str, Array], batch: Array) -> dict[str, Array]:
    """The MTP drafts of a step: `mtp` passes through one layer and the head."""
    shard = cols.shard
    read = shard.draft_dense_bytes / e["dense_memory"]
    read = read + touched(np.maximum(batch, 1), cols, e["spread"], e["fullest"]) * shard.draft_expert_bytes / e["expert_memory"]
    return {"drafts": cols.mtp * (read / cols.bandwidth + e["draft_us"] * 1e-6)}


def prefill_terms(
    cols: Columns, e: Mapping[str, Array], tokens: Array, context: Array, beside: Array, everywhere: Array | float = 1.0
) -> dict[str, Array]:
    """`tokens` prompt tokens of one rank, attending to `context` tokens on average, in a step that decodes `beside` tokens.

    `everywhere` ranks prefill as many at the same time: their tokens meet in the experts.
    """
    shard = cols.shard
    flops = e["prefill_flops"]
    attention = shard.layers * shard.heads * _attended(cols, tokens, context) / (cols.prefill_flops * e["prefill_attention"])
    experts = expert_s(cols, e, tokens * everywhere + beside, flops) - expert_s(cols, e, beside, flops)
    return {
        "dense": tokens * shard.dense_s / flops,
        "experts": experts,
        "attention": attention,
        "collectives": comm_s(cols, e, tokens)[1],
        "elementwise": tokens * shard.layers * e["prefill_passes"] * shard.hidden * 2 / cols.bandwidth,
    }


def _attended(cols: Columns, tokens: Array, context: Array) -> Array:
    """FLOP of a head and layer: keys and values written out (192 + 128 wide), where every chunk of a prompt but the first writes
    out again what the cache holds of it, or absorbed (576 + 512 wide), whichever is less: absorbed up to chunks of some 170."""
    pairs, chunk = tokens * context, np.minimum(cols.max_num_tokens, cols.isl)
    again = tokens * (cols.isl / chunk - 1) / 2  # cached tokens, once for each chunk that attends to them
    return np.minimum(2 * pairs * (192 + 128) + 2 * again * 512 * 256, 2 * pairs * (576 + 512))


def accepted(cols: Columns, e: Mapping[str, Array]) -> Array:
    """Tokens a sequence gains in a step, 1 without MTP."""
    table = np.array(DEFAULT_DRAFTS)
    drafts = table[np.minimum(cols.mtp, len(table) - 1).astype(int)] * e["acceptance"]
    length = np.where(cols.waves, cols.isl + cols.osl, 2 * cols.osl)
    plain = np.where(cols.waves, 1.0, e["plain_prompts"])
    drafts = drafts * plain * e["acceptance_doubling"] ** np.log2(np.clip(length, 1024, 16384) / 2048)
    return np.where(np.isnan(cols.acceptance), 1 + np.minimum(drafts, cols.mtp), cols.acceptance)
