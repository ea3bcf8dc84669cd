"""How many nodes it takes: the fewest on which some configuration keeps every limit and reaches the total that is asked for.

More nodes never make it worse: there are as many instances or more, each with as many requests or fewer. So the fewest are
found by doubling and halving. Only `slo.tokens_per_gpu` falls with nodes that nobody needs, so the fewest decide it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pipeline.core.errors import ConfigError
from pipeline.planner.case import Case
from pipeline.planner.policy import num_gpus, one_instance
from pipeline.planner.search.front import nearest, recommended
from pipeline.planner.search.score import Point, Scored, score
from pipeline.planner.search.space import candidates, layouts, on_nodes

__all__ = ["MOST_NODES", "NodeCounts", "fewest_beyond", "least", "node_counts", "why_nodes"]

MOST_NODES = 1024
"""Counts that are tried where hw.num_nodes is open."""
At = Callable[[int], Scored | None]


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """What was tried, by count; None where not one candidate fits."""

    chosen: int
    tried: Mapping[int, Scored | None]
    at_hand: int | None
    at: At
    """Candidates on any number of nodes."""

    @property
    def scored(self) -> Scored:
        """The candidates on as many nodes as are planned for."""
        scored = self.tried[self.chosen]
        assert scored is not None
        return scored

    def best(self, case: Case, nodes: int) -> tuple[Point, bool] | None:
        """The configuration for that many nodes, and whether it keeps every limit; None where none fits."""
        scored = self.tried[nodes]
        if scored is None:
            return None
        index = recommended(scored, case.limits)
        index = nearest(scored, case.limits) if index is None else index
        return scored.point(index), bool(scored.meets(case.limits)[index])


def node_counts(case: Case) -> NodeCounts | None:
    """The fewest nodes that do, or all at hand where no total is asked for; None where no candidate fits.

    Raises:
        ConfigError: if hw.num_nodes is open and so is what to count them for.
    """
    at_hand = case.hw.num_nodes
    if at_hand is None and not case.has_total:
        raise ConfigError(
            "hw.num_nodes=null asks how many nodes it takes, but not for what: give workload.requests_per_second, "
            "slo.tokens_per_second or workload.concurrency, or the number of nodes at hand."
        )
    tried: dict[int, Scored | None] = {}
    evaluate = _evaluator(case)

    def at(nodes: int) -> Scored | None:
        if nodes not in tried:
            tried[nodes] = evaluate(nodes)
        return tried[nodes]

    most = at_hand or MOST_NODES
    chosen = _fewest(case, at, most) if case.has_total and not one_instance(case.config) else most
    for beside in (chosen - 1, chosen + 1) if most > 1 and case.has_total else ():
        if 1 <= beside <= most:
            at(beside)
    return NodeCounts(chosen, dict(sorted(tried.items())), at_hand, at) if at(chosen) else None


def fewest_beyond(case: Case) -> int | None:
    """The nodes that it would take, were there more than are at hand; None if none would do, or no total is asked for."""
    if not case.has_total or one_instance(case.config):
        return None
    wide = replace(case, config=replace(case.config, hw=replace(case.hw, num_nodes=None)))
    return least(_enough(case, _evaluator(wide), sure=True), MOST_NODES)


def _evaluator(case: Case) -> At:
    """Candidates and speeds by number of nodes. Instances are predicted once where their load does not depend on it."""
    bases = layouts(case)
    if case.concurrency:
        return lambda nodes: score(found) if (found := candidates(case, nodes, bases)) else None
    widest = -(-num_gpus(case.config) // case.hw.num_devices)
    found = candidates(case, case.hw.num_nodes or widest, bases)
    if not found:
        return lambda nodes: None
    scored = score(found)

    def moved(nodes: int) -> Scored | None:
        if nodes == case.hw.num_nodes:
            return scored
        there = [on_nodes(case, item, nodes) for item in found]
        return scored.moved(there) if any(there) else None

    return moved


def _fewest(case: Case, at: At, most: int) -> int:
    """The least count that keeps every limit, or whose favourable end does; `most` where none does."""
    return least(_enough(case, at, sure=True), most) or least(_enough(case, at, sure=False), most) or most


def _enough(case: Case, at: At, *, sure: bool) -> Callable[[int], bool]:
    """Whether a count keeps every limit that more nodes can help with."""
    limits = replace(case.limits, tokens_per_gpu=None)

    def enough(nodes: int) -> bool:
        scored = at(nodes)
        return scored is not None and (bool(scored.meets(limits).any()) if sure else recommended(scored, limits) is not None)

    return enough


def least(enough: Callable[[int], bool], most: int) -> int | None:
    """The least count up to `most` that is enough."""
    low, high = 0, 1
    while not enough(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def why_nodes(case: Case, counts: NodeCounts) -> str:
    """Why as many, what one node less would lack, and what it would take to need one more."""
    chosen, at_hand = counts.chosen, counts.at_hand
    if one_instance(case.config):
        return "parallel.tp asks for one instance"
    if not case.has_total:
        return "hw.num_nodes; all are used where no total is asked for"
    asked = case.asked or f"{case.concurrency:,} requests at once"
    best = counts.best(case, chosen)
    if best is None or not best[1]:
        return f"as near as those at hand come to {asked}"
    parts = [f"enough for {asked}" if chosen == 1 else f"the fewest for {asked}: {_lacking(case, counts, chosen - 1)}"]
    if case.limits.tokens_per_second:
        most = counts.scored.tokens_per_second[counts.scored.meets(case.limits)].max()
        parts.append(f"that is {case.limits.tokens_per_second / most:.0%} of the {most:,.0f} tokens/s that they reach")
    if at_hand and at_hand > chosen:
        parts.append(f"{at_hand - chosen} of {at_hand} left free")
    return "; ".join(parts)


def _lacking(case: Case, counts: NodeCounts, nodes: int) -> str:
    """What the best configuration for fewer nodes misses."""
    name = f"{nodes} node{'s' if nodes > 1 else ''}"
    best = counts.best(case, nodes)
    if best is None:
        return f"{name} cannot hold the requests"
    point, limits = best[0], case.limits
    reached = {
        "TPOT {:,.1f} ms": (point.prediction.tpot_ms, limits.tpot_ms),
        "TTFT {:,.0f} ms": (point.prediction.ttft_ms, limits.ttft_ms),
        "{:,.0f} tokens/s": (-point.tokens_per_second, -limits.tokens_per_second if limits.tokens_per_second else None),
    }
    broken = [text.format(abs(value)) for text, (value, limit) in reached.items() if limit is not None and value > limit]
    return f"{name} come{'' if nodes > 1 else 's'} to {', '.join(broken)} ({point.label})"
