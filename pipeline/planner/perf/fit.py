"""Fit the calibration: a Gauss-Newton maximum a posteriori with a robust loss, in numpy.

Parameters are logs, so priors are Gaussian on them: the shared coefficients around `step.COEFFICIENTS`, every effect
around zero, which shrinks what few points support. Residuals are logs of measured over predicted TPOT.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.planner.perf.calibration import QUANTITIES, Calibration, Effect, configuration, level_of
from pipeline.planner.perf.points import Point
from pipeline.planner.perf.serve import serve
from pipeline.planner.perf.step import COEFFICIENTS, FIRST_TOKEN, SWITCHES, bounded
from pipeline.planner.perf.work import Array, Columns, columns

__all__ = ["EFFECTS", "cross_validate", "fit", "fit_first_token", "residuals"]

EFFECTS: tuple[tuple[str, str, float], ...] = (
    ("latency", "hw/precision", 0.15),
    ("experts", "hw/precision", 0.15),
    ("experts", "hw/precision/engine", 0.15),
    ("prefill", "hw/precision", 0.20),
    ("sharing", "hw/precision", 0.30),
    ("flops", "hw/precision/backend", 0.30),
    ("latency", "engine", 0.10),
    ("latency", "hw/precision/engine", 0.15),
    ("drafts", "hw/precision/engine", 0.15),
)
"""Quantity, scope and prior standard deviation of its log."""
NOISE = 0.035
"""Standard deviation of log TPOT that the fit expects: repeats differ by 1 to 2 %, scripts and days by more."""
ROBUST = 2.0
"""Noise deviations beyond which a residual weighs linearly."""
STEP = 1e-4


@dataclass(frozen=True, slots=True)
class _Problem:
    """Points as arrays, and the map from parameters to coefficients."""

    cols: Columns
    target: Array
    quantity: str
    """tpot or ttft."""
    priors: Mapping[str, tuple[float, float]]
    fixed: Mapping[str, Array]
    """Coefficients that this fit leaves alone."""
    effects: tuple[tuple[str, str, str], ...]
    """Quantity, scope, level."""
    members: Array
    """1 where a point is of an effect's level: [effects, points]."""
    deviation: Array
    """Prior standard deviation of every parameter."""

    def coefficients(self, x: Array) -> dict[str, Array]:
        logs = {name: np.log(self.priors[name][0]) + x[i] + np.zeros(len(self.target)) for i, name in enumerate(self.priors)}
        for (quantity, _, _), value, member in zip(self.effects, x[len(self.priors) :], self.members, strict=True):
            sign, targets = QUANTITIES[quantity]
            for name in targets:
                logs[name] = logs[name] + sign * value * member
        return {**self.fixed, **bounded(logs)}

    def residual(self, x: Array) -> Array:
        return self.target - np.log(getattr(serve(self.cols, self.coefficients(x)), self.quantity))

    def cost(self, x: Array, residual: Array) -> float:
        size = np.abs(residual) / NOISE
        loss = np.where(size < ROBUST, size**2, 2 * ROBUST * size - ROBUST**2)
        return float(loss.sum() + ((x / self.deviation) ** 2).sum())


def _tpot_problem(points: Sequence[Point]) -> _Problem:
    cases = [point.case for point in points if point.case]
    effects, deviation, members = [], [sd for _, sd in COEFFICIENTS.values()], []
    for quantity, scope, sd in EFFECTS:
        levels = [level_of(case, scope) for case in cases]
        for level in sorted(set(levels)):
            effects.append((quantity, scope, level))
            deviation.append(sd)
            members.append([float(item == level) for item in levels])
    target = np.log([point.tpot_ms / 1e3 for point in points if point.tpot_ms])
    fixed = {name: np.full(len(cases), value) for name, (value, _) in FIRST_TOKEN.items()}
    cols = columns(cases, SWITCHES)
    return _Problem(cols, target, "tpot", COEFFICIENTS, fixed, tuple(effects), np.array(members), np.array(deviation))


def _ttft_problem(points: Sequence[Point], calibration: Calibration) -> _Problem:
    chosen = [point for point in points if point.case and point.ttft_ms]
    cases = [point.case for point in chosen if point.case]
    target = np.log([point.ttft_ms / 1e3 for point in chosen if point.ttft_ms])
    deviation = np.array([sd for _, sd in FIRST_TOKEN.values()])
    fixed, cols = calibration.arrays(cases), columns(cases, SWITCHES)
    return _Problem(cols, target, "ttft", FIRST_TOKEN, fixed, (), np.empty((0, 0)), deviation)


def fit(points: Sequence[Point]) -> Calibration:
    """Calibrate on points that have cases and TPOT. The result carries no spread: that takes cross-validation."""
    problem = _tpot_problem(points)
    x = _minimum(problem)
    shared = len(COEFFICIENTS)
    first = {name: value for name, (value, _) in FIRST_TOKEN.items()}
    logs = {name: np.log(COEFFICIENTS[name][0]) + x[i : i + 1] for i, name in enumerate(COEFFICIENTS)}
    found = {name: float(value[0]) for name, value in bounded(logs).items()}
    effects = tuple(Effect(*which, float(value)) for which, value in zip(problem.effects, x[shared:], strict=True))
    known = frozenset(configuration(point.case) for point in points if point.case and not point.derived)
    return Calibration({**found, **first}, effects, {}, _ranges(points), configurations=known)


def fit_first_token(points: Sequence[Point], calibration: Calibration) -> Calibration:
    """The same calibration with what only TTFT depends on."""
    x = _minimum(_ttft_problem(points, calibration))
    first = {name: float(FIRST_TOKEN[name][0] * np.exp(x[i])) for i, name in enumerate(FIRST_TOKEN)}
    return replace(calibration, coefficients={**calibration.coefficients, **first})


def _minimum(problem: _Problem, rounds: int = 40) -> Array:
    """The parameters of least cost."""
    x = np.zeros(len(problem.deviation))
    residual = problem.residual(x)
    cost, damping = problem.cost(x, residual), 1e-2
    for _ in range(rounds):
        moved = _move(problem, x, residual, cost, damping)
        if moved is None:
            break
        done = cost - moved[2] < 1e-4 * cost
        x, residual, cost, damping = moved
        if done:
            break
    return x


def _move(
    problem: _Problem, x: Array, residual: Array, cost: float, damping: float
) -> tuple[Array, Array, float, float] | None:
    """One damped Gauss-Newton step that lowers the cost, or None."""
    jacobian = np.empty((len(residual), len(x)))
    for i in range(len(x)):
        shifted = x.copy()
        shifted[i] += STEP
        jacobian[:, i] = (residual - problem.residual(shifted)) / STEP
    size = np.abs(residual) / NOISE
    weight = np.where(size < ROBUST, 1.0, ROBUST / np.maximum(size, ROBUST)) / NOISE**2
    hessian = (jacobian * weight[:, None]).T @ jacobian + np.diag(problem.deviation**-2.0)
    gradient = jacobian.T @ (weight * residual) - x / problem.deviation**2
    for _ in range(8):
        tried = x + np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
        left = problem.residual(tried)
        if problem.cost(tried, left) < cost:
            return tried, left, problem.cost(tried, left), max(damping / 4, 1e-8)
        damping *= 4
    return None


def _ranges(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """What was measured: outside of it an interval widens."""
    cases = [point.case for point in points if point.case and not point.derived]
    values = {
        "batch": [case.concurrency for case in cases],
        "tp": [float(case.tp) for case in cases],
        "isl": [case.isl for case in cases],
        "osl": [case.osl for case in cases],
    }
    return {name: (min(column), max(column)) for name, column in values.items()}


def residuals(calibration: Calibration, points: Sequence[Point], quantity: str = "tpot") -> Array:
    """log(measured / predicted) of TPOT or TTFT; NaN where it was not measured."""
    cases = [point.case for point in points if point.case]
    served = serve(columns(cases, SWITCHES), calibration.arrays(cases))
    measured = np.array([getattr(point, f"{quantity}_ms") or np.nan for point in points], dtype=np.float64)
    return np.log(measured / 1e3) - np.log(getattr(served, quantity))


def cross_validate(
    points: Sequence[Point], key: Callable[[Point], Hashable], folds: int | None, seed: int = 0, quantity: str = "tpot"
) -> Array:
    """Residuals of points whose fold was left out; NaN for derived ones, which are calibrated on and never scored.

    All points of one key share a fold; `folds` None makes every key a fold of its own. For `ttft` what only TTFT depends on is
    fitted to the other folds, too.
    """
    keys = sorted({key(point) for point in points if not point.derived}, key=str)
    if folds:
        np.random.default_rng(seed).shuffle(keys)
    fold: Mapping[Hashable, int] = {item: i % (folds or len(keys)) for i, item in enumerate(keys)}
    result = np.full(len(points), np.nan)
    for number in sorted(set(fold.values())):
        inside = [fold.get(key(point)) == number for point in points]
        others = [point for point, left in zip(points, inside, strict=True) if not left]
        calibration = fit(others) if quantity == "tpot" else fit_first_token(others, fit(others))
        chosen = [i for i, left in enumerate(inside) if left and not points[i].derived]
        result[chosen] = residuals(calibration, [points[i] for i in chosen], quantity)
    return result
