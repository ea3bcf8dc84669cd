"""The planner's collectives and order of layouts against what two H200 measured: the committed files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import bench_planner_collectives as bench

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def newest(name: str) -> dict:
    return json.loads(sorted(BENCHMARKS.glob(f"{name}_h200x2_*.json"))[-1].read_text(encoding="utf-8"))


def test_predicted_collectives_are_near_the_measured_ones() -> None:
    measured = newest("collectives")
    result = bench.compared(measured)
    assert len(result["rows"]) == len(measured["rows"])
    ring = [row for row in result["rows"] if row["collective"] in ("all_gather", "reduce_scatter")]
    large = [row for row in ring if row["tokens_a_rank"] >= 1024]
    assert len(large) == 12
    for row in large:
        assert 0.6 < row["ratio"] < 1.8, row


def test_a_line_is_fitted_to_each_kind() -> None:
    kind = {"collective": "all_gather", "precision": "bf16", "ratio": 1.0}
    rows = [kind | {"us": 10 + size / 2e5, "received_bytes": size} for size in (1e4, 1e6, 1e8)]
    (found,) = bench.kinds(rows)
    assert (found["start_us"], found["gb_per_s"]) == (pytest.approx(10), pytest.approx(200))


def test_the_faster_layout_is_the_measured_one() -> None:
    """ADP+EP against TP: a few tokens are faster in TP, many in ADP+EP."""
    rows = {(row["tokens"], row["layout"]): row for row in bench.layers(newest("block"))}
    for tokens in {tokens for tokens, _ in rows}:
        apart, narrow = rows[tokens, "ADP2+EP2"], rows[tokens, "TP2"]
        assert (apart["us"] < narrow["us"]) == (apart["predicted_us"] < narrow["predicted_us"]) == (tokens >= 256), tokens
    assert all(0.6 < row["ratio"] < 1.7 for row in rows.values())
    for row in (row for (_, layout), row in rows.items() if layout == "ADP2+EP2"):
        share = row["terms"]["collective_latency"] + row["terms"]["collective_transfer"]
        assert 0.6 < share / row["exchange_us"] < 1.6, row
