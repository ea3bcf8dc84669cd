"""Which candidates are worth having: the Pareto front of a user's speed against the hardware's, and the point to build."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from pipeline.config.schema import SloConfig
from pipeline.core.errors import ConfigError
from pipeline.planner.search.score import Mask, Scored
from pipeline.planner.search.space import Candidate

__all__ = ["TIE", "front", "pareto", "recommended"]

TIE = 0.05
"""Throughputs closer than this are equal, for cross-validated errors are larger: fewer instances win, then fewer drafts."""
SAME = 0.005
"""Throughputs closer than this are the same, and the least tokens a step win: they take memory."""


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


def recommended(scored: Scored, slo: SloConfig) -> int:
    """The most tokens/s/GPU within the limits.

    Raises:
        ConfigError: if nothing comes near them, even at the lower end of the 80 % interval.
    """
    kept = scored.meets(slo)
    if not kept.any():
        return _nearest(scored, slo)
    values = np.where(kept, scored.tokens_per_gpu, -1.0)
    simplest = _least(scored, values >= values.max() * (1 - TIE), lambda item: (item.replicas, item.setup.mtp))
    values = np.where(simplest, values, -1.0)
    leanest = _least(scored, values >= values.max() * (1 - SAME), lambda item: (item.setup.max_num_tokens,))
    return int(np.argmax(np.where(leanest, values, -1.0)))


def _least(scored: Scored, among: Mask, key: Callable[[Candidate], tuple[int, ...]]) -> Mask:
    """Those of `among` whose key is least."""
    keys = {int(index): key(scored.candidates[index]) for index in np.flatnonzero(among)}
    least = min(keys.values())
    mask = np.zeros(len(scored), bool)
    mask[[index for index, value in keys.items() if value == least]] = True
    return mask


def _nearest(scored: Scored, slo: SloConfig) -> int:
    """The candidate that misses the limits by least, if its interval still reaches them."""
    excess = _excess(scored, slo, scored.predictions.tpot_ms)
    index = int(np.argmin(excess))
    if _excess(scored, slo, scored.predictions.low_ms)[index] > 1:
        raise ConfigError(_out_of_reach(scored, slo, index))
    return index


def _excess(scored: Scored, slo: SloConfig, tpot_ms: np.ndarray) -> np.ndarray:
    """How many times the limits each candidate takes; at most 1 keeps them."""
    ratios = [np.ones(len(scored))]
    if slo.tpot_ms is not None:
        ratios.append(tpot_ms / slo.tpot_ms)
    if slo.ttft_ms is not None:
        ratios.append(scored.predictions.ttft_ms * (tpot_ms / scored.predictions.tpot_ms) / slo.ttft_ms)
    if slo.tokens_per_gpu is not None:
        ratios.append(slo.tokens_per_gpu / scored.tokens_per_gpu * (tpot_ms / scored.predictions.tpot_ms))
    return np.maximum.reduce(ratios)


def _out_of_reach(scored: Scored, slo: SloConfig, index: int) -> str:
    point = scored.point(index)
    prediction, (low, high) = point.prediction, point.prediction.interval
    asked = ", ".join(
        f"slo.{name}={value:g}" for name in ("ttft_ms", "tpot_ms", "tokens_per_gpu") if (value := getattr(slo, name)) is not None
    )
    count = point.candidate.concurrency
    return (
        f"No configuration of this hardware is predicted to meet {asked}. Nearest: {point.label} with "
        f"{count:,} request{'' if count == 1 else 's'} at once, TTFT {prediction.ttft_ms:.0f} ms, TPOT {prediction.tpot_ms:.1f} ms "
        f"(80 %: {low:.1f} to {high:.1f}), {point.tokens_per_gpu:.0f} tokens/s/GPU. Relax the limits to that, lower "
        f"workload.concurrency, or choose other hardware."
    )
