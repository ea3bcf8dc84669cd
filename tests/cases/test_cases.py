"""The table of public cases: complete in itself, and every test that it names is collected."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

TESTS = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = yaml.safe_load((TESTS / "cases" / "cases.yaml").read_text(encoding="utf-8"))
SHORT = {
    "{rule}": "unit/test_verify_invariants.py::test_a_breach_is_told_with_its_tensor",
    "{public}": "unit/test_plan_rules.py::test_public_case",
    "{lint}": "cases/test_lint_cases.py::test_arguments",
    "{repository}": "cases/test_lint_cases.py::test_repository",
}


def node(text: str) -> str:
    """The full id; a `[parameter]` may be left out where all of them are meant."""
    short, brace, rest = text.partition("}")
    return SHORT[short + brace] + rest if brace and short + brace in SHORT else text


@pytest.fixture(scope="session")
def collected(request: pytest.FixtureRequest) -> frozenset[str]:
    """Every id that this run has collected, with and without its parameter; of files outside of this run, what one would."""
    wanted = {node(test) for case in CASES.values() for test in case.get("tests", [])}
    here = _names(item.nodeid for item in request.session.items)
    files = sorted({name.partition("::")[0] for name in wanted - here})
    return here | (_names(_collect(files)) if files else frozenset())


def _collect(files: list[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *(f"tests/{file}" for file in files)], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def _names(lines: Iterable[str]) -> frozenset[str]:
    found = {line.removeprefix("tests/") for line in lines if "::" in line}
    return frozenset(found | {re.sub(r"\[.*\]$", "", name) for name in found})


@pytest.mark.parametrize("name", CASES)
def test_every_test_of_a_case_is_collected(name: str, collected: frozenset[str]) -> None:
    assert not [test for test in map(node, CASES[name].get("tests", [])) if test not in collected]


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_shown_or_says_whose_it_is(name: str) -> None:
    case = CASES[name]
    assert bool(case.get("tests")) != bool(case.get("not_yet"))
    if name.startswith(("quant", "own")):
        assert case["tests"] and all(case[key] for key in ("peer", "ours", "source"))
    elif "not_yet" in case:
        assert re.match(r"(planner|trtllm|triton): .{20,}", case["not_yet"])
