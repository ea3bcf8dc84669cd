#!/usr/bin/env python3
"""Score the planner's speed model on a file of measured points, beside what aiconfigurator predicted for them.

    python scripts/bench_planner.py --points FILE [--json OUT] [--aiconfigurator FILE] [--quick]

Errors are |predicted / measured - 1| of TPOT with the calibration that ships. It was fitted to public points: where FILE
holds those, this is a fit, not a forecast, and the output says how many of the scored points are such. Cross-validated
errors come from scripts/calibrate_planner.py. `--aiconfigurator` names a file of its stored predictions (rows with
`p_tpot` and `args`); rows are matched by hardware, precision, lengths, parallelism, concurrency, engine, TPOT, and MTP depth.
Lengths of InferenceX rows are nominal; both planners are given 0.9 of them, which is what was sent on average.
Rows of offline maximum throughput (all requests queued) have no TPOT: their tokens/s/GPU is predicted apart. The limits that
they ran with are not published; assumed are 1,024 requests a rank, steps of 2,048 tokens or one prompt, and 0.9 of the free
memory for the cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config.load import load  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from pipeline.planner.memory import memory_of  # noqa: E402
from pipeline.planner.perf import Machine, PerfCase, Predictions, checkpoint_formats, predict, predict_many  # noqa: E402
from pipeline.planner.perf.calibration import shipped  # noqa: E402
from pipeline.planner.perf.points import Point, digest, read_aiconfigurator, read_points  # noqa: E402
from pipeline.planner.setup import Layout, Setup  # noqa: E402
from scripts._options import result_file  # noqa: E402

BESIDE = "aiconfigurator_vs_measured.json"
AICONFIGURATOR = "0.12.0, TensorRT-LLM data 1.3.0rc20"


def main() -> int:
    """Score, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, required=True)
    parser.add_argument("--json", type=result_file, help="write the result here")
    parser.add_argument("--aiconfigurator", type=Path, help=f"its stored predictions; default: {BESIDE} beside FILE")
    parser.add_argument("--quick", action="store_true", help="accepted for uniformity: the whole run takes about a second")
    options = parser.parse_args()
    theirs = read_aiconfigurator(options.aiconfigurator or options.points.with_name(BESIDE))
    result = score(read_points(options.points, ROOT / "conf"), theirs)
    result["file"] = options.points.name
    rows = json.loads(options.points.read_text(encoding="utf-8"))
    result["offline"] = [offline(row) for row in rows if str(row.get("concurrency")).startswith("offline")]
    print("\n".join(table(result)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def score(points: Sequence[Point], theirs: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    """The result that --json writes."""
    scored = [point for point in points if point.case and not point.derived]
    began = time.process_time()
    predicted = predict_many([point.case for point in scored if point.case])
    seconds = time.process_time() - began
    known = shipped().fingerprints
    seen = np.array([digest(point.row) in known for point in scored], dtype=bool)
    measured = np.array([point.tpot_ms for point in scored], dtype=float)
    error = np.abs(predicted.tpot_ms / measured - 1)
    inside = (predicted.low_ms <= measured) & (measured <= predicted.high_ms)
    other = np.array([theirs.get(point.asked, np.nan) for point in scored], dtype=float)
    columns = {"error": error, "inside": inside, "aic": np.abs(other / measured - 1), "ttft": ttft_error(scored, predicted)}
    groups = [f"{point.row['hw']} {point.case.precision}" for point in scored if point.case]
    return {
        **summary(columns),
        "in_calibration": int(sum(seen)),
        "not_in_calibration": summary({name: value[~seen] for name, value in columns.items()}),
        "per_hardware_precision": {
            name: summary({key: value[[group == name for group in groups]] for key, value in columns.items()})
            for name in sorted(set(groups))
        },
        "declined": declined(points),
        "derived_not_scored": sum(point.derived for point in points),
        "versions": {"aiconfigurator": AICONFIGURATOR, "python": platform.python_version(), "numpy": np.__version__},
        "cpu_seconds": round(seconds, 4),
        "rows": [row_of(point, predicted, i, other[i], bool(seen[i])) for i, point in enumerate(scored)],
    }


def offline(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published maximum throughput beside ours, for more requests than the cache holds."""
    config = load([f"+hw={row['hw'].lower()}", "model=deepseek_r1"])
    arch, formats, ranks = Arch.from_hf(dict(config.model.hf)), checkpoint_formats(row["precision"]), row["n_gpus"]
    limits = {"moe_backend": row["moe_backend"], "max_batch_size": 1024, "max_num_tokens": max(2048, row["isl"] + 64)}
    setup = Setup(arch=arch, hw=config.hw, formats=formats, layout=Layout(ranks, ranks, True), fraction=0.9, **limits)
    case = PerfCase(
        machine=Machine.of(config.hw), arch=arch, formats=formats, tp=ranks, ep=ranks, attention_dp=True, concurrency=1e5,
        isl=row["isl"], osl=row["osl"], kv_tokens=memory_of(setup)[0].kv_tokens, runner="direct", **limits,
    )  # fmt: skip
    predicted = predict(case)
    return {
        "hw": row["hw"], "precision": row["precision"], "layout": case.layout, "isl": row["isl"], "osl": row["osl"],
        "published": row["tok_s_gpu"], "predicted": round(predicted.tokens_per_gpu, 1), "active": predicted.active,
        "error": round(predicted.tokens_per_gpu / row["tok_s_gpu"] - 1, 4),
    }  # fmt: skip


def ttft_error(scored: Sequence[Point], predicted: Predictions) -> np.ndarray[Any, Any]:
    """|predicted / measured - 1| of TTFT, NaN where it was not measured."""
    measured = np.array([point.ttft_ms or np.nan for point in scored], dtype=float)
    return np.abs(predicted.ttft_ms / measured - 1)


def summary(columns: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Errors of one group; aiconfigurator's on the points that it answered, and ours on the same points."""
    error, aic = columns["error"], columns["aic"]
    if not len(error):
        return {"points_scored": 0}
    result: dict[str, Any] = {
        "points_scored": len(error),
        "median_abs_error": quantile(error, 0.5),
        "p90_abs_error": quantile(error, 0.9),
        "interval_coverage": round(float(columns["inside"].mean()), 4),
        "ttft_median_abs_error": quantile(columns["ttft"], 0.5),
    }
    both = ~np.isnan(aic)
    if both.any():
        result["where_aiconfigurator_answered"] = {
            "points": int(both.sum()),
            "ours_median": quantile(error[both], 0.5),
            "ours_p90": quantile(error[both], 0.9),
            "aiconfigurator_median": quantile(aic[both], 0.5),
            "aiconfigurator_p90": quantile(aic[both], 0.9),
        }
    return result


def quantile(values: np.ndarray[Any, Any], share: float) -> float | None:
    """Of what is not NaN; None of nothing."""
    values = values[~np.isnan(values)]
    return round(float(np.quantile(values, share)), 4) if len(values) else None


def declined(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Rows without a case, counted by reason, with the identifiers of the rows."""
    reasons = Counter(point.reason for point in points if not point.case)
    rows: dict[str, list[Any]] = {reason: [] for reason in reasons}
    for point in points:
        if not point.case:
            rows[point.reason].append(point.row.get("n") or point.row.get("id"))
    return [{"reason": reason, "points": count, "rows": rows[reason]} for reason, count in reasons.most_common()]


def row_of(point: Point, predicted: Predictions, i: int, other: float, seen: bool) -> dict[str, Any]:
    """One scored point."""
    case = point.case
    assert case
    return {
        "n": point.row.get("n"), "hw": point.row["hw"], "precision": case.precision, "layout": case.layout, "mtp": case.mtp,
        "isl": point.row["isl"], "osl": point.row["osl"], "concurrency": case.concurrency, "engine": case.engine,
        "moe_backend": case.backend, "in_calibration": seen, "measured_ms": point.tpot_ms,
        "predicted_ms": round(float(predicted.tpot_ms[i]), 3),
        "interval_ms": [round(float(predicted.low_ms[i]), 3), round(float(predicted.high_ms[i]), 3)],
        "aiconfigurator_ms": None if np.isnan(other) else round(float(other), 3),
    }  # fmt: skip


def table(result: Mapping[str, Any]) -> list[str]:
    """What is printed."""
    head = f"{'TPOT, |predicted/measured - 1|':<32}{'points':>7}{'median':>9}{'p90':>8}{'in 80 %':>9}"
    head += "   where aiconfigurator answered (median / p90): ours; its"
    lines = [head, line("all", result)]
    lines += [line(name, group) for name, group in result["per_hardware_precision"].items()]
    lines.append(f"{result['in_calibration']} of {result['points_scored']} scored points were calibrated on: on those, a fit.")
    if result["in_calibration"] < result["points_scored"]:
        lines.append(line("not calibrated on", result["not_in_calibration"]))
    for item in result.get("offline", ()):
        case = f"offline {item['hw']} {item['precision']} {item['layout']} {item['isl']}/{item['osl']}"
        lines.append(f"{case}: {item['predicted']:,.0f} tokens/s/GPU, published {item['published']:,} ({item['error']:+.0%})")
    lines += [f"declined {item['points']:>4}: {item['reason']}" for item in result["declined"]]
    lines.append(f"aiconfigurator {AICONFIGURATOR}; stored predictions, not run here. {result['cpu_seconds']} s CPU for ours.")
    return lines


def line(name: str, group: Mapping[str, Any]) -> str:
    """One group."""
    if not group["points_scored"]:
        return f"{name:<32}{0:>7}"
    text = f"{name:<32}{group['points_scored']:>7}{percent(group['median_abs_error']):>9}{percent(group['p90_abs_error']):>8}"
    text += f"{percent(group['interval_coverage']):>9}"
    both = group.get("where_aiconfigurator_answered")
    if not both:
        return text
    ours, its = (f"{percent(both[f'{who}_median'])} / {percent(both[f'{who}_p90'])}" for who in ("ours", "aiconfigurator"))
    return f"{text}   {both['points']:>3} points: {ours}; {its}"


def percent(value: float | None) -> str:
    """0.0321 -> 3.2 %."""
    return "-" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    raise SystemExit(main())
