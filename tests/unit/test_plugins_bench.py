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

from plugins.bench import Bench, _losses, micros
from scripts import bench_layer, bench_plugins
from scripts._readme import placed

ROOT = Path(__file__).resolve().parents[2]
(RESULT,) = (ROOT / "benchmarks").glob("plugins_h200_*.json")
ROWS = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
EXACT = {"fp8_quantize", "fp8_dequantize", "nvfp4_quantize", "nvfp4_dequantize", "kv_quantize", "fp4_pack", "fp4_unpack"}
ROUNDED = 5e-2
"""Of products in FP8 whose queries and weights are rounded by the kernel, against those that are not."""
BETWEEN = 2e-2
"""Of two FP8 products for the few tokens looked at: codes between them may fall to either side."""
FEW_PER_CENT = 3
"""Behind by less, a kernel may be as fast in the next run."""
PEERS = {"peers": {"a": 12.0, "b": 8.0}, "peer": "b", "peer_us": 8.0}
ROW = {"plugin": "kernel", "tokens": 8, "ours_us": 10.0, "eager_us": 90.0, **PEERS}


def test_every_benchmark_has_rows() -> None:
    measured = {row["plugin"] for row in ROWS}
    for file in (ROOT / "plugins").glob("*/bench.py"):
        source = file.read_text(encoding="utf-8")
        assert any(f'"{name}"' in source for name in measured), f"{file.parent.name}: measure it on a GPU, or leave bench.py out"
        assert callable(importlib.import_module(f"plugins.{file.parent.name}.bench").rows)


def test_measured_kernels_were_right() -> None:
    for row in ROWS:
        most = ROUNDED if "error_of_exact" in row else BETWEEN if row["plugin"] == "moe_fp8_block" else 1e-2
        assert row["error"] == 0 if row["plugin"] in EXACT else row["error"] < most, row
        assert "tokens" in row and row["limit_us"] > 0, row


def test_no_kernel_is_faster_than_the_chip() -> None:
    """Cold, where it was measured: a hot one need not read its weights from memory. cuBLAS, cool, beats the ceiling of the run."""
    for row in ROWS:
        assert row.get("cold_us", row["ours_us"]) > 0.88 * row["limit_us"], row


def test_a_kernel_that_loses_says_why() -> None:
    for row in ROWS:
        behind = max(row.get("loses", 0), row.get("loses_cold", 0))
        assert behind < FEW_PER_CENT or row.get("why"), row
        fastest = min([*row["peers"].values(), row["eager_us"], row.get("compile_us", math.inf)])
        assert row["ours_us"] < fastest * 1.011 or row["loses"], row


def test_a_loss_is_against_the_fastest_of_all_others() -> None:
    assert _losses(ROW, "its tiles") == {"loses": 25.0, "loses_to": "b", "why": "its tiles"}
    assert _losses(ROW | {"compile_us": 5.0}, "") == {"loses": 100.0, "loses_to": "compile"}
    assert _losses(ROW | {"ours_us": 8.05}, "its tiles") == {}
    assert _losses(ROW | {"ours_us": 1.0, "cold_us": 12.0, "peer_cold_us": 10.0}, "") == {"loses_cold": 20.0}


def test_a_row_has_every_time_and_the_best_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(call: Any, calls: int = 20, flush: bool = False) -> float:
        return call() + 100 * flush

    def refuses() -> float:
        raise FileNotFoundError(2, "no such source")

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
    refused = "kernel r1: refuses did not run: FileNotFoundError [Errno 2] no such source (1, 8)"
    assert bench.notes == [refused, "kernel r1: slow gives another answer (1, 8)"]


@pytest.mark.parametrize(
    ("us", "calls", "flush", "captured"),
    [(2.0, 20, 0, [20, 100]), (12.0, 20, 0, [20, 41]), (30.0, 2, 0, [2, 16]), (30.0, 20, 0, [20]), (2.0, 20, 1, [20])],
)
def test_short_calls_are_measured_among_more(
    us: float, calls: int, flush: int, captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def graph_seconds(each: list[Any], flush: bool = False) -> float:
        found.append(len(each))
        return us / 1e6

    monkeypatch.setattr("plugins.bench.graph_seconds", graph_seconds)
    assert micros(lambda: None, calls, bool(flush)) == us and found == captured


def test_what_slows_the_others_down_is_measured_last() -> None:
    found = bench_plugins.benchmarks()
    assert tuple(found[-2:]) == ("fp4_allgather", "moe_grouped_gemm") and len(set(found)) == len(found) > 8


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
    monkeypatch.setattr(Bench, "measure_floor", lambda self: None)
    bench, result = Bench(quick=False), bench_plugins.Result(tmp_path / "result.json")
    assert not bench_plugins.measured("kernel", bench, result)
    result.written(bench)
    written = json.loads((tmp_path / "result.json").read_text())
    assert [row["tokens"] for row in written["rows"]] == [8] and list(written["seconds"]) == ["kernel"]
    assert written["notes"] == ["kernel stopped: ValueError no such shape"]


def test_tables_have_a_line_a_shown_row_and_every_loss() -> None:
    first, second = bench_plugins.tables(ROWS).split("\n\n")
    assert len(first.splitlines()) == 2 + sum(map(bench_plugins.is_shown, ROWS))
    assert {line.count("|") for line in first.splitlines()} == {10} and {line.count("|") for line in second.splitlines()} == {5}
    assert second.count(" at ") >= sum("loses" in row for row in ROWS)


def test_every_kernel_of_the_table_was_measured() -> None:
    assert set(bench_plugins.SHOWN) == {row["plugin"] for row in ROWS if bench_plugins.is_shown(row)}


def test_the_tables_go_between_the_two_comments() -> None:
    text = "a\n<!-- plugins' table: x -->\nold\n<!-- end of plugins' table -->\nb\n"
    found = bench_plugins.inserted(text, ROWS)
    assert found == bench_plugins.inserted(found, ROWS)
    assert found.startswith("a\n<!-- plugins' table: x -->\n| kernel") and found.endswith("|\n<!-- end of plugins' table -->\nb\n")
    with pytest.raises(SystemExit, match="no place for plugins' table"):
        bench_plugins.inserted("a", ROWS)


def test_readme_has_the_tables_of_the_result() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    stale = f"write it anew: python scripts/bench_plugins.py --readme {RESULT.relative_to(ROOT)}"
    assert bench_plugins.inserted(text, ROWS) == text, stale


def test_readme_has_the_ladder_of_the_layer_s_result() -> None:
    (result,) = (ROOT / "benchmarks").glob("layer_h200_*.json")
    text, rows = (ROOT / "README.md").read_text(encoding="utf-8"), json.loads(result.read_text(encoding="utf-8"))["rows"]
    stale = f"write it anew: python scripts/bench_layer.py --readme {result.relative_to(ROOT)}"
    assert placed(text, bench_layer.PLACE, bench_layer.table(rows)) == text, stale
    assert bench_layer.table(rows).count("\n") == len(bench_layer.STEPS) + 3


def test_a_result_names_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sgl_ops.so").write_bytes(b"")
    monkeypatch.setattr(bench_plugins, "IMPORTED", ("pytest", "nowhere"))
    assert bench_plugins.versions(tmp_path) == {"pytest": pytest.__version__, "sgl_ops.so": "e3b0c44298fc"}
    assert bench_plugins.versions(None) == {"pytest": pytest.__version__}
