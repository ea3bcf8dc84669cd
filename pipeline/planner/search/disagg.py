"""Prefill and decode on instances of their own: the best split of the hardware's GPUs, as a front beside the aggregated one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.planner.choose import LARGEST_BATCH
from pipeline.planner.perf import Disaggregated, Machine, PerfCase, decode_only, disaggregate, prefill_rate
from pipeline.planner.search.front import pareto
from pipeline.planner.search.score import perf_case
from pipeline.planner.search.space import Candidate
from pipeline.planner.setup import Layout, Setup

__all__ = ["Split", "splits"]

LOADS = 6
"""Concurrencies that are tried for each split."""
STEP = 8192
"""Tokens of a prefill step, if a prompt is no longer."""


@dataclass(frozen=True, slots=True)
class Split:
    """P prefill and D decode instances."""

    prefill: Layout
    decode: Layout
    counts: tuple[int, int]
    mtp: int
    concurrency: int
    result: Disaggregated
    tokens_per_gpu: float
    """Over all GPUs that are paid for."""
    nodes: int
    paid: int
    """GPUs."""
    setups: tuple[Setup, Setup]
    """A prefill and a decode instance, as they are started."""

    @property
    def label(self) -> str:
        """3P x ADP4+EP4, 1D x ADP8+EP8."""
        drafts = f", MTP {self.mtp}" if self.mtp else ""
        return f"{self.counts[0]}P x {self.prefill}, {self.counts[1]}D x {self.decode}{drafts}"


def splits(
    candidates: Sequence[Candidate], concurrency: int | None, asked: tuple[int | None, int | None] = (None, None)
) -> list[Split]:
    """The Pareto front of splits of the same GPUs, fastest user first; empty where two instances do not fit.

    `asked` are the numbers of prefill and decode instances; None leaves them open.
    """
    total, nodes = candidates[0].paid, candidates[0].nodes
    shapes = _shapes(candidates, total)
    if not shapes:
        return []
    machine = Machine.of(candidates[0].setup.hw)
    cases = {key: _roomy(item, machine) for key, item in shapes.items()}
    first, fill = _prefill({layout: replace(case, mtp=0) for (layout, _), case in cases.items()})
    rate = prefill_rate(fill).prompts_per_second
    found = []
    for (second, mtp), case in cases.items():
        for counts in _counts(total, first.world_size, second.world_size, rate, case, asked):
            used = counts[0] * first.world_size + counts[1] * second.world_size
            for load in _loads(concurrency, counts[1] * second.cache_ranks, shapes[second, mtp].sequences):
                result = disaggregate(fill, case, counts, load)
                if result.bound != "prefill" or concurrency:  # prompts that queue without end are no operating point
                    setups = _context(shapes, first, mtp, fill), _generation(shapes[second, mtp], counts[1], load)
                    rate_of_all = result.tokens_per_gpu * used / total
                    found.append(Split(first, second, counts, mtp, load, result, rate_of_all, nodes, total, setups))
    chosen = pareto([split.result.tpot_ms for split in found], [split.tokens_per_gpu for split in found])
    return [found[at] for at in chosen]


def _shapes(candidates: Sequence[Candidate], total: int) -> dict[tuple[Layout, int], Candidate]:
    """The candidate with most room of each layout that leaves GPUs for a second instance, with and without drafts."""
    shapes: dict[tuple[Layout, int], Candidate] = {}
    drafts = {item.setup.mtp for item in candidates}
    tried = drafts & {0, 1} or drafts
    for item in candidates:
        layout, mtp = item.setup.layout, item.setup.mtp
        if layout.world_size * 2 > total or mtp not in tried or layout.ep != (layout.tp if layout.attention_dp else 1):
            continue
        if (layout, mtp) not in shapes or _better(item, shapes[layout, mtp]):
            shapes[layout, mtp] = item
    widest = max((layout.world_size for layout, _ in shapes), default=0)
    return {key: item for key, item in shapes.items() if key[0].world_size * 4 >= widest}


def _better(item: Candidate, other: Candidate) -> bool:
    """Whole prompts before parts of them, then more room."""
    return (other.setup.chunked_prefill, item.sequences) > (item.setup.chunked_prefill, other.sequences)


def _roomy(item: Candidate, machine: Machine) -> PerfCase:
    """As many requests a rank as its cache holds."""
    return replace(perf_case(item, machine), max_batch_size=max(1, min(item.sequences, LARGEST_BATCH)))


def _prefill(cases: dict[Layout, PerfCase]) -> tuple[Layout, PerfCase]:
    """The layout that takes the most prompts a second and GPU: whole prompts, no drafts."""
    fills = {layout: replace(case, max_num_tokens=max(STEP, int(case.isl) + 64)) for layout, case in cases.items()}
    best = max(fills, key=lambda layout: prefill_rate(fills[layout]).prompts_per_second / layout.world_size)
    return best, fills[best]


def _context(shapes: dict[tuple[Layout, int], Candidate], layout: Layout, mtp: int, fill: PerfCase) -> Setup:
    """A prefill instance: whole prompts, no decode step to capture or to overlap with, drafts only for their cache."""
    item = shapes.get((layout, mtp)) or next(item for (other, _), item in shapes.items() if other == layout)
    tokens = int(fill.max_num_tokens)
    return replace(
        item.setup, role="prefill", mtp=mtp, max_num_tokens=tokens, max_batch_size=max(1, tokens // max(1, int(fill.isl))),
        concurrency=None, graph_batch=0, overlap=False, transfer=item.setup.transfer or "DEFAULT",
    )  # fmt: skip


def _generation(item: Candidate, count: int, load: int) -> Setup:
    """A decode instance: its share of the requests, whose caches come from the prefill side."""
    share = math.ceil(load / count)
    batch = max(1, min(math.ceil(share / item.setup.layout.cache_ranks), item.sequences, LARGEST_BATCH))
    tokens = math.ceil(batch * (1 + item.setup.mtp) / 64) * 64
    return replace(
        item.setup, role="decode", max_num_tokens=tokens, max_batch_size=batch, concurrency=share,
        transfer=item.setup.transfer or "DEFAULT",
    )  # fmt: skip


def _counts(
    total: int, first: int, second: int, rate: float, decode: PerfCase, wanted: tuple[int | None, int | None]
) -> list[tuple[int, int]]:
    """The split that balances the two sides at a full batch, and those beside it; every GPU in use that can be."""
    options = [(p, (total - p * first) // second) for p in range(1, total // first + 1) if total - p * first >= second]
    options = [(p, wanted[1] or d) for p, d in options if wanted[0] in (None, p) and d >= (wanted[1] or 1)]
    batch = float(decode.max_batch_size or 1) * (decode.tp if decode.attention_dp else 1)
    asked = batch / (decode.osl * float(decode_only(decode, np.array([batch]))[0]) / 1e3)  # requests/s of one decode instance
    options.sort(key=lambda counts: abs(np.log(counts[0] * rate / (counts[1] * asked))))
    return options[:3]


def _loads(concurrency: int | None, ranks: int, room: int) -> list[int]:
    if concurrency:
        return [concurrency]
    return sorted({int(load) for load in np.geomspace(ranks, ranks * min(room, LARGEST_BATCH), LOADS)})
