"""What reuse of the cache between the turns of conversations is worth for a plan."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from pipeline.planner.case import Case
from pipeline.planner.choose import Choice
from pipeline.planner.memory import tokens_per_block
from pipeline.planner.perf import Machine, PerfCase, prefill_rate
from pipeline.planner.workload import hit_rate

__all__ = ["ENDLESS", "reuse_notes", "reuse_of"]

ENDLESS = 2**62
"""Tokens of a cache that never forgets."""
WORTH_SAYING = 0.1


def reuse_of(case: Case, choice: Choice) -> dict[str, Any] | None:
    """Hit rates of the prompt tokens, and what they save; None where no conversation has a second turn."""
    requests = case.demand.requests
    if not requests:
        return None
    block, ranks = tokens_per_block(case.arch, case.hw.sm or 0), choice.layout.cache_ranks
    tokens = int(choice.memory.kv_tokens * case.demand.share)
    rate = partial(hit_rate, requests, block=block, warm=case.demand.warm)
    kept = rate(tokens, ranks=ranks)
    return {
        "endless_cache": round(rate(ENDLESS), 4),
        "this_cache": round(kept, 4),
        "without_routing": round(rate(tokens, ranks=ranks, by_session=False), 4),
        "prompt_tokens": case.isl,
        "computed_tokens": round(case.isl * (1 - kept)),
        "conversation_tokens": case.longest,
        "conversation_bytes": case.longest * choice.memory.kv_bytes_per_token,
        "conversations_held": choice.memory.kv_tokens * ranks // case.longest,
        "shared_prefix_bytes": _shared_prefix(case, choice, block),
        "prefill_ms": {"without": _prefill_ms(case, choice, case.isl), "with": _prefill_ms(case, choice, case.isl * (1 - kept))},
    }


def _shared_prefix(case: Case, choice: Choice, block: int) -> int:
    """Bytes of a rank's cache that its requests save because they hold the system prompt together."""
    whole = case.config.workload.system_tokens // block * block
    return (choice.setup.max_batch_size - 1) * whole * choice.memory.kv_bytes_per_token


def _prefill_ms(case: Case, choice: Choice, tokens: float) -> float:
    """Predicted time of a step in which each rank computes one prompt of `tokens` new tokens, in ms. A lower bound: attention
    to the tokens that are found in the cache is left out, about a quarter of a new token's products where it finds 4,096."""
    setup, layout = choice.setup, choice.layout
    new = max(1.0, tokens)
    one = PerfCase(
        machine=Machine.of(case.hw), arch=case.arch, formats=case.formats, kv_format=case.kv_format, tp=layout.tp, ep=layout.ep,
        attention_dp=layout.attention_dp, concurrency=1, isl=new, osl=case.osl, mtp=setup.mtp, engine=setup.version,
        moe_backend=setup.moe_backend, max_num_tokens=math.ceil(new),
    )  # fmt: skip
    return round(prefill_rate(one).latency_ms, 1)


def reuse_notes(reuse: dict[str, Any] | None) -> list[str]:
    """What the user should be told about it."""
    if not reuse:
        return []
    notes, kept = [], reuse["this_cache"]
    if kept - reuse["without_routing"] > WORTH_SAYING:
        notes.append(
            f"The cache holds {kept:.0%} of the prompt tokens where a conversation stays on its attention-DP rank, and only "
            f"{reuse['without_routing']:.0%} where requests go round: route by conversation (enable_kv_cache_aware_routing, "
            f"from 1.4), or use attention TP."
        )
    if reuse["endless_cache"] - kept > WORTH_SAYING:
        notes.append(
            f"The cache forgets: it finds {kept:.0%} of the prompt tokens, an endless one {reuse['endless_cache']:.0%}; it holds "
            f"{reuse['conversations_held']:,} whole conversations."
        )
    return notes
