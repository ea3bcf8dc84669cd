"""What an engine carries of the plugins, so that a server needs nothing of this project: `ops/` of the engine's folder.

It holds the sources of each plugin that is taken and of all that they import, as in a checkout, and in `kernels` the cubins that
the engine's check compiled (`plugins.nvrtc.carried` finds them), so that a server has no need of a compiler either.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.share import code_root

if TYPE_CHECKING:
    from pipeline.config.schema import Config

__all__ = ["OPS", "PLUGINS", "carry", "code", "sources"]

OPS = "ops"
PLUGINS = (
    "fused_qkv_a", "gemm_tactics", "mla_absorb", "mla_decode", "mla_prefill", "moe_grouped_gemm", "router_gemm", "topk_router",
)  # fmt: skip
"""Folders of those that the graph can call; each has a rule in choose.py and its place in plugged.py."""
DATA, SHARED_DATA = (".cu", ".cuh", ".json"), (".cuh",)
"""What plugins read beside modules, kernels and tactic files; and of `plugins/` itself, whose kernels are benchmarks'."""


def code(config: Config) -> tuple[str, ...]:
    """Files that the engine's key has for them: all, where any may be taken."""
    settings = config.engine.torch
    assert settings is not None
    return tuple(sources(PLUGINS)) if settings.device == "cuda" and settings.plugins == "auto" else ()


def carry(plugins: Iterable[str], out: Path) -> None:
    """Fill `out`/ops."""
    for name in sources(plugins):
        target = out / OPS / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(code_root() / name, target)


def sources(plugins: Iterable[str]) -> dict[str, str]:
    """File -> SHA-256 of all that the ops of these plugins need."""
    todo, found = [f"plugins/{name}/op.py" for name in plugins], set[str]()
    while todo:
        found.add(name := todo.pop())
        todo += set(imported(name)) - found
    folders = {Path(name).parent for name in found if name.startswith("plugins/")}
    files = sorted(found.union(*map(_data, folders)))
    return {file: hashlib.sha256((code_root() / file).read_bytes()).hexdigest() for file in files}


def _data(folder: Path) -> set[str]:
    kinds = SHARED_DATA if folder.name == "plugins" else DATA
    return {(folder / file.name).as_posix() for file in (code_root() / folder).iterdir() if file.suffix in kinds}


def imported(file: str) -> Iterator[str]:
    """Files of this project that one imports anywhere in it, and their packages' own."""
    for node in ast.walk(ast.parse((code_root() / file).read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for parts in (name.split(".") for name in names if name.startswith(("pipeline.", "plugins."))):
            places = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
            paths = (f"{place}{end}" for place in places for end in ("/__init__.py", ".py"))
            yield from (path for path in paths if (code_root() / path).is_file())
