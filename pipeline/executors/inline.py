"""Stages in this very process: for debuggers and tests. Memory is that of the whole process."""

from __future__ import annotations

import importlib
import resource
import time
from pathlib import Path

from pipeline.config.load import from_plain
from pipeline.core.stage import Progress, StageContext
from pipeline.executors import StageCall, StageOutcome
from pipeline.stages import STAGES

__all__ = ["InlineExecutor", "run_call"]


class InlineExecutor:
    """Calls the stage's function."""

    def run(self, call: StageCall, progress: Progress, log: Path) -> StageOutcome:
        started = time.monotonic()
        run_call(call, progress)
        return StageOutcome(seconds=time.monotonic() - started, peak_memory_bytes=peak_memory())


def run_call(call: StageCall, progress: Progress) -> None:
    """Import the stage's function and let it fill its folder."""
    module, function = STAGES[call.stage].run.split(":")
    context = StageContext(
        config=from_plain(call.config),
        inputs={name: Path(path) for name, path in call.inputs.items()},
        checkpoint=Path(call.checkpoint) if call.checkpoint else None,
        out=Path(call.out),
        progress=progress,
        earlier=tuple(Path(path) for path in call.earlier),
    )
    getattr(importlib.import_module(module), function)(context)


def peak_memory() -> int:
    """Peak resident set of this process or of its largest finished child, in bytes."""
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return 1024 * max(own, children)
