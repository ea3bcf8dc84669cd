"""Which candidates are worth having: the Pareto front of a user's speed against the hardware's, and the point to build."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from pipeline.config.schema import SloConfig
from pipeline.planner.search.score import Mask, Scored
from pipeline.planner.search.space import Candidate

__all__ = ["TIE", "front", "nearest", "pareto", "recommended"]

TIE = 0.05
"""Throughputs closer than this are equal, for cross-validated errors are larger: fewer instances win, then fewer drafts."""
SAME = 0.005
"""Throughputs closer than this are the same, and whole prompts win, then the least tokens a step: they take memory."""


def front(scored: Scored, kept: Mask | None = None) -> list[int]:
    """Indices of the candidates that no other beats in tokens/s/user and tokens/s/GPU at once, fastest user first."""
    indices = np.arange(len(scored)) if kept is None else np.flatnonzero(kept)
    return [int(indices[at]) for at in pareto(scored.predictions.tpot_ms[indices], scored.tokens_per_gpu[indices])]


def pareto(times: ArrayLike, tokens: ArrayLike) -> list[int]:
    """Places of the points that no other beats in less time and more tokens at once, least time first."""
    times, tokens = np.asarray(times, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    best, chosen = -1.0, []
    for at in np.lexsort((-tokens, times)):
        if tokens[at] > best:
            best = float(tokens[at])
            chosen.append(int(at))
    return chosen


def recommended(scored: Scored, slo: SloConfig) -> int | None:
    """The most tokens/s/GPU within the limits; the nearest to them that the favourable end of its 80 % interval keeps within;
    None where there is none."""
    kept = scored.meets(slo)
    if not kept.any():
        index = nearest(scored, slo)
        return index if _excess(scored, slo, scored.predictions.low_ms)[index] <= 1 else None
    values = np.where(kept, scored.tokens_per_gpu, -1.0)
    simplest = _least(scored, values >= values.max() * (1 - TIE), lambda item: (item.replicas, item.setup.mtp))
    values = np.where(simplest, values, -1.0)
    leanest = _least(scored, values >= values.max() * (1 - SAME), _step)
    return int(np.argmax(np.where(leanest, values, -1.0)))


def _step(item: Candidate) -> tuple[int, ...]:
    return int(item.setup.chunked_prefill), item.setup.max_num_tokens


def _least(scored: Scored, among: Mask, key: Callable[[Candidate], tuple[int, ...]]) -> Mask:
    """Those of `among` whose key is least."""
    keys = {int(index): key(scored.candidates[index]) for index in np.flatnonzero(among)}
    least = min(keys.values())
    mask = np.zeros(len(scored), bool)
    mask[[index for index, value in keys.items() if value == least]] = True
    return mask


def nearest(scored: Scored, slo: SloConfig) -> int:
    """The candidate that misses the limits by least."""
    return int(np.argmin(_excess(scored, slo, scored.predictions.tpot_ms)))


def _excess(scored: Scored, slo: SloConfig, tpot_ms: np.ndarray) -> np.ndarray:
    """How many times the limits each candidate takes; at most 1 keeps them."""
    ratios = [np.ones(len(scored))]
    if slo.tpot_ms is not None:
        ratios.append(tpot_ms / slo.tpot_ms)
    if slo.ttft_ms is not None:
        ratios.append(scored.predictions.ttft_ms * (tpot_ms / scored.predictions.tpot_ms) / slo.ttft_ms)
    if slo.tokens_per_gpu is not None:
        ratios.append(slo.tokens_per_gpu / scored.tokens_per_gpu * (tpot_ms / scored.predictions.tpot_ms))
    if slo.tokens_per_second is not None:
        ratios.append(slo.tokens_per_second / scored.tokens_per_second * (tpot_ms / scored.predictions.tpot_ms))
    return np.maximum.reduce(ratios)


