"""Products by measured algorithms: what the file says where, the op everywhere, the library's structures; the search on a GPU."""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.core.errors import ConfigError

torch = pytest.importorskip("torch", reason="the op is torch's")

from plugins.gemm_tactics import cublaslt, op, reference, tactics  # noqa: E402

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")
WORDS = [hex(word) for word in range(7, 15)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tactic file of one shape."""
    path = tmp_path / "tactics.json"
    rows = [{"tokens": 4, "algorithm": WORDS}, {"tokens": 8, "algorithm": []}, {"tokens": 2, "algorithm": [], "kernel": 1}]
    rows = [row | {"out": 64, "hidden": 32} for row in rows]
    path.write_text(json.dumps({"version": 1, "device": "H", "cublaslt": 13, "rows": rows}))
    monkeypatch.setattr(tactics, "FILE", path)
    tactics.find.cache_clear()
    yield path
    tactics.find.cache_clear()


def test_a_tactic_is_that_of_its_shape_device_and_library(file: Path) -> None:
    assert tactics.find(4, 64, 32, "H", 13) == tuple(range(7, 15))
    assert tactics.products("H", 13) == {(64, 32)} and not tactics.products("H", 14)
    for other in ((8, 64, 32, "H", 13), (4, 64, 33, "H", 13), (4, 64, 32, "G", 13), (4, 64, 32, "H", 14)):
        assert tactics.find(*other) is None


def test_a_tactic_may_be_a_form_of_our_kernel(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(tactics.ours, "launch", lambda *_, tiles: done.append(tiles))
    monkeypatch.setattr(cublaslt, "product", lambda *given: done.append(given[-1]))
    for tokens in (2, 4):
        tactics.multiply(*[torch.empty(0)] * 3, tactics.find(tokens, 64, 32, "H", 13))
    assert done == [1, tuple(range(7, 15))]


def test_the_committed_file_holds_r1s_shapes() -> None:
    kept = json.loads(tactics.FILE.read_text())
    assert {(row["out"], row["hidden"]) for row in kept["rows"]} == set(tactics.SHAPES.values())
    assert all(len(row["algorithm"]) in (0, 8) and row["us"] <= row["torch_us"] for row in kept["rows"])


def test_structures_are_the_librarys() -> None:
    assert ctypes.sizeof(cublaslt._Candidate) == 96


def test_each_device_has_a_context_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a product goes through that of the current one."""
    made, used = [], []

    class Library:
        def cublasLtCreate(self, handle) -> int:  # noqa: N802
            made.append(handle)
            handle._obj.value = len(made)
            return 0

        def cublasLtMatmul(self, handle, *_) -> int:  # noqa: N802
            used.append(handle.value)
            return 0

        def __getattr__(self, name: str):
            return lambda *_: 0

    for name in ("_handle", "_operation", "_layouts"):
        monkeypatch.setattr(cublaslt, name, getattr(cublaslt, name).__wrapped__)
    monkeypatch.setattr(cublaslt, "_handle", functools.cache(cublaslt._handle))
    monkeypatch.setattr(cublaslt, "_library", Library)
    monkeypatch.setattr(cublaslt, "_workspace", lambda _: torch.empty(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    x, weight, out = (torch.zeros(shape).bfloat16() for shape in ((2, 8), (4, 8), (2, 4)))
    for device in (0, 1, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        cublaslt.product(x, weight, out, tuple(range(8)))
    assert used == [1, 2, 2, 1] and len(made) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_op_vs_reference(device: str) -> None:
    for tokens, out, hidden in ((0, 8, 16), (1, 2112, 7168), (8, 7168, 2048), (13, 24, 40)):
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        weight = (torch.randn(out, hidden, device=device) * hidden**-0.5).bfloat16()
        found = torch.ops.r1_pipeline.tuned_linear(x, weight)
        torch.testing.assert_close(found, reference.linear(x, weight), rtol=2.0**-6, atol=2e-2)


@NEEDS_GPU
def test_the_search_keeps_what_is_not_slower() -> None:
    row = tactics.search(8, 512, 1024)
    assert row["candidates"] > 0 and row["us"] <= row["torch_us"]


def test_op_is_known_to_export() -> None:
    torch.library.opcheck(op.tuned_linear, (torch.randn(3, 64).bfloat16(), torch.randn(8, 64).bfloat16()))


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be bfloat16"):
        op.tuned_linear(torch.zeros(2, 8).bfloat16(), torch.zeros(4, 9).bfloat16())
