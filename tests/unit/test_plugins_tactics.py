"""The measured times that choose an implementation: nearest shape, what must be the same, and how a result becomes the file."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="plugins are torch ops")

from plugins.tactics import Table, ours_alone

ROOT = Path(__file__).parents[2]


def table(folder: Path, rows: list[tuple[str, int, int, float, float]]) -> Table:
    made = Table(folder / "tactics.json", "some", ("device", "cache"), ("batch", "length"), ("theirs",))
    measured = [
        {"plugin": "some", "cache": cache, "batch": b, "length": n, "ours_us": ours, "peers": {"theirs": theirs, "slow": 1.0}}
        for cache, b, n, ours, theirs in rows
    ]
    result = folder / "result.json"
    result.write_text(json.dumps({"device": "H", "torch": "2", "rows": [*measured, {"plugin": "another"}]}))
    made.write(result)
    return made


def test_the_nearest_measured_shape_decides(tmp_path: Path) -> None:
    made = table(tmp_path, [("bf16", 1, 4096, 15.0, 19.0), ("bf16", 64, 4096, 122.0, 118.0), ("fp8", 1, 4096, 2.0, 1.0)])
    both = ("ours", "theirs")
    found = [made.choose(("H", "bf16"), (batch, 3000), both) for batch in (1, 4, 48, 900)]
    assert found == ["ours", "ours", "theirs", "theirs"]
    assert made.choose(("H", "fp8"), (1, 1), both) == "theirs"
    assert made.choose(("another", "bf16"), (64, 4096), both) == made.choose(("H", "bf16"), (64, 4096), ("ours",)) == "ours"
    assert made.choose(("H", "bf16"), (64, 4096), ("ours", "not measured")) == "ours"


def test_the_file_has_what_an_op_can_take_and_no_more(tmp_path: Path) -> None:
    rows = table(tmp_path, [("bf16", 1, 4096, 15.0, 19.0)]).rows
    assert rows == [{"device": "H", "cache": "bf16", "batch": 1, "length": 4096, "us": {"ours": 15.0, "theirs": 19.0}}]


def test_cold_times_count_where_they_were_measured(tmp_path: Path) -> None:
    made = table(tmp_path, [])
    times = {"ours_us": 1.0, "cold_us": 9.0, "peers": {"theirs": 2.0}, "peers_cold": {"theirs": 8.0}}
    row = {"plugin": "some", "cache": "bf16", "batch": 1, "length": 1, **times}
    (tmp_path / "result.json").write_text(json.dumps({"device": "H", "torch": "2", "rows": [row]}))
    made.write(tmp_path / "result.json")
    assert made.rows[0]["us"] == {"ours": 9.0, "theirs": 8.0}


def test_ours_alone_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R1_PIPELINE_KERNELS", raising=False)
    assert not ours_alone()
    monkeypatch.setenv("R1_PIPELINE_KERNELS", "ours")
    assert ours_alone()


@pytest.mark.parametrize("plugin", sorted(file.parent.name for file in (ROOT / "plugins").glob("*/tactics.py")))
def test_the_tables_are_of_the_result_that_is_kept(plugin: str, tmp_path: Path) -> None:
    """An op chooses by the same times that README shows."""
    (result,) = (ROOT / "benchmarks").glob("plugins_h200_*.json")
    measured = {row["plugin"] for row in json.loads(result.read_text())["rows"]}
    tables = [table for table in vars(import_module(f"plugins.{plugin}.tactics")).values() if isinstance(table, Table)]
    kept = [table for table in tables if table.plugin in measured]
    for table in kept:
        again = Table(tmp_path / "tactics.json", table.plugin, table.same, table.sizes, table.names)
        again.write(result)
        assert again.rows == table.rows
    assert kept or plugin == "gemm_tactics"
