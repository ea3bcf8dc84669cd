"""Why the recommended point is what it is: for every choice the best that the other values reach, and where they would win."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.schema import SloConfig
from pipeline.planner.search.score import Mask, Point, Scored
from pipeline.planner.search.space import Candidate

__all__ = ["CHOICES", "Reason", "reasons"]

CHOICES: dict[str, Callable[[Candidate], Any]] = {
    "attention_dp": lambda item: item.setup.layout.attention_dp,
    "gpus_per_instance": lambda item: item.setup.layout.world_size,
    "ep": lambda item: item.setup.layout.ep,
    "mtp": lambda item: item.setup.mtp,
    "max_num_tokens": lambda item: item.setup.max_num_tokens,
    "chunked_prefill": lambda item: item.setup.chunked_prefill,
    "concurrency": lambda item: item.concurrency,
}
"""What is searched, by name. A new dimension of the search is a row here."""
NEARLY = 0.005
"""Differences of throughput that are not worth a word."""
SAME_US = 5.0
"""Differences of a term that are not."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One choice beside the best of the other values."""

    name: str
    value: Any
    other: Any
    """None: nothing else could be tried within the limits."""
    other_tokens_per_gpu: float | None
    rival: str
    """The configuration that reaches it."""
    decided_by: str
    """The term of the step, or the limit, that decides."""
    changes: str
    """What it would take for the other value to win."""

    def text(self, point: Point) -> str:
        """As a sentence."""
        if self.other is None or self.other_tokens_per_gpu is None:
            return f"{self.decided_by}."
        gain = point.tokens_per_gpu / self.other_tokens_per_gpu - 1
        if abs(gain) < NEARLY:
            compared = f"as many tokens/s/GPU as with {self.other}"
        elif gain < 0:
            compared = f"{gain:+.1%}, within the error, against {self.other}; fewer instances, then fewer drafts are preferred"
        else:
            compared = f"{gain:+.1%} tokens/s/GPU over {self.other}"
        return f"{compared} ({self.rival}): {self.decided_by}; {self.changes}."


def reasons(scored: Scored, best: int, slo: SloConfig) -> list[Reason]:
    """One for every choice."""
    kept = scored.meets(slo)
    return [_reason(name, scored, best, kept) for name in CHOICES]


def _reason(name: str, scored: Scored, best: int, kept: Mask) -> Reason:
    of = CHOICES[name]
    values = np.array([of(item) for item in scored.candidates])
    mine, other = values == values[best], values != values[best]
    if not other.any():
        return Reason(name, _plain(values[best]), None, None, "", "asked for, or the only value that fits", "")
    rival = _best(scored, other & kept)
    if rival is None:
        return _outside(name, scored, best, other)
    point = scored.point(rival)
    label = f"{point.label}: {point.prediction.tpot_ms:.1f} ms a token"
    changes = "more within the limits" if name == "concurrency" else _crossing(scored, kept, mine, other, best)
    decided = _decided(scored, best, rival)
    return Reason(name, _plain(values[best]), _plain(values[rival]), point.tokens_per_gpu, label, decided, changes)


def _outside(name: str, scored: Scored, best: int, other: Mask) -> Reason:
    """Every other value breaks a limit: the one that comes nearest."""
    of = CHOICES[name]
    rival = int(min(np.flatnonzero(other), key=lambda i: scored.predictions.tpot_ms[i]))
    tpot = float(scored.predictions.tpot_ms[rival])
    text = f"no other value keeps slo.*; {of(scored.candidates[rival])} comes to {tpot:.1f} ms a token"
    return Reason(name, _plain(of(scored.candidates[best])), None, None, "", text, "")


def _best(scored: Scored, mask: Mask) -> int | None:
    if not mask.any():
        return None
    return int(np.argmax(np.where(mask, scored.tokens_per_gpu, -1.0)))


def _decided(scored: Scored, best: int, rival: int) -> str:
    """The largest difference between the two steps; between two loads, what the cache holds."""
    one, two = scored.point(best), scored.point(rival)
    if one.candidate.concurrency != two.candidate.concurrency:
        return f"at {one.candidate.concurrency:,} requests at once against {two.candidate.concurrency:,}"
    ours, theirs = (_per_token(point) for point in (one, two))
    name = max(sorted(ours.keys() | theirs.keys()), key=lambda term: abs(theirs.get(term, 0.0) - ours.get(term, 0.0)))
    change = theirs.get(name, 0.0) - ours.get(name, 0.0)
    if abs(change) < SAME_US:
        return "its step takes as long"
    return f"{name.replace('_', ' ')} {change / 1e3:+.2f} ms a token there"


def _per_token(point: Point) -> dict[str, float]:
    """Microseconds of each term a token and sequence."""
    return {name: value / point.prediction.accepted for name, value in point.prediction.terms.items()}


def _crossing(scored: Scored, kept: Mask, mine: Mask, other: Mask, best: int) -> str:
    """The load nearest to the recommended one at which another value is ahead."""
    loads = np.array([item.concurrency for item in scored.candidates])
    won = [load for load, ahead in _contest(scored, loads, kept, mine, other) if ahead > NEARLY]
    if not won:
        return "the others win at no load that was tried" if len(set(loads)) > 1 else "at this load"
    nearest = min(won, key=lambda load: abs(np.log(load / loads[best])))
    return f"it would change at {nearest:,} requests at once"


def _contest(scored: Scored, loads: np.ndarray, kept: Mask, mine: Mask, other: Mask) -> Iterator[tuple[int, float]]:
    """How far the others lead at each load, as a share."""
    for load in np.unique(loads):
        here = (loads == load) & kept
        ours, theirs = _best(scored, here & mine), _best(scored, here & other)
        if theirs is not None and ours is not None:
            yield int(load), float(scored.tokens_per_gpu[theirs] / scored.tokens_per_gpu[ours]) - 1


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
