"""How far a stage is, how fast it goes, and how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Meter"]

BYTE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class Meter:
    """Counts from its making; the rate is the mean since then, so only work that is really done may be counted."""

    def __init__(self, total: int, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.unit, self._clock = total, unit, clock
        self.done, self._started = 0, clock()

    def advance(self, amount: int) -> None:
        """So many units more."""
        self.done += amount

    def text(self) -> str:
        """37 % of 688.6 GB, 1.02 GB/s, 7 min left"""
        share = f"{100 * self.done // self.total if self.total else 100} % of {self._amount(self.total)}"
        seconds = self._clock() - self._started
        if not self.done or seconds <= 0:
            return share
        rate = self.done / seconds
        return f"{share}, {self._amount(rate)}/s, {_duration((self.total - self.done) / rate)} left"

    def _amount(self, count: float) -> str:
        if self.unit != "B":
            return f"{count:.0f} {self.unit}" if count >= 10 or count == int(count) else f"{count:.1f} {self.unit}"
        name, factor = next(((name, factor) for name, factor in BYTE_UNITS if count >= factor), ("B", 1))
        return f"{count / factor:.{2 if count < 10 * factor and factor > 1 else 1 if factor > 1 else 0}f} {name}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
