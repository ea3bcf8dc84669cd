"""Other libraries of another version, or without what they need beside: ours does the work, nothing fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="plugins are torch ops")

from plugins import tactics  # noqa: E402
from plugins.mla_decode import op as mla_decode_op  # noqa: E402
from plugins.mla_decode import tactics as decode  # noqa: E402
from plugins.mla_prefill import op as mla_prefill_op  # noqa: E402
from plugins.mla_prefill import tactics as prefill  # noqa: E402
from plugins.moe_grouped_gemm import op as moe_op  # noqa: E402
from plugins.moe_grouped_gemm import tactics as moe  # noqa: E402

FA3 = f"fwd({', '.join(f'Tensor? x{i}' for i in range(prefill.FA3_ARGUMENTS))}) -> Tensor[]"
PRODUCT = "def m_grouped_fp8_gemm_nt_contiguous(*_, **__): {}"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("R1_PIPELINE_KERNELS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("deep_gemm", "flash_mla"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    caches = tactics.importable, decode.present, moe.present
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()
    for name in ("deep_gemm", "flash_mla"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("text", "names"), [
    (PRODUCT.format("'m_grouped(a: tuple, use_psum_layout: bool = False) -> None'"), ("ours", "deep_gemm")),
    (PRODUCT.format("pass"), ("ours", "deep_gemm")),
    (PRODUCT.format("'m_grouped(a: tuple, m_indices: torch.Tensor) -> None'"), ("ours",)),
    ("assert False, 'no CUDA toolkit'", ("ours",)),
    ("", ("ours",)),
    (None, ("ours",)),
], ids=["layout", "silent", "older", "no toolkit", "no product", "none"])  # fmt: skip
def test_deep_gemm_is_asked_for_its_layout(text: str | None, names: tuple[str, ...], tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "deep_gemm.py").write_text(text)
    assert moe.present() == names


@pytest.mark.parametrize(("text", "names"), [
    ("def get_mla_metadata(*args, **kwargs): pass", ("ours", "flash_mla")),
    ("def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k): pass", ("ours",)),
    ("import nothing_of_this_name", ("ours",)),
    ("get_mla_metadata = max", ("ours",)),  # as of a compiled module: no signature to ask for
])  # fmt: skip
def test_flash_mla_is_asked_whether_it_plans_by_itself(text: str, names: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "flash_mla.py").write_text(text)
    assert decode.present() == names


@pytest.mark.parametrize(("schema", "names"), [(FA3, ("ours", "fa3")), (FA3.replace(", Tensor? x36", ""), ("ours",))])
def test_fa3s_op_is_asked_for_its_arguments(schema: str, names: tuple[str, ...]) -> None:
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        pytest.skip("the library itself is loaded")
    with torch.library._scoped_library("_vllm_fa3_C", "FRAGMENT") as library:
        library.define(schema)
        assert prefill.present(alone=False) == names


def test_as_many_arguments_are_passed_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, int] = {}

    class Ops:
        def __getattr__(self, name: str):
            def call(*given: object) -> list[torch.Tensor]:
                passed[name] = len(given)
                return [torch.empty(1, 1, 1, 512), torch.empty(1, 1, 1)]

            return call

    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", Ops(), raising=False)
    ends = torch.zeros(1, dtype=torch.int32)
    prefill.fa3(*torch.zeros(3, 1, 1, 192), ends, ends, 1.0)
    assert passed == {"fwd": prefill.FA3_ARGUMENTS}


def test_what_fails_when_it_is_called_is_not_called_again(tmp_path: Path) -> None:
    file, called = tmp_path / "tactics.json", []
    file.write_text(json.dumps({"rows": [{"device": "a GPU", "tokens": 8, "us": {"theirs": 1, "others": 2, "ours": 3}}]}))
    table = tactics.Table(file, "a_plugin", ("device",), ("tokens",), ("theirs", "others"))
    ask = lambda: table.choose(("a GPU",), (8,), ("ours", "theirs", "others"))  # noqa: E731

    def fails(error: Exception) -> Any:
        called.append(error)
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        table.attempt(ask(), lambda: fails(torch.OutOfMemoryError("no room")), lambda: "ours")
    assert ask() == "theirs" and table.attempt("theirs", lambda: "theirs", lambda: fails(ValueError())) == "theirs"
    with pytest.warns(UserWarning, match=r"a_plugin: theirs failed, so our kernel is used from now on \(no nvcc\)"):
        assert table.attempt("theirs", lambda: fails(RuntimeError("no nvcc")), lambda: "ours") == "ours"
    assert ask() == "others" and len(called) == 2


def _decode() -> tuple[Any, ...]:
    q, cache = torch.zeros(2, 1, 64, 576).bfloat16(), torch.zeros(2, 64, 576).bfloat16()
    return mla_decode_op.mla_decode._init_fn(q, cache, torch.zeros(2, 1).int(), torch.zeros(2).int(), 0.1, 512, 1.0)


def _prefill() -> tuple[Any, ...]:
    q, v, ends = torch.zeros(8, 2, 192).bfloat16(), torch.zeros(8, 2, 128).bfloat16(), torch.tensor([0, 8]).int()
    return mla_prefill_op.mla_prefill._init_fn(q, q, v, ends, ends, 0.1)


def _experts() -> tuple[Any, ...]:
    fp8 = lambda *shape: (torch.zeros(shape).to(torch.float8_e4m3fn), torch.zeros(shape[0], shape[1] // 128, shape[2] // 128))  # noqa: E731
    x, routes = torch.zeros(8, 128).bfloat16(), (torch.zeros(8, 2).int(), torch.zeros(8, 2))
    return (moe_op.moe_fp8_block._init_fn(x, *routes, *fp8(4, 256, 128), *fp8(4, 128, 128)),)


@pytest.mark.parametrize(("call", "op", "kernel", "table", "name"), [
    (_decode, mla_decode_op, "launch", decode.TABLE, "flash_mla"),
    (_prefill, mla_prefill_op, "launch", prefill.TABLE, "fa3"),
    (_experts, moe_op, "experts", moe.TABLE, "deep_gemm"),
], ids=["mla_decode", "mla_prefill", "moe_grouped_gemm"])  # fmt: skip
def test_ours_does_the_work_of_one_that_fails(
    call: Any, op: Any, kernel: str, table: tactics.Table, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their call fails; what is returned is what our kernel wrote."""

    def fails(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    def writes(*tensors: Any, products: Any = None, **_: Any) -> None:
        if products:
            fails()
        [x for x in tensors if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16][-1].fill_(7)

    owner = op.launch if op is moe_op else op
    monkeypatch.setattr(owner, kernel, writes)
    monkeypatch.setattr(owner, "has_kernel", lambda *_: True)
    monkeypatch.setattr(op, "_fastest", lambda *_: name)
    monkeypatch.setattr(table, "failed", set())
    monkeypatch.setitem(decode.THEIRS, "flash_mla", fails)
    monkeypatch.setitem(prefill.THEIRS, "fa3", fails)
    with pytest.warns(UserWarning, match=f"{name} failed"):
        out = call()[0]
    assert (out == 7).all() and table.failed == {name}
