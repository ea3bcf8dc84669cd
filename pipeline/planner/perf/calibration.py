"""The calibrated numbers: where they are stored, and which of them a case gets.

`calibration/*.yaml` holds the coefficients that all cases share (`step.COEFFICIENTS` are their priors) and small effects:
logs of factors on a quantity for a scope. A case takes every effect whose scope fits it, so a machine that was never
measured keeps the shared coefficients. `scripts/calibrate_planner.py` writes the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline.planner.perf.case import PerfCase
from pipeline.planner.perf.step import COEFFICIENTS, FIRST_TOKEN, bounded
from pipeline.planner.perf.work import Array

__all__ = ["QUANTITIES", "SCOPES", "Calibration", "Effect", "configuration", "level_of", "shipped"]

QUANTITIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "latency": (1, ("kernel_us", "allreduce_us", "alltoall_us")),
    "experts": (-1, ("expert_memory", "expert_flops")),
    "prefill": (-1, ("prefill_flops", "prefill_attention")),
    "drafts": (1, ("acceptance",)),
    "sharing": (1, ("adp_share",)),
    "flops": (-1, ("dense_flops", "expert_flops")),
}
"""Quantity of an effect -> sign and coefficients: a positive effect means slower, for drafts more of them."""
SCOPES = ("hw/precision", "engine", "hw/precision/backend", "hw/precision/engine")


PARTS: dict[str, Callable[[PerfCase], str]] = {
    "hw": lambda case: case.machine.name, "precision": lambda case: case.precision, "engine": lambda case: case.engine,
    "backend": lambda case: case.backend,
}  # fmt: skip
"""Of a scope."""


def level_of(case: PerfCase, scope: str) -> str:
    """The level of a scope that a case belongs to: b200/fp4, 1.2.0rc6, b200/fp4/TRTLLM, b200/fp4/1.2.0rc6."""
    return "/".join([PARTS[part](case) for part in scope.split("/")])


def configuration(case: PerfCase) -> str:
    """What runs, without its load: lengths to half an octave."""
    lengths = "/".join(f"{round(2 * np.log2(length)) / 2:g}" for length in (case.isl, case.osl))
    return f"{level_of(case, 'hw/precision/engine')}/{case.layout}/{'mtp' if case.mtp else 'plain'}/{lengths}"


@dataclass(frozen=True, slots=True)
class Effect:
    """A quantity's log factor for one level of a scope."""

    quantity: str
    scope: str
    level: str
    log: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients, effects and the spread that cross-validation showed."""

    coefficients: Mapping[str, float]
    effects: tuple[Effect, ...]
    spread: Mapping[str, float]
    """Standard deviations of log TPOT, see `interval`."""
    ranges: Mapping[str, tuple[float, float]]
    """Smallest and largest value of each input that was measured."""
    source: tuple[str, ...] = ()
    configurations: frozenset[str] = frozenset()
    """Of the points that were fitted: at another load, they are predicted better than others."""
    fingerprints: frozenset[str] = frozenset()
    """Digests of the points that were fitted, so that a score can say what it had seen."""

    def arrays(self, cases: Sequence[PerfCase]) -> dict[str, Array]:
        """Every coefficient for every case."""
        logs = {name: np.full(len(cases), np.log(self.coefficients[name])) for name in (*COEFFICIENTS, *FIRST_TOKEN)}
        for scope in SCOPES:
            table: dict[str, dict[str, float]] = {}
            for effect in self.effects:
                if effect.scope == scope:
                    table.setdefault(effect.level, {})[effect.quantity] = effect.log
            self._add(logs, scope, table, cases)
        return bounded(logs)

    def _add(self, logs: dict[str, Array], scope: str, table: Mapping[str, Mapping[str, float]], cases: Sequence[PerfCase]) -> None:
        """Add one scope's effects to the logs of the coefficients."""
        levels = [nearest(level_of(case, scope), tuple(table)) for case in cases]
        for quantity, (sign, names) in QUANTITIES.items():
            value = np.array([table[level].get(quantity, 0.0) if level else 0.0 for level in levels])
            if value.any():
                for name in names:
                    logs[name] = logs[name] + sign * value

    def known(self, scope: str, levels: Sequence[str]) -> list[bool]:
        """Whether points of each level of a scope were fitted; of an engine, whether its line was: 1.2.0rc6 for 1.2."""
        fitted = tuple(sorted({effect.level for effect in self.effects if effect.scope == scope}))
        knows = {level: level in fitted or (scope == "engine" and _same_line(level, fitted)) for level in set(levels)}
        return [knows[level] for level in levels]

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """A file of `calibration/`."""
        table: dict[str, Any] = yaml.safe_load(path.read_text())
        effects = tuple(Effect(**row) for row in table["effects"])
        ranges = {name: (float(low), float(high)) for name, (low, high) in table["ranges"].items()}
        points = frozenset(table["points"].split())
        source, known = tuple(table["source"]), frozenset(table["configurations"])
        return cls(table["coefficients"], effects, table["spread"], ranges, source, known, points)


@lru_cache(maxsize=4096)
def nearest(level: str, known: tuple[str, ...]) -> str | None:
    """The level itself, or that of the newest engine before it on the same chip; None where neither was measured."""
    if level in known:
        return level
    head, _, engine = level.rpartition("/")
    older = [item for item in known if item.rpartition("/")[0] == head and _version(item) and _version(item) <= _version(engine)]
    return max(older, key=_version) if older and _version(engine) else None


def _same_line(level: str, known: tuple[str, ...]) -> bool:
    near = nearest(level, known)
    return near is not None and _version(near)[:2] == _version(level)[:2]


def _version(text: str) -> tuple[int, ...]:
    """1.2.0rc6 -> (1, 2, 0, 6), a release after its candidates, a line after its releases; () for what is no version."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+)(?:rc(\d+))?)?", text.rpartition("/")[2])
    return tuple(int(part) if part else 999 for part in match.groups()) if match else ()


@lru_cache(maxsize=1)
def shipped() -> Calibration:
    """The calibration that the product ships."""
    return Calibration.read(Path(__file__).parent / "calibration" / "deepseek_r1.yaml")
