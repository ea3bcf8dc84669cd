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
from pipeline.planner.case import Case
from pipeline.planner.params import LINEAR_CLASSES
from pipeline.planner.policy import num_gpus, recipe
from pipeline.planner.search.disagg import Split, splits
from pipeline.planner.search.front import front, recommended
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
    num_candidates: int
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
    slo, total = case.config.slo, num_gpus(case.config)
    own = candidates(case, case.config.quant.name)
    if not own:
        return None
    scored = score(own, total)
    best = recommended(scored, slo)
    return Found(
        best=scored.point(best),
        reasons=reasons(scored, best, slo),
        front=[scored.point(index) for index in front(scored)],
        others=_others(case, total),
        splits=splits(own, total, case.concurrency),
        num_candidates=len(own),
        meets_slo=bool(scored.meets(slo)[best]),
    )


def _others(case: Case, total: int) -> dict[str, list[Point]]:
    """Fronts of the published precisions that run natively here, but for the one that is asked for."""
    fronts = {}
    for name in PRECISIONS:
        quant = recipe(name)
        if name == case.config.quant.name or quant.routed_experts not in case.hw.weight_formats:
            continue
        formats = {**case.formats, **{cls: getattr(quant, cls) for cls in (*LINEAR_CLASSES, "mtp")}}
        other = replace(case, config=replace(case.config, quant=quant), formats=formats)
        if found := candidates(other, name, steps=False):
            scored = score(found, total)
            fronts[name] = [scored.point(index) for index in front(scored)]
    return fronts
