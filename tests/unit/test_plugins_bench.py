"""The kernels' benchmark: its committed results have every plugin with a benchmark, right answers, and make the README's table."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="plugins are torch ops")

from plugins.bench import Bench, _losses
from scripts import bench_plugins

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks").glob("plugins_h200_*.json"))
ROWS = [row for file in RESULTS for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
JUDGED = [{key: row[key] for key in row if key != "loses"} for row in ROWS]
JUDGED = [row | _losses({"eager_us": math.inf} | row, "") for row in JUDGED]
EXACT = {"fp8_quantize", "fp8_dequantize", "nvfp4_quantize", "nvfp4_dequantize", "kv_quantize", "fp4_pack", "fp4_unpack"}
NOT_YET = {"fp4_pack"}
PEERS = {"peers": {"a": 12.0, "b": 8.0}, "peer": "b", "peer_us": 8.0}
ROW = {"plugin": "kernel", "tokens": 8, "ours_us": 10.0, "eager_us": 90.0, **PEERS}


def test_every_benchmark_has_rows() -> None:
    measured = {row["plugin"] for row in ROWS} | NOT_YET
    for file in (ROOT / "plugins").glob("*/bench.py"):
        source = file.read_text(encoding="utf-8")
        assert any(f'"{name}"' in source for name in measured), f"{file.parent.name} was never measured"
        assert callable(importlib.import_module(f"plugins.{file.parent.name}.bench").rows)


def test_measured_kernels_were_right() -> None:
    for row in ROWS:
        assert row["error"] == 0 if row["plugin"] in EXACT else row["error"] < 1e-2, row
        assert row["ours_us"] < row.get("eager_us", math.inf) or row["loses"], row


def test_a_loss_is_against_the_fastest_of_all_others() -> None:
    assert _losses(ROW, "its tiles") == {"loses": 25.0, "loses_to": "b", "why": "its tiles"}
    assert _losses(ROW | {"compile_us": 5.0}, "") == {"loses": 100.0, "loses_to": "compile"}
    assert _losses(ROW | {"ours_us": 8.05}, "its tiles") == {}
    assert _losses(ROW | {"ours_us": 1.0, "cold_us": 12.0, "peer_cold_us": 10.0}, "") == {"loses_cold": 20.0}


def test_a_row_has_every_time_and_the_best_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(call: Any, calls: int = 20, flush: bool = False) -> float:
        return call() + 100 * flush

    def refuses() -> float:
        raise RuntimeError("not this chip\nand more")

    monkeypatch.setattr(Bench, "__post_init__", lambda self: None)
    monkeypatch.setattr("plugins.bench.micros", timed)
    bench = Bench(quick=False, bandwidth=1e12, read_bandwidth=2e12, flops=1e15, floor_us=1.0)
    peers = {"slow": lambda: 9.0, "fast": lambda: 5.0, "refuses": refuses}
    for tokens in (1, 8):
        row = bench.row(
            "kernel", {"model": "r1", "tokens": tokens}, lambda overlap: 5.5 if overlap else 6.0, error=lambda: 1e-3,
            eager=lambda: 50.0, compiled=lambda: 20.0, peers=peers, right=lambda found: found < 9, moved=3_000_000, read=4_000_000,
            flops=10**9, cold=True, why="its tiles",
        )  # fmt: skip
    assert row == {
        "plugin": "kernel", "model": "r1", "tokens": 8, "error": 1e-3, "ours_us": 6.0, "overlap_us": 5.5, "cold_us": 106.0,
        "eager_us": 50.0, "compile_us": 20.0, "peers": {"slow": 9.0, "fast": 5.0}, "peer": "fast", "peer_us": 5.0,
        "peers_cold": {"slow": 109.0, "fast": 105.0}, "peer_cold_us": 105.0, "loses": 20.0, "loses_to": "fast", "loses_cold": 1.0,
        "why": "its tiles", "floor_us": 1.0, "limit_us": 6.0,
    }  # fmt: skip
    refused = "kernel r1: refuses did not run: RuntimeError not this chip (1, 8)"
    assert bench.notes == [refused, "kernel r1: slow gives another answer (1, 8)"]


def test_a_note_is_made_once_for_all_sizes() -> None:
    bench = Bench.__new__(Bench)
    bench.noted = {}
    for tokens in ("1", "8"):
        bench.note("router kimi_k2: peer did not run: ValueError", tokens)
    bench.note("peer.so: no such symbol")
    assert bench.notes == ["peer.so: no such symbol", "router kimi_k2: peer did not run: ValueError (1, 8)"]


def test_a_plugin_that_fails_keeps_its_rows_and_leaves_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rows(_: Any) -> Iterator[dict[str, Any]]:
        yield ROW | {"error": 0.0, "limit_us": 1.0, "floor_us": 1.0}
        raise ValueError("no such shape")

    monkeypatch.setattr(bench_plugins, "machine", dict)
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(rows=rows))
    monkeypatch.setattr(Bench, "__post_init__", lambda self: None)
    bench, result = Bench(quick=False), bench_plugins.Result(tmp_path / "result.json")
    assert not bench_plugins.measured("kernel", bench, result)
    result.written(bench)
    written = json.loads((tmp_path / "result.json").read_text())
    assert [row["tokens"] for row in written["rows"]] == [8] and list(written["seconds"]) == ["kernel"]
    assert written["notes"] == ["kernel stopped: ValueError no such shape"]


def test_tables_have_a_line_a_shown_row_and_every_loss() -> None:
    first, second = bench_plugins.tables(JUDGED).split("\n\n")
    assert len(first.splitlines()) == 2 + sum(map(bench_plugins.is_shown, JUDGED))
    assert {line.count("|") for line in first.splitlines()} == {10} and {line.count("|") for line in second.splitlines()} == {5}
    assert second.count(" at ") >= sum("loses" in row for row in JUDGED)


def test_every_kernel_of_the_table_was_measured() -> None:
    assert set(bench_plugins.SHOWN) - NOT_YET <= {row["plugin"] for row in ROWS if bench_plugins.is_shown(row)}


def test_the_tables_go_between_the_two_comments() -> None:
    text = "a\n<!-- plugins' table: x -->\nold\n<!-- end of plugins' table -->\nb\n"
    found = bench_plugins.inserted(text, JUDGED)
    assert found == bench_plugins.inserted(found, JUDGED)
    assert found.startswith("a\n<!-- plugins' table: x -->\n| kernel") and found.endswith("|\n<!-- end of plugins' table -->\nb\n")
    with pytest.raises(SystemExit, match="no place for the table"):
        bench_plugins.inserted("a", JUDGED)
