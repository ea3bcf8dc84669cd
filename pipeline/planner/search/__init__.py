"""Search: all configurations of a case, predicted, and the one to build.

    found = search(case)      raises ConfigError where slo.* is out of reach
    found.best                the recommended Point, with found.reasons for every choice
    found.front               the Pareto front (tokens/s/user against tokens/s/GPU) of every configuration within memory
    found.others              fronts of the other precisions that this hardware runs
    found.splits              prefill and decode on instances of their own

`space` lists candidates, `score` predicts them, `front` picks, `why` explains, `disagg` splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.config.schema import HwConfig
from pipeline.core.errors import ConfigError
from pipeline.planner.case import Case
from pipeline.planner.params import LINEAR_CLASSES
from pipeline.planner.policy import recipe
from pipeline.planner.search.disagg import Split, splits
from pipeline.planner.search.front import front, nearest, pareto, recommended
from pipeline.planner.search.nodes import NodeCounts, fewest_beyond, node_counts
from pipeline.planner.search.score import Point, score
from pipeline.planner.search.space import candidates
from pipeline.planner.search.why import Reason, reasons

__all__ = ["Found", "Point", "Reason", "Split", "predictable", "search", "searchable"]

PRECISIONS = ("nvfp4", "nvfp4_v2", "fp8_block")
"""Recipes that checkpoints of R1 are published in, and engines measured with."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    best: Point
    reasons: list[Reason]
    front: list[Point]
    others: Mapping[str, list[Point]]
    """By recipe."""
    splits: list[Split]
    counts: NodeCounts
    """Numbers of nodes that were tried, and the one that is planned for."""
    nodes_needed: int | None
    """For the total that is asked for within slo.*; None: none is asked for, or no number of them would do."""
    meets_slo: bool
    """False: only the favourable end of the 80 % interval keeps slo.*."""


def predictable(hw: HwConfig) -> bool:
    """Whether the speed model knows enough of this hardware."""
    return bool(hw.sm and hw.flops_bf16 and hw.flops_fp8 and hw.nvlink_bandwidth)


def searchable(case: Case) -> bool:
    """Whether speed decides; else `choose` follows the published recipes."""
    return predictable(case.hw) and case.config.parallel.pp == 1


def search(case: Case) -> Found | None:
    """None where nothing fits: `choose` then says which rules are broken."""
    counts = node_counts(case)
    if counts is None:
        return None
    scored, nodes = counts.scored, counts.chosen
    best = recommended(scored, case.limits)
    if best is None:
        raise ConfigError(_out_of_reach(case, scored.point(nearest(scored, case.limits))))
    kept = bool(scored.meets(case.limits)[best])
    return Found(
        best=scored.point(best),
        reasons=reasons(scored, best, case.limits),
        front=_front(counts),
        others=_others(case, nodes),
        splits=splits(scored.candidates, case.concurrency),
        counts=counts,
        nodes_needed=nodes if kept and case.has_total else fewest_beyond(case),
        meets_slo=kept,
    )


def _front(counts: NodeCounts) -> list[Point]:
    """Over all numbers of nodes that are enough: more of them are faster for each user, and dearer."""
    enough = [scored for nodes, scored in counts.tried.items() if nodes >= counts.chosen and scored]
    points = [scored.point(index) for scored in enough for index in front(scored)]
    chosen = pareto([point.prediction.tpot_ms for point in points], [point.tokens_per_gpu for point in points])
    return [points[at] for at in chosen]


def _out_of_reach(case: Case, point: Point) -> str:
    prediction, (low, high) = point.prediction, point.prediction.interval
    count, nodes = point.candidate.concurrency, fewest_beyond(case)
    more = f"set hw.num_nodes={nodes}, which is predicted to do, " if nodes and nodes > point.candidate.nodes else ""
    total = case.limits.tokens_per_second
    short = total is not None and point.tokens_per_second < total
    load = "leave workload.concurrency open (null), " if short else "lower workload.concurrency, "
    load = load if case.config.workload.concurrency else ""
    return (
        f"No configuration of this hardware is predicted to meet {case.asked}. Nearest: {point.label} with "
        f"{count:,} request{'' if count == 1 else 's'} at once, TTFT {prediction.ttft_ms:.0f} ms, TPOT {prediction.tpot_ms:.1f} ms "
        f"(80 %: {low:.1f} to {high:.1f}), {point.tokens_per_gpu:.0f} tokens/s/GPU, {point.tokens_per_second:,.0f} tokens/s. "
        f"Relax the limits to that, {more}{load}or choose other hardware."
    )


def _others(case: Case, nodes: int) -> dict[str, list[Point]]:
    """Fronts of the published precisions that run natively here, but for the one that is asked for."""
    fronts = {}
    for name in PRECISIONS:
        quant = recipe(name)
        if name == case.recipe or quant.routed_experts not in case.hw.weight_formats:
            continue
        formats = {**case.formats, **{cls: getattr(quant, cls) for cls in (*LINEAR_CLASSES, "mtp")}}
        other = replace(case, config=replace(case.config, quant=quant), recipe=name, formats=formats)
        if found := candidates(other, nodes, steps=False):
            scored = score(found)
            fronts[name] = [scored.point(index) for index in front(scored)]
    return fronts
