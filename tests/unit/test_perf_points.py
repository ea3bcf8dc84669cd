"""Measured rows: the traps in public dumps, what is declined and why, the fit, and the two scripts on a file of points."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pipeline.planner.perf import predict_many
from pipeline.planner.perf.calibration import Calibration, Effect, shipped
from pipeline.planner.perf.fit import cross_validate, fit, residuals
from pipeline.planner.perf.points import Point, digest, read_points
from pipeline.planner.perf.recipes import recipe

ROOT = Path(__file__).resolve().parents[2]
ROW: dict[str, Any] = {
    "source_class": "inferencex", "hw": "B200", "precision": "fp4", "isl": 1024, "osl": 1024, "concurrency": 64, "mode": "agg",
    "parallelism": "TP8+EP8", "engine": "trtllm 1.2.0rc6.post2", "measured": "2026-02-03", "quality": "ok", "tpot_ms": 16.26,
    "ttft_ms": 136.58, "spec_decoding_guess": "off (1.2.0rc6.post2 = the non-mtp key)", "source": "a test", "n": 1,
}  # fmt: skip


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def points_of(tmp_path: Path, *rows: dict[str, Any]) -> list[Point]:
    """Rows through a file, as the scripts read them."""
    path = tmp_path / "points.json"
    path.write_text(json.dumps(rows))
    return read_points(path, ROOT / "conf")


def test_a_row_becomes_the_case_that_ran(tmp_path: Path) -> None:
    case = points_of(tmp_path, ROW)[0].case
    assert case is not None
    assert (case.layout, case.precision, case.mtp, case.engine) == ("TP8+EP8", "fp4", 0, "1.2.0rc6")
    assert (case.isl, case.concurrency, case.max_num_tokens, case.backend) == (pytest.approx(921.6), 64, 8192, "TRTLLM")


@pytest.mark.parametrize(
    ("changes", "mtp"),
    [
        ({"spec_decoding_guess": "mtp (B200 image 1.2.0rc6.post3)"}, 3),
        ({"spec_decoding_guess": "mtp (B200 image 1.2.0rc6.post3)", "parallelism": "ADP8+EP8"}, 1),
        ({"spec_decoding_guess": "ambiguous", "measured": "2026-01-14"}, 3),
        ({"spec_decoding_guess": "ambiguous", "measured": "2026-01-28"}, 0),
        ({"spec_decoding_guess": "probably off (before the MTP keys existed)"}, 0),
        ({"source_class": "zufayu_raw", "mtp": 3}, 3),
    ],
)
def test_mtp_is_not_a_column(tmp_path: Path, changes: dict[str, Any], mtp: int) -> None:
    case = points_of(tmp_path, ROW | changes)[0].case
    assert case and case.mtp == mtp


@pytest.mark.parametrize(
    ("hw", "precision", "lengths", "concurrency", "tp", "ep", "adp"),
    [
        ("B200", "fp4", (1024, 1024), 8, 8, 1, False),
        ("B200", "fp4", (1024, 1024), 16, 8, 8, False),
        ("B200", "fp4", (1024, 8192), 16, 8, 1, False),
        ("B200", "fp4", (1024, 8192), 256, 4, 4, True),
        ("B200", "fp4", (8192, 1024), 64, 8, 8, True),
        ("H200", "fp8", (1024, 1024), 64, 8, 8, False),
        ("H200", "fp8", (8192, 1024), 64, 8, 8, True),
    ],
)
def test_november_rows_do_not_say_what_ran(
    hw: str, precision: str, lengths: tuple[int, int], concurrency: int, tp: int, ep: int, adp: bool
) -> None:
    row = ROW | {"hw": hw, "precision": precision, "isl": lengths[0], "osl": lengths[1], "concurrency": concurrency}
    run = recipe(row | {"spec_decoding_guess": "probably off"}, "2025-11", tp, 1, False)
    assert (run.ep, run.attention_dp) == (ep, adp)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "disagg"}, "carries no worker counts"),
        ({"engine": "sglang 0.5.9"}, "calibrated for TensorRT-LLM only"),
        ({"quality": "suspicious: tp=36"}, "suspicious: tp=36"),
        ({"tpot_ms": None}, "no TPOT"),
        ({"hw": "MI355X"}, "'MI355X' has no file in conf/hw"),
        ({"concurrency": "offline, all requests queued"}, "not a number"),
        ({"isl": None}, "no input and output lengths"),
        ({"parallelism": "PP8"}, "'PP8' is not understood"),
        ({"parallelism": "TP8+EP3"}, "3 expert ranks do not divide 8"),
        ({"parallelism": "TP8 +TopK"}, "development"),
        ({"precision": "int3"}, "'int3' is none of a published checkpoint"),
        ({"kv_dtype": "int8"}, "kv_dtype 'int8'"),
        ({"acceptance_len": 2.0}, "acceptance=2.0 is outside"),
        ({"hw": None}, "lacks hw"),
    ],
)
def test_declined_rows_say_why(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    point = points_of(tmp_path, ROW | changes)[0]
    assert point.case is None
    assert words in point.reason


def series(tmp_path: Path) -> list[Point]:
    """Points of several configurations, whose TPOT is still the row's."""
    rows = [
        ROW | {"parallelism": layout, "concurrency": concurrency, "isl": isl, "osl": osl, "hw": hw, "precision": precision}
        for hw, precision in (("B200", "fp4"), ("H200", "fp8"))
        for layout in ("TP8+EP1", "TP8+EP8")
        for isl, osl in ((1024, 1024), (8192, 1024))
        for concurrency in (1, 16, 128)
    ]
    return points_of(tmp_path, *rows)


def measured_as(points: list[Point], truth: Calibration) -> list[Point]:
    """The same points, with what `truth` predicts as their measurement."""
    found = predict_many([point.case for point in points if point.case], truth)
    return [replace(point, tpot_ms=float(tpot)) for point, tpot in zip(points, found.tpot_ms, strict=True)]


def test_the_fit_finds_what_made_the_points(tmp_path: Path) -> None:
    """Points made by a slower H200 are fitted to 4 % (the priors pull), and its effect is on H200 alone."""
    truth = replace(shipped(), effects=(Effect("latency", "hw/precision", "h200/fp8", 0.2),))
    points = measured_as(series(tmp_path), truth)
    found = fit(points)
    assert np.abs(residuals(found, points)).max() < 0.04
    effects = {item.level: item.log for item in found.effects if item.quantity == "latency" and item.scope == "hw/precision"}
    assert effects["h200/fp8"] - effects["b200/fp4"] > 0.05


def test_folds_hold_whole_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No point of a left-out configuration is fitted, whatever its concurrency."""
    points = series(tmp_path)
    fitted: list[set[Any]] = []
    scored: list[set[Any]] = []

    def recording(chosen: list[Point]) -> Calibration:
        fitted.append({point.key for point in chosen})
        return shipped()

    def recorded(calibration: Calibration, chosen: list[Point], quantity: str) -> np.ndarray[Any, Any]:
        scored.append({point.key for point in chosen})
        return residuals(calibration, chosen)

    monkeypatch.setattr("pipeline.planner.perf.fit.fit", recording)
    monkeypatch.setattr("pipeline.planner.perf.fit.residuals", recorded)
    left = cross_validate(points, lambda point: point.key, 4)
    assert not np.isnan(left).any()
    assert all(not (seen & held) for seen, held in zip(fitted, scored, strict=True))


@pytest.mark.parametrize(("hw", "isl", "osl", "published"), [("B200", 1024, 8192, 3862), ("GB200", 1024, 32768, 1465)])
def test_offline_throughput_is_bound_by_whole_requests_in_the_cache(hw: str, isl: int, osl: int, published: float) -> None:
    """NVIDIA's perf-overview; with room for half of each output only, these were 52 and 66 % too high."""
    row = {"hw": hw, "precision": "fp4", "n_gpus": 4, "isl": isl, "osl": osl, "tok_s_gpu": published, "moe_backend": "CUTLASS"}
    found = script("bench_planner").offline(row)
    assert found["layout"] == "ADP4+EP4" and found["active"] < 4 * 1024
    assert abs(found["error"]) < 0.25


def test_bench_scores_and_declines(tmp_path: Path) -> None:
    bench = script("bench_planner")
    points = points_of(tmp_path, ROW, ROW | {"concurrency": 4, "tpot_ms": 1.0, "n": 2}, ROW | {"mode": "disagg", "n": 3})
    result = bench.score(points, {points[0].asked: 12.0})
    assert result["points_scored"] == 2
    assert result["declined"] == [{"reason": points[2].reason, "points": 1, "rows": [3]}]
    assert result["rows"][1]["predicted_ms"] > 2  # nobody decodes DeepSeek-R1 in 1 ms
    assert result["interval_coverage"] < 1
    both = result["where_aiconfigurator_answered"]
    assert both["points"] == 1
    assert both["aiconfigurator_median"] == pytest.approx(abs(12.0 / 16.26 - 1), abs=1e-4)
    assert result["per_hardware_precision"]["B200 fp4"]["points_scored"] == 2
    assert "median_abs_error" in result
    assert "p90_abs_error" in result
    assert any("declined    1" in line for line in bench.table(result))


def test_a_score_says_what_was_calibrated_on(tmp_path: Path) -> None:
    bench = script("bench_planner")
    points = points_of(tmp_path, ROW)
    known = replace(shipped(), fingerprints=frozenset({digest(ROW)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "shipped", lambda: known)
        assert bench.score(points, {})["in_calibration"] == 1
        patch.setattr(bench, "shipped", lambda: replace(known, fingerprints=frozenset()))
        assert bench.score(points, {})["in_calibration"] == 0


def test_a_file_without_a_usable_row_is_scored_as_empty(tmp_path: Path) -> None:
    bench = script("bench_planner")
    result = bench.score(points_of(tmp_path, ROW | {"mode": "disagg"}), {})
    assert result["points_scored"] == 0
    assert bench.table(result)
