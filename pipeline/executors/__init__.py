"""Where a stage runs. An executor takes one `StageCall`, reports progress, and returns when the stage has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.core.errors import ConfigError
from pipeline.core.stage import Progress

__all__ = ["Executor", "StageCall", "StageOutcome", "make_executor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCall:
    """Everything a stage needs to run anywhere, as plain data: it crosses process boundaries as one JSON file."""

    stage: str
    config: dict[str, Any]
    inputs: dict[str, str]
    checkpoint: str | None
    out: str
    tmp: str
    earlier: list[str] = field(default_factory=list)
    """Folders of `StageContext.earlier`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """What it cost."""

    seconds: float
    peak_memory_bytes: int
    """Peak resident set of the process that ran the stage and of its largest child."""


class Executor(Protocol):
    """Runs one stage to its end; raises the stage's own error."""

    def run(self, call: StageCall, progress: Progress, log: Path) -> StageOutcome:
        """`log` receives what the stage and its tools print."""


def make_executor(kind: str) -> Executor:
    """The executor of `executor.kind`."""
    if kind == "inline":
        from pipeline.executors.inline import InlineExecutor

        return InlineExecutor()
    if kind == "local":
        from pipeline.executors.local import LocalExecutor

        return LocalExecutor()
    raise ConfigError(f"executor.kind={kind} is not known: choose inline or local.")
