"""How far off a prediction may be: 80 % intervals from what cross-validation showed.

The log of measured over predicted TPOT is taken as normal. Its variance adds up: `base` for configurations that were left
out (`drafts` more with MTP, whose acceptance varies), or `known` for one that was measured at other concurrencies, `hw`
where the chip and precision were never measured, `engine` where the engine line was not, and `outside` per e-fold beyond
the range of the measured batch, lengths and ranks. A chip that was measured scales its own deviation by a factor near 1,
named after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.planner.perf.calibration import Calibration, configuration, level_of
from pipeline.planner.perf.case import PerfCase
from pipeline.planner.perf.work import Array

__all__ = ["Z80", "deviation", "unfamiliar"]

Z80 = 1.2816
"""Standard deviations that hold 80 % of a normal distribution."""


def unfamiliar(calibration: Calibration, cases: Sequence[PerfCase]) -> dict[str, Array]:
    """What of each case the calibration has not seen; zeros where everything is familiar."""
    chips, engines = (
        calibration.known(scope, [level_of(case, scope) for case in cases]) for scope in ("hw/precision", "engine")
    )
    return {
        "drafts": np.array([case.mtp > 0 for case in cases], dtype=np.float64),
        "hw": 1 - np.array(chips, dtype=np.float64),
        "engine": 1 - np.array(engines, dtype=np.float64),
        "outside": np.array([_outside(calibration, case) for case in cases], dtype=np.float64),
    }


def _outside(calibration: Calibration, case: PerfCase) -> float:
    """e-folds beyond the measured range, over all inputs."""
    values = {"batch": case.concurrency, "tp": case.tp, "isl": case.isl, "osl": case.osl}
    total = 0.0
    for name, value in values.items():
        low, high = calibration.ranges[name]
        total += max(np.log(low / value), np.log(value / high), 0.0)
    return total


def deviation(calibration: Calibration, cases: Sequence[PerfCase]) -> Array:
    """Standard deviation of log TPOT of every case."""
    spread = calibration.spread
    strange = unfamiliar(calibration, cases)
    known = np.array([configuration(case) in calibration.configurations for case in cases], dtype=bool)
    own = spread["base"] ** 2 + (spread["drafts"] * strange.pop("drafts")) ** 2
    variance = np.where(known, spread["known"] ** 2, own)
    for name, amount in strange.items():
        variance = variance + (spread[name] * amount) ** 2
    chips = np.array([spread.get(level_of(case, "hw/precision"), 1.0) for case in cases])
    return np.sqrt(variance) * chips
