"""The kernels' benchmark: its committed results have every plugin with a benchmark, right answers, and make the README's table."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="plugins are torch ops")

from scripts import bench_plugins

ROOT = Path(__file__).resolve().parents[2]
ROWS = bench_plugins.latest(sorted((ROOT / "benchmarks").glob("plugins_h200_*.json")))
EXACT = {"fp8_quantize", "fp8_dequantize", "nvfp4_quantize", "nvfp4_dequantize", "kv_quantize"}


def test_every_benchmark_has_rows() -> None:
    measured = {row["plugin"] for row in ROWS}
    for file in (ROOT / "plugins").glob("*/bench.py"):
        source = file.read_text(encoding="utf-8")
        assert any(f'"{name}"' in source for name in measured), f"{file.parent.name} was never measured"
        assert callable(importlib.import_module(f"plugins.{file.parent.name}.bench").rows)


def test_measured_kernels_were_right() -> None:
    for row in ROWS:
        assert row["error"] == 0 if row["plugin"] in EXACT else row["error"] < 1e-2, row
        assert row["ours_us"] < row.get("eager_us", math.inf) or row["loses"], row


def test_the_table_has_a_line_a_row() -> None:
    head, rule, *lines = bench_plugins.table(ROWS)
    assert len(lines) == len(ROWS)
    assert {line.count("|") for line in (head, rule, *lines)} == {10}
