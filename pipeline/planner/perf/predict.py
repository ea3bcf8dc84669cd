"""Predictions of cases: one, or many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import ConfigError
from pipeline.planner.perf.calibration import Calibration, shipped
from pipeline.planner.perf.case import PerfCase
from pipeline.planner.perf.interval import Z80, deviation
from pipeline.planner.perf.serve import Served, serve
from pipeline.planner.perf.step import SWITCHES
from pipeline.planner.perf.work import Array, columns

__all__ = ["Prediction", "Predictions", "check", "predict", "predict_many", "sweep"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one case is predicted to do."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_user: float
    """Output tokens a second and user once it decodes: 1000 / tpot_ms."""
    tokens_per_gpu: float
    """Output tokens a second and GPU."""
    active: float
    """Requests that run at once over all ranks; the rest of the concurrency waits for KV cache or batch slots."""
    interval: tuple[float, float]
    """80 % interval of tpot_ms."""
    terms: dict[str, float]
    """Microseconds of an average step by term; they sum to tpot_ms x accepted x 1000."""
    accepted: float
    """Tokens a sequence gains a step."""
    prefill: dict[str, float]
    """Microseconds of one prompt alone, by term, without the fixed cost of a step with context."""

    @property
    def tokens_per_gpu_interval(self) -> tuple[float, float]:
        """80 % interval of tokens_per_gpu: throughput of a closed loop follows TPOT."""
        return self.tokens_per_gpu * self.tpot_ms / self.interval[1], self.tokens_per_gpu * self.tpot_ms / self.interval[0]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions as arrays [cases], for searches; `predictions[i]` is one of them in full."""

    ttft_ms: Array
    tpot_ms: Array
    tokens_per_user: Array
    tokens_per_gpu: Array
    active: Array
    low_ms: Array
    """Ends of the 80 % interval of tpot_ms."""
    high_ms: Array
    served: Served

    def __len__(self) -> int:
        return len(self.tpot_ms)

    def __getitem__(self, i: int) -> Prediction:
        served = self.served
        terms = {name: float(value[i]) * 1e6 for name, value in served.decode.items()}
        terms["prefill_interference"] = float(served.interference[i]) * 1e6
        return Prediction(
            ttft_ms=float(self.ttft_ms[i]),
            tpot_ms=float(self.tpot_ms[i]),
            tokens_per_user=float(self.tokens_per_user[i]),
            tokens_per_gpu=float(self.tokens_per_gpu[i]),
            active=float(self.active[i]),
            interval=(float(self.low_ms[i]), float(self.high_ms[i])),
            terms=terms,
            accepted=float(served.accepted[i]),
            prefill={name: float(value[i]) * 1e6 for name, value in served.prefill.items()},
        )

    def take(self, at: NDArray[np.int64]) -> Predictions:
        """Those at some places."""
        served = Served(*({name: term[at] for name, term in value.items()} if isinstance(value, dict) else value[at]
                          for value in self.served))  # fmt: skip
        return Predictions(*(getattr(self, item.name)[at] for item in fields(self) if item.name != "served"), served)

    def __iter__(self) -> Iterator[Prediction]:
        return (self[i] for i in range(len(self)))


def check(case: PerfCase) -> None:
    """ConfigError for what no engine can run; everything else is the rules' business."""
    limits = {"tp": case.tp, "ep": case.ep, "concurrency": case.concurrency, "isl": case.isl, "osl": case.osl}
    small = [f"{name}={value}" for name, value in limits.items() if not value >= 1]
    if small:
        raise ConfigError(f"{', '.join(small)}: a speed can be predicted for values of at least 1; raise them.")
    if case.tp % case.ep:
        raise ConfigError(f"ep={case.ep} does not divide tp={case.tp}; set ep to a divisor of the instance's GPUs.")
    if not 0 <= case.mtp <= 5:
        raise ConfigError(f"mtp={case.mtp}: acceptance was published for 0 to 5 draft tokens; choose one of them.")
    if case.acceptance is not None and not 1 <= case.acceptance <= 1 + case.mtp:
        limit = f"1 to 1 + mtp = {1 + case.mtp} tokens a step"
        raise ConfigError(f"acceptance={case.acceptance} is outside {limit}; correct it or leave it out.")


def predict_many(cases: Sequence[PerfCase], calibration: Calibration | None = None) -> Predictions:
    """All cases in one evaluation, about 35 microseconds of CPU each. ConfigError where a case contradicts itself."""
    calibration = calibration or shipped()
    for case in cases:
        check(case)
    cols = columns(cases, SWITCHES)
    served = serve(cols, calibration.arrays(cases))
    spread = np.exp(Z80 * deviation(calibration, cases))
    tpot = served.tpot * 1e3
    rate = served.rate * cols.osl / cols.tp
    return Predictions(served.ttft * 1e3, tpot, 1e3 / tpot, rate, served.active, tpot / spread, tpot * spread, served)


def predict(case: PerfCase, calibration: Calibration | None = None) -> Prediction:
    """One case."""
    return predict_many([case], calibration)[0]


def sweep(case: PerfCase, concurrency: Sequence[float], calibration: Calibration | None = None) -> Predictions:
    """The same instance at several concurrencies."""
    return predict_many([replace(case, concurrency=value) for value in concurrency], calibration)
