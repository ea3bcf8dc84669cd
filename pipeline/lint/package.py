"""What `package` wrote, as a whole: its launchers against the arguments of the instances that they start.

The repository and the arguments may have been edited since; a launcher that starts another number of ranks ends in
`mpiSize == tp * pp`, after the weights were loaded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.launch.crosscheck import Bundle, problems
from pipeline.lint.base import ERROR, Fault, Finding, Place, Rule, apply
from pipeline.lint.document import read_document, read_text
from pipeline.lint.names import ENGINE_ARGS, SETTINGS

__all__ = ["RULES", "Package", "findings"]

AXES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "data_parallel_size")
MOST_FILES = 200
NAME = re.compile(r"^([\w-]+)-\d+\)$", re.MULTILINE)
"""An instance in instance.sh; its role."""
EXPORT = re.compile(r"^export (\w+)=(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A folder with package.json and launch/."""

    folder: Path

    @cached_property
    def launchers(self) -> dict[str, str]:
        """Texts below launch/, by their names there."""
        root = self.folder / "launch"
        files = [path for path in sorted(root.rglob("*")) if path.is_file()][:MOST_FILES]
        return {path.relative_to(root).as_posix(): read_text(path) for path in files}

    @cached_property
    def ranks(self) -> dict[str, int]:
        """World size by role, from the arguments."""
        found = {file.parent.name: _world(file) for file in sorted(self.folder.glob("instances/*/llm_args.yaml"))}
        served = [file for name in (SETTINGS, ENGINE_ARGS) for file in sorted(self.folder.glob(f"repository/*/*/{name}"))]
        return found or ({"aggregated": _world(served[-1])} if served else {})

    @cached_property
    def bundle(self) -> Bundle:
        """As the cross-check of `package` takes it; what only the build knew is taken from the launchers."""
        about, script = read_document(self.folder / "package.json"), self.launchers["instance.sh"]
        return Bundle(
            kind=str(about.get("engine")), line=str(about.get("triton.engine_version") or ""), ranks=self.ranks,
            counts=Counter(NAME.findall(script)), gpus={},
            environment={name: value.strip("'\"") for name, value in EXPORT.findall(script)},
        )  # fmt: skip


def _world(file: Path) -> int:
    """Ranks of one instance; 0 where the arguments do not tell."""
    try:
        values: Mapping[str, Any] = read_document(file).values
        return math.prod(int(values.get(axis) or 1) for axis in AXES)
    except (ConfigError, TypeError, ValueError):
        return 0


def _disagree(package: Package) -> Iterator[Fault]:
    if package.ranks and all(package.ranks.values()):
        for said in problems(package.launchers, package.bundle):
            yield Fault(Place(package.folder / "launch"), said.rstrip("."))


RULES: tuple[Rule[Package], ...] = (
    Rule("package/launchers", ERROR, _disagree, "package again, or correct the side that was edited",
         "pipeline/launch/crosscheck.py; NVIDIA/TensorRT-LLM issues 2021, 1047"),
)  # fmt: skip


def findings(folder: Path) -> Iterator[Finding]:
    """Every breach by a package."""
    yield from apply(RULES, Package(folder), folder)
