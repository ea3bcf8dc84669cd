#!/usr/bin/env python3
"""Fit the planner's speed model to measured points, and say how well it does on what it has not seen.

    python scripts/calibrate_planner.py --points FILE [--write] [--json OUT] [--quick]

Errors are |predicted / measured - 1| of TPOT, or of TTFT where it is named. Cross-validation leaves out whole configurations
(hardware, precision, parallelism, lengths, MTP, engine): their points at other concurrencies are left out with them. Four more
leave out all of one hardware x precision, one pair of lengths, one engine line, and all larger batches. `--write` replaces
pipeline/planner/perf/calibration/deepseek_r1.yaml, whose spreads come from these residuals: their 80 % quantiles. The coverage
that is printed is nested: each configuration is covered or not by an interval whose width the other configurations set. Points
are left out one by one only to learn how much narrower the interval of a configuration that was measured at other
concurrencies may be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.planner.perf.calibration import Calibration, configuration, level_of  # noqa: E402
from pipeline.planner.perf.fit import cross_validate, fit, fit_first_token, residuals  # noqa: E402
from pipeline.planner.perf.interval import Z80  # noqa: E402
from pipeline.planner.perf.points import Point, digest, read_aiconfigurator, read_points  # noqa: E402
from pipeline.planner.perf.work import Array  # noqa: E402
from scripts._options import result_file  # noqa: E402

TARGET = ROOT / "pipeline" / "planner" / "perf" / "calibration" / "deepseek_r1.yaml"
FOLDS, SEEDS = 10, 3
Predicted = Mapping[tuple[str, int], float]
"""Milliseconds by `Point.asked`."""
HEADER = """\
# Calibrated by scripts/calibrate_planner.py; do not edit by hand. What the names mean: pipeline/planner/perf/step.py.
"""


def chip(point: Point) -> str:
    """Hardware and precision."""
    assert point.case
    return level_of(point.case, "hw/precision")


def lengths(point: Point) -> str:
    """Nominal lengths."""
    return f"{point.row['isl']}/{point.row['osl']}"


def engine(point: Point) -> str:
    """Engine line."""
    assert point.case
    return point.case.engine


def load(point: Point) -> str:
    """Whether a point is one of the larger batches: what is learned on 1 to 32 requests is asked about 64 to 256."""
    assert point.case
    return f"concurrency {'above' if point.case.concurrency > 32 else 'up to'} 32"


def main() -> int:
    """Fit, cross-validate, report, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, required=True)
    parser.add_argument("--json", type=result_file, help="write the report here")
    parser.add_argument("--write", action="store_true", help=f"replace {TARGET.relative_to(ROOT)}")
    parser.add_argument("--quick", action="store_true", help="one shuffle of the folds instead of three")
    options = parser.parse_args()
    began = time.process_time()
    points = [point for point in read_points(options.points, ROOT / "conf") if point.case]
    beside = options.points.with_name("aiconfigurator_vs_measured.json")
    theirs = {quantity: read_aiconfigurator(beside, quantity) for quantity in ("tpot", "ttft")}
    report, calibration = run(points, theirs, 1 if options.quick else SEEDS)
    report["cpu_seconds"] = round(time.process_time() - began, 1)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.write:
        write(calibration, points)
    return 0


def run(points: list[Point], theirs: Mapping[str, Predicted], seeds: int) -> tuple[dict[str, Any], Calibration]:
    """The report and the calibration with its spreads."""
    calibration = fit_first_token(points, fit(points))
    seen = [not point.derived for point in points]
    by_seed = [cross_validate(points, lambda point: point.key, FOLDS, seed) for seed in range(seeds)]
    kinds = {"hw": chip, "lengths": lengths, "engine": engine, "load": load}
    unseen = {name: cross_validate(points, key, None) for name, key in kinds.items()}
    alone = cross_validate(points, lambda point: (point.key, point.case and point.case.concurrency), FOLDS)
    siblings = Counter(configuration(point.case) for point in points if point.case and not point.derived)
    shared = np.array([point.case is not None and siblings[configuration(point.case)] > 1 for point in points])
    calibration = replace(calibration, spread=spreads(points, by_seed[0], unseen) | {"known": round(width(alone[shared]), 4)})
    report: dict[str, Any] = {
        "points": int(sum(seen)),
        "points_calibrated_on": len(points),
        "configurations": len({point.key for point in points if not point.derived}),
        "parameters": {"shared": len(calibration.coefficients), "effects": len(calibration.effects)},
        "in_sample": summary(residuals(calibration, points)[seen]),
        "by_configuration": [summary(left[seen]) for left in by_seed],
        "against_aiconfigurator": against(points, by_seed[0], theirs["tpot"]),
        "by_configuration_per_chip": per(points, by_seed[0], chip),
        "by_configuration_mtp": {name: summary(by_seed[0][mask]) for name, mask in mtp_masks(points).items()},
        "left_out_chip": per(points, unseen["hw"], chip),
        "left_out_lengths": per(points, unseen["lengths"], lengths),
        "left_out_engine": per(points, unseen["engine"], engine),
        "left_out_load": per(points, unseen["load"], load),
        "other_concurrency_left_out": summary(alone[shared]),
        "ttft": first_token(points, calibration, seen, theirs["ttft"]),
        "coverage_80": coverage(points, by_seed[0]),
        "spread": calibration.spread,
    }
    return report, calibration


def first_token(points: list[Point], calibration: Calibration, seen: list[bool], theirs: Predicted) -> dict[str, Any]:
    """TTFT, fitted and with each configuration left out."""
    left = cross_validate(points, lambda point: point.key, FOLDS, quantity="ttft")
    return {
        "in_sample": summary(residuals(calibration, points, "ttft")[seen]),
        "by_configuration": summary(left[seen]),
        "by_configuration_per_chip": per(points, left, chip),
        "against_aiconfigurator": against(points, left, theirs, "ttft"),
    }


def summary(log: Array) -> dict[str, float]:
    """Errors of log residuals."""
    log = log[~np.isnan(log)]
    error = np.abs(np.expm1(-log))
    return {
        "n": len(log),
        "median_abs_error": round(float(np.median(error)), 4),
        "p90_abs_error": round(float(np.quantile(error, 0.9)), 4),
        "mean_abs_error": round(float(error.mean()), 4),
        "median_bias": round(float(np.median(np.expm1(-log))), 4),
    }


def per(points: list[Point], log: Array, key: Callable[[Point], Hashable]) -> dict[str, dict[str, float]]:
    """A summary for every value of a key."""
    keys = [None if point.derived else key(point) for point in points]
    return {str(name): summary(log[[item == name for item in keys]]) for name in sorted({item for item in keys if item}, key=str)}


def against(
    points: list[Point], log: Array, theirs: Predicted, quantity: str = "tpot"
) -> dict[str, dict[str, dict[str, float]]]:
    """Left-out errors of ours beside aiconfigurator's stored ones, where it was run with the MTP depth that ran."""
    measured = [getattr(point, f"{quantity}_ms") or np.nan for point in points]
    other = np.log([value / theirs.get(point.asked, np.nan) for value, point in zip(measured, points, strict=True)])
    names = np.array([chip(point) for point in points])
    both = ~np.isnan(other) & ~np.isnan(log)
    if not both.any():
        return {}
    groups = {"all": both, **{name: both & (names == name) for name in sorted(set(names[both]))}}
    return {name: {"ours": summary(log[mask]), "aiconfigurator": summary(other[mask])} for name, mask in groups.items()}


def mtp_masks(points: list[Point]) -> dict[str, Array]:
    """Scored points without and with MTP."""
    drafts = np.array([bool(point.case and point.case.mtp) for point in points])
    scored = np.array([not point.derived for point in points])
    return {"off": scored & ~drafts, "on": scored & drafts}


def width(log: Array) -> float:
    """The standard deviation whose 80 % interval holds 80 % of the residuals."""
    log = log[~np.isnan(log)]
    return float(np.quantile(np.abs(log), 0.8)) / Z80


def spreads(points: list[Point], left: Array, unseen: dict[str, Array]) -> dict[str, float]:
    """Variance components of log TPOT and the chips' factors, as `pipeline.planner.perf.interval` applies them."""
    off, on, chips = familiar(points, left, np.full(len(points), True))
    rest = {
        "drafts": on**2 - off**2,
        "hw": width(unseen["hw"]) ** 2 - width(left) ** 2,
        "engine": width(unseen["engine"]) ** 2 - width(left) ** 2,
        "outside": max(
            (width(unseen["lengths"]) ** 2 - width(left) ** 2) / np.log(8) ** 2,
            (width(unseen["load"][above(points)]) ** 2 - width(left[above(points)]) ** 2) / np.log(256 / 32) ** 2,
        ),
    }
    components = {name: float(np.sqrt(max(value, 0.02**2))) for name, value in rest.items()}
    return {name: round(value, 4) for name, value in {"base": off, **components, **chips}.items()}


def above(points: list[Point]) -> Array:
    """The points of larger batches."""
    return np.array([point.case is not None and point.case.concurrency > 32 for point in points])


def familiar(points: list[Point], left: Array, used: Array) -> tuple[float, float, dict[str, float]]:
    """Deviations without and with MTP, and each chip's factor on them, from the residuals of `used` points.

    A chip of n points keeps n / (n + 30) of its own factor.
    """
    masks = mtp_masks(points)
    off, on = (width(left[masks[name] & used]) for name in ("off", "on"))
    on = max(on, off)
    ratio = np.abs(left) / np.where(masks["on"], on, off)
    factors = {}
    for name in sorted({chip(point) for point in points}):
        own = ratio[used & ~np.isnan(left) & [chip(point) == name for point in points]]
        factors[name] = (len(own) * width(own) + 30) / (len(own) + 30) if len(own) else 1.0
    return off, on, factors


def coverage(points: list[Point], left: Array) -> dict[str, float]:
    """Share of left-out points inside intervals whose width all other configurations set, of all and of each chip."""
    drafts = mtp_masks(points)["on"]
    names, keys = np.array([chip(point) for point in points]), np.array([hash(point.key) for point in points])
    inside = np.full(len(points), np.nan)
    for key in set(keys):
        off, on, factors = familiar(points, left, keys != key)
        for i in np.flatnonzero((keys == key) & ~np.isnan(left)):
            inside[i] = abs(left[i]) <= Z80 * (on if drafts[i] else off) * factors.get(names[i], 1.0)
    parts = {name: inside[names == name] for name in sorted(set(names)) if np.sum(names == name) >= 20}
    return {name: round(float(np.nanmean(value)), 3) for name, value in {"all": inside, **parts}.items()}


def write(calibration: Calibration, points: list[Point]) -> None:
    """The YAML that the product ships."""
    table = {
        "title": "DeepSeek-R1 under TensorRT-LLM",
        "source": sources(points),
        "coefficients": {name: round(value, 5) for name, value in calibration.coefficients.items()},
        "effects": [
            {"quantity": item.quantity, "scope": item.scope, "level": item.level, "log": round(item.log, 4)}
            for item in calibration.effects
        ],
        "spread": dict(calibration.spread),
        "ranges": {name: [round(low, 3), round(high, 3)] for name, (low, high) in calibration.ranges.items()},
        "configurations": sorted(calibration.configurations),
        "points": " ".join(sorted({digest(point.row) for point in points})),
    }
    TARGET.write_text(HEADER + yaml.safe_dump(table, sort_keys=False, width=130), encoding="utf-8")


def sources(points: list[Point]) -> list[str]:
    """Where the points come from, with how many from each."""
    names = [str(point.row["source"]).split(" (")[0].split("/results/")[0].split("#")[0] for point in points]
    return [f"{name}: {names.count(name)} points" for name in sorted(set(names))]


if __name__ == "__main__":
    raise SystemExit(main())
