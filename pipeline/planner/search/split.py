"""The split of prefill and decode that is deployed where engine.trtllm.serving=disaggregated, and what the report says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.planner.case import Case
from pipeline.planner.choose import Choice, Decision, moe_backend, rank_limits
from pipeline.planner.memory import memory_of, tokens_per_block
from pipeline.planner.search import Found
from pipeline.planner.search.disagg import Split, splits
from pipeline.planner.search.nodes import MOST_NODES, NodeCounts, least
from pipeline.planner.setup import Setup

__all__ = ["SplitChoice", "split_of", "split_report"]

MODEL = "pipeline/planner/search/disagg.py"


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """Both sides, and the decode side as a `Choice`, for users wait on it."""

    split: Split
    generation: Choice
    meets_slo: bool
    """False: only the favourable end of the 80 % interval keeps slo.*."""

    @property
    def setups(self) -> tuple[Setup, Setup]:
        """Prefill and decode."""
        return self.split.setups

    @property
    def counts(self) -> tuple[int, int]:
        """Instances of each."""
        return self.split.counts


def split_of(case: Case, found: Found | None) -> SplitChoice | None:
    """The split with the most tokens/s/GPU within slo.*; None where instances are to be alike.

    Raises:
        ConfigError: if nothing predicts it, two instances do not fit, or slo.* is out of reach.
    """
    if case.trtllm.serving != "disaggregated":
        return None
    if found is None:
        raise ConfigError(
            f"engine.trtllm.serving=disaggregated is planned by predicted speed, and {case.hw.title} with parallel.pp="
            f"{case.config.parallel.pp} has no prediction: choose engine.trtllm.serving=aggregated."
        )
    asked = (case.trtllm.context_instances, case.trtllm.generation_instances)
    tried = _on_fewest_nodes(case, found.counts, asked)
    if not tried:
        raise ConfigError(_no_room(case, found, asked))
    tried = [split for split in tried if _keeps(case, split, split.result.interval[0])]
    kept = [split for split in tried if _keeps(case, split, split.result.tpot_ms)]
    if not tried:
        raise ConfigError(f"No split of prefill and decode is predicted to meet {case.asked}: relax the limits, or leave it whole.")
    best = max(kept or tried, key=lambda split: split.tokens_per_gpu)
    return SplitChoice(best, _generation(case, best), bool(kept))


def _on_fewest_nodes(case: Case, counts: NodeCounts, asked: tuple[int | None, int | None]) -> list[Split]:
    """Splits on the fewest nodes on which one keeps every limit, where a total is asked for; else on all at hand."""

    def on(nodes: int) -> list[Split]:
        scored = counts.at(nodes)
        return splits(scored.candidates, case.concurrency, asked) if scored else []

    most = counts.at_hand or MOST_NODES
    if not case.has_total or most == 1:
        return on(counts.chosen)
    fewest = least(lambda nodes: any(_keeps(case, split, split.result.tpot_ms) for split in on(nodes)), most)
    return on(fewest or counts.at_hand or counts.chosen)


def split_report(split: SplitChoice) -> dict[str, Any]:
    """What the plan's report says about its speed, over what it says about alike instances."""
    chosen, result = split.split, split.split.result
    spread = result.interval[1] / result.tpot_ms
    numbers = {
        "ttft_ms": result.ttft_ms, "tpot_ms": result.tpot_ms, "tokens_per_user": result.tokens_per_user,
        "tokens_per_gpu": chosen.tokens_per_gpu, "tokens_per_second": chosen.tokens_per_gpu * chosen.paid,
    }  # fmt: skip
    return {
        "layout": chosen.label,
        "nodes": chosen.nodes,
        "gpus": chosen.paid,
        "concurrency": chosen.concurrency,
        "max_batch_size": split.setups[1].max_batch_size,
        "max_num_tokens": split.setups[1].max_num_tokens,
        **{name: round(value, 3) for name, value in numbers.items()},
        "tpot_interval_ms": [round(value, 3) for value in result.interval],
        "tokens_per_gpu_interval": [round(chosen.tokens_per_gpu * factor, 3) for factor in (1 / spread, spread)],
        "meets_slo": split.meets_slo,
    }


def _keeps(case: Case, split: Split, tpot_ms: float) -> bool:
    """Whether a split keeps slo.* if a token takes `tpot_ms`."""
    slo, faster = case.limits, split.result.tpot_ms / tpot_ms
    rate = split.tokens_per_gpu * faster
    limits = (
        (tpot_ms, slo.tpot_ms),
        (split.result.ttft_ms / faster, slo.ttft_ms),
        (slo.tokens_per_gpu, rate),
        (slo.tokens_per_second, rate * split.paid),
    )
    return all(value is None or limit is None or value <= limit for value, limit in limits)


def _no_room(case: Case, found: Found, asked: tuple[int | None, int | None]) -> str:
    gpus, least = found.best.candidate.paid, min(item.setup.layout.world_size for item in found.counts.scored.candidates)
    names = ("engine.trtllm.context_instances", "engine.trtllm.generation_instances")
    wanted = ", ".join(f"{name}={count}" for name, count in zip(names, asked, strict=True) if count)
    if wanted:
        return f"{gpus} GPUs do not hold {wanted} instances of {least} GPUs or more: ask for fewer, or leave both to the plan."
    return (
        f"engine.trtllm.serving=disaggregated takes two instances, and the smallest that holds {case.config.model.name} takes "
        f"{least} of {gpus} GPUs: set hw.num_nodes={-(-2 * least // case.hw.num_devices)}, or engine.trtllm.serving=aggregated."
    )


def _generation(case: Case, split: Split) -> Choice:
    """Decode instances with their decisions."""
    context, setup = split.setups
    memory = min(memory_of(setup), key=lambda rank: rank.kv_tokens)
    block = tokens_per_block(case.arch, case.hw.sm or 0)
    prompts = f"{context.max_num_tokens:,} tokens a step on each rank"
    bound = f"balanced with the prompts; bound by {split.result.bound}"
    nodes = f"the fewest of those tried for {case.asked}" if case.has_total else "hw.num_nodes; no total is asked for"
    decisions = (
        Decision("serving", "disaggregated", "asked for: prompts never stop those who decode", "engine.trtllm.serving"),
        Decision("context", f"{split.counts[0]} x {context.layout}", f"the most prompts/s/GPU: {prompts}", MODEL),
        Decision("nodes", split.nodes, nodes, MODEL),
        Decision("generation", f"{split.counts[1]} x {setup.layout}", bound, MODEL),
        Decision("mtp", setup.mtp, "the most tokens/s/GPU within the limits", MODEL),
        moe_backend(case, setup.layout),
        *rank_limits(case, setup.layout, setup.max_batch_size, setup.max_num_tokens),
    )
    held = memory.sequences(case.isl + case.osl + setup.mtp, block)
    return Choice(setup=setup, memory=memory, sequences=held, decisions=decisions)
