"""Lengths, tokens a step, memory and the requests it holds."""

from __future__ import annotations

import math
from dataclasses import replace

from pipeline.planner.memory import GIB, RankMemory, memory_of, tokens_per_block
from pipeline.planner.rules.base import ISSUE, REFUSE, WARN, Rule
from pipeline.planner.setup import Layout, Setup, divides

__all__ = ["LENGTHS", "MEMORY"]

QUEUE_LIMIT = 1 / 3
"""Share of the requests that must fit. NVIDIA publishes throughput recipes of which 37 % fit (B200 FP4 ADP4+EP4 with 8,192
requests); they queue, and nobody waits. With a limit on the time to the first token all must fit: with 104 of 256 it took 537 s."""


def _length(setup: Setup) -> str | None:
    total, limit = setup.isl + setup.osl, setup.arch.max_position_embeddings
    if total <= limit:
        return None
    return (
        f"workload.isl={setup.isl} + workload.osl={setup.osl} = {total:,} tokens, but the model has {limit:,} positions "
        f"(max_position_embeddings): shorten one by {total - limit:,}."
    )


def _positions(setup: Setup) -> str | None:
    limit = setup.arch.max_position_embeddings
    if not setup.max_seq_len or setup.max_seq_len <= limit:
        return None
    return f"max_seq_len={setup.max_seq_len:,} exceeds the {limit:,} positions of {setup.model}: set {limit} or less."


def _max_seq_len(setup: Setup) -> str | None:
    total = setup.isl + setup.osl
    if not setup.max_seq_len or setup.max_seq_len >= total or total > setup.arch.max_position_embeddings:
        return None
    return f"max_seq_len={setup.max_seq_len:,} cuts requests of {setup.isl:,} + {setup.osl:,} tokens: set {total} or more."


def _prompt(setup: Setup) -> str | None:
    if setup.chunked_prefill or setup.max_num_tokens > setup.isl or setup.role == "decode":
        return None
    return (
        f"max_num_tokens={setup.max_num_tokens:,} cannot take a prompt of {setup.isl:,} tokens in one step: set it to "
        f"{setup.isl + 1:,} or more, or workload.chunked_prefill=true."
    )


def _beside(setup: Setup) -> str | None:
    asked = -(-setup.concurrency // setup.layout.cache_ranks) if setup.concurrency else setup.max_batch_size
    batch = min(setup.max_batch_size, asked)
    wanted = setup.isl + (batch - 1) * (1 + setup.mtp)
    if setup.chunked_prefill or setup.max_num_tokens >= wanted or setup.role != "both":
        return None
    return (
        f"max_num_tokens={setup.max_num_tokens:,} has no room for a prompt of {setup.isl:,} tokens beside {batch - 1} decoding "
        f"requests: prompts wait for a smaller batch; {wanted:,} is enough."
    )


def _decode_tokens(setup: Setup) -> str | None:
    wanted = setup.max_batch_size * (1 + setup.mtp)
    if setup.max_num_tokens >= wanted or setup.max_batch_size == 1:
        return None
    return (
        f"max_num_tokens={setup.max_num_tokens:,} is below max_batch_size x (1 + drafts) = {wanted:,}: a full batch does not "
        f"fit a step, and the engine never runs one."
    )


def _fits(setup: Setup) -> str | None:
    rank = _tightest(setup)
    if rank.free > 0:
        return None
    need = rank.loaded + rank.engine
    return (
        f"{setup.model} in {setup.expert_format} does not fit hw={setup.hw.name}: {setup.layout} takes {need:,} bytes "
        f"({need / GIB:.1f} GiB) a GPU, of which weights {rank.loaded / GIB:.1f}, and the GPU has {rank.visible:,} "
        f"({rank.visible / GIB:.1f} GiB): {_way_out(setup)}."
    )


def _way_out(setup: Setup) -> str:
    """The least number of GPUs that would do, where a smaller format is not at hand."""
    for tp in (2**power for power in range(7)):
        adp = setup.layout.attention_dp and tp > 1
        layout = Layout(tp, tp, adp, setup.layout.pp)
        wider = replace(setup, layout=layout, max_num_tokens=min(setup.max_num_tokens, setup.isl + 512))
        if tp > setup.layout.tp and divides(setup.arch, setup.formats, layout) and _held(wider) >= 1:
            inside = tp <= max(setup.hw.num_devices, setup.hw.nvlink_domain)
            return f"set parallel.tp={tp}" if inside else f"it needs {tp} GPUs, or ones with more memory"
    return "choose GPUs with more memory or a smaller weight format"


def _one(setup: Setup) -> str | None:
    if _tightest(setup).free <= 0 or _held(setup) >= 1:
        return None
    tokens = _tightest(setup).kv_tokens
    return (
        f"The KV cache of {setup.layout} on hw={setup.hw.name} holds {tokens:,} tokens a rank, not even one request of "
        f"{setup.isl:,} + {setup.osl:,}: {_more(setup)}."
    )


def _room(setup: Setup) -> str | None:
    held, wanted = _held(setup), setup.concurrency or 0
    if held < 1 or held >= wanted or not (setup.ttft_ms or held < wanted * QUEUE_LIMIT):
        return None
    limit = f" beyond slo.ttft_ms={setup.ttft_ms:g}" if setup.ttft_ms else ""
    return f"{_too_many(setup, held)} the rest would queue and their first token come late{limit}. {_less(setup)}"


def _queue(setup: Setup) -> str | None:
    held, wanted = _held(setup), setup.concurrency or 0
    if setup.ttft_ms or not max(1, wanted * QUEUE_LIMIT) <= held < wanted:
        return None
    return f"{_too_many(setup, held)} the rest will queue when all are at full length. {_less(setup)}"


def _sequence(setup: Setup) -> str | None:
    """A limit that no request can reach."""
    tokens = _tightest(setup).kv_tokens
    if not setup.max_seq_len or tokens >= setup.max_seq_len or _held(setup) < 1:
        return None
    return f"max_seq_len={setup.max_seq_len:,}, but the cache holds {tokens:,} tokens a rank: longer requests never finish."


def _too_many(setup: Setup, held: int) -> str:
    asked = setup.told("workload.concurrency", setup.concurrency, f"{setup.concurrency:,} requests at once")
    return (
        f"The KV cache of {setup.layout} on hw={setup.hw.name} holds {held:,} sequences of {setup.isl + setup.osl:,} tokens "
        f"({_tightest(setup).kv_tokens:,} tokens a rank), not {asked}:"
    )


def _less(setup: Setup) -> str:
    return f"Lower workload.concurrency, {_more(setup)}."


def _more(setup: Setup) -> str:
    smaller = "set quant.kv_dtype=fp8, " if setup.kv_format == "bf16" else ""
    return f"{smaller}raise engine.trtllm.free_gpu_memory_fraction or use more GPUs"


_last: tuple[Setup, RankMemory] | None = None


def _tightest(setup: Setup) -> RankMemory:
    """The rank with the least room. Every rule asks for it, so the last answer is kept."""
    global _last
    if _last is None or _last[0] is not setup:
        _last = setup, min(memory_of(setup), key=lambda rank: (rank.kv_tokens, rank.free))
    return _last[1]


def _held(setup: Setup) -> int:
    """Whole requests that the instance's caches hold; prefill workers keep the prompt and one token."""
    tokens = setup.isl + (1 if setup.role == "prefill" else setup.osl) + setup.mtp
    block = tokens_per_block(setup.arch, setup.hw.sm or 0)
    return _tightest(setup).kv_tokens // (math.ceil(tokens / block) * block) * setup.layout.cache_ranks


LENGTHS = (
    Rule("length", REFUSE, _length, "config.json, max_position_embeddings"),
    Rule("positions", REFUSE, _positions, "config.json, max_position_embeddings"),
    Rule("max_seq_len", REFUSE, _max_seq_len, "TensorRT-LLM llm_args.py"),
    Rule("prompt", REFUSE, _prompt, f"{ISSUE} 3486: max_num_tokens must hold a prompt without chunked prefill"),
    Rule("beside", WARN, _beside, f"{ISSUE} 3486: 1,127 = 1,000 + 128 - 1"),
    Rule("decode_tokens", WARN, _decode_tokens, "TensorRT-LLM llm_args.py: max_batch_size > max_num_tokens"),
)
MEMORY = (
    Rule("fits", REFUSE, _fits, "pipeline/planner/memory.py; ai-dynamo/dynamo issue 8469; NVIDIA/TensorRT-LLM issue 5872"),
    Rule("one", REFUSE, _one, "pipeline/planner/memory.py"),
    Rule("room", REFUSE, _room, "ai-dynamo/aiconfigurator issue 652: a batch above the cache queues silently"),
    Rule("queue", WARN, _queue, "ai-dynamo/aiconfigurator issue 652"),
    Rule("sequence", WARN, _sequence, "a DeepSeek-V4 recipe of 800k tokens did not start on 8 H200"),
)
