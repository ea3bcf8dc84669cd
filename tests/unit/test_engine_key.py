"""The key of an engine: the code of its own kind, whole, and of no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.engines import ENGINES
from pipeline.config.load import load
from pipeline.core.key import key_parts
from pipeline.stages.engine import STAGE

ROOT = Path(__file__).parents[2]
FOLLOWED = ("pipeline/models/", "plugins/")
SHAPING = ("pipeline/engines/", "pipeline/checkpoint/", "pipeline/formats/", "pipeline/layouts/", *FOLLOWED)
BORROWED = {"pipeline/engines/trtllm/build.py"}
"""Of another kind, on purpose."""


def code_of(kind: str) -> set[str]:
    words = ["engine.torch.device=cuda", "engine.torch.dtype=bfloat16"] if kind == "torch" else []  # then it may take plugins
    return set(key_parts(STAGE, load(["+hw=rtx_pro_6000", f"engine={kind}", *words]), {})["code"])


def imported(file: str) -> Iterator[str]:
    """Files of the project that a file imports."""
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            found = (name, name.rpartition(".")[0])
            paths = (f"{part.replace('.', '/')}{end}" for part in found for end in (".py", "/__init__.py"))
            yield from [path for path in paths if (ROOT / path).is_file()][:1]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_kind_s_key_has_all_that_it_imports(kind: str) -> None:
    code = code_of(kind)
    todo = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "pipeline" / "engines" / kind).rglob("*.py"))
    assert todo
    seen = set(todo)
    while todo:
        for name in set(imported(todo.pop())) - seen:
            seen.add(name)
            todo += [name] if name.startswith(FOLLOWED) else []
    missing = {name for name in seen if name.startswith(SHAPING)} - code
    assert not missing, f"pipeline/stages/engine.py leaves them out for engine={kind}"


@pytest.mark.parametrize("kind", ENGINES)
def test_an_edit_of_one_kind_leaves_the_others_engines(kind: str) -> None:
    others = tuple(f"pipeline/engines/{other}/" for other in ENGINES if other != kind)
    assert not {name for name in code_of(kind) if name.startswith(others)} - BORROWED
