"""compute-sanitizer over the plugins' tests: which kernels it watches, and what counts as clean. The tool is a script here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import sanitize_plugins
from scripts.sanitize_plugins import FOUND, KERNEL, PLUGINS, SELECTION, SOURCES, UNFOLLOWED, checked, watched

ROOT = Path(__file__).resolve().parents[2]


def test_every_kernel_is_watched_and_every_plugin_has_tests() -> None:
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        assert len(KERNEL.findall(text)) == text.count("__global__") > 0, source
    everything = {word for word in watched("memcheck") if word.startswith("kne=")}
    assert {"kne=mla_combine", "kne=topk_router"} < everything
    assert everything - set(watched("racecheck")) == {f"kne={name}" for name in UNFOLLOWED["racecheck"]}
    assert not any("kne=" in word for word in watched("initcheck")), "it must see who writes"
    assert all((ROOT / "tests" / "unit" / f"test_plugins_{name}.py").is_file() for name in PLUGINS)


def test_tests_that_capture_are_named_so_and_left_out() -> None:
    """Without torch's cache of memory nothing can be captured."""
    words = SELECTION.removeprefix("not (").removesuffix(")").split(" or ")
    for name in PLUGINS:
        text = (ROOT / "tests" / "unit" / f"test_plugins_{name}.py").read_text(encoding="utf-8")
        tests = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        captured = [node.name for node in tests if "CUDAGraph" in str(ast.get_source_segment(text, node))]
        assert all(any(word in test for word in words) for test in captured), captured


@pytest.mark.parametrize(("body", "clean", "text"), [
    ("echo '========= ERROR SUMMARY: 0 errors'; echo '3 passed, 2 skipped in 1.20s'", True, "ERROR SUMMARY: 0 errors; 3 passed"),
    (f"echo '========= ERROR SUMMARY: 2 errors'; echo '3 passed in 1.20s'; exit {FOUND}", False, "ERROR SUMMARY: 2 errors"),
    ("echo '========= ERROR SUMMARY: 0 errors'; echo '2 skipped in 1.20s'", False, "ERROR SUMMARY: 0 errors"),
    ("echo '========= RACECHECK SUMMARY: 0 hazards displayed'; echo '1 failed, 2 passed in 3.00s'; exit 1", False, "1 failed"),
    ("echo '========= ERROR SUMMARY: 0 errors'; echo '9 deselected in 1.20s'; exit 5", True, "nothing that racecheck can run"),
    ("echo '========= ERROR SUMMARY: 0 errors'; echo \"$OMP_NUM_THREADS passed in 1.20s\"", True, "0 errors; 2 passed"),
    ("sleep 600", False, "not done in 1 s"),
])  # fmt: skip
def test_what_is_clean(body: str, clean: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    verdict = checked(["topk_router", "trt"], "racecheck", 1 if body.startswith("sleep") else 300, tmp_path)
    assert verdict.clean == clean and text in verdict.text
    assert (tmp_path / "topk_router_trt_racecheck.log").is_file()


def test_the_folder_of_logs_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize_plugins.shutil, "which", lambda _: "/a/tool")
    monkeypatch.setattr(sanitize_plugins, "checked", lambda *_: sanitize_plugins.Verdict(True, ""))
    monkeypatch.setattr("sys.argv", ["sanitize_plugins.py", "--logs", str(tmp_path / "some" / "logs")])
    assert sanitize_plugins.main() == 0 and (tmp_path / "some" / "logs").is_dir()


def test_without_the_tool_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["sanitize_plugins.py"])
    with pytest.raises(SystemExit, match="install the CUDA toolkit"):
        sanitize_plugins.main()
