"""The console of a terminal: one live bar under the lines of the run (rich)."""

from __future__ import annotations

from typing import Any

from rich.console import Console as Terminal
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from pipeline.core.events import ended_text
from pipeline.core.meter import Meter
from pipeline.core.stage import Progress

__all__ = ["RichConsole"]

_MARKS = {"built": ("✓", "green"), "cached": ("=", "cyan"), "failed": ("✗", "red")}


class RichConsole:
    """Finished stages as lines, the running one as a bar."""

    def __init__(self, terminal: Terminal | None = None) -> None:
        self._terminal = terminal or Terminal(highlight=False)
        self._bars: Bars | None = None

    def line(self, text: str) -> None:
        self._terminal.print(Text(text))

    def stage_started(self, stage: str, reason: str) -> Progress:
        self.line(f"▸ {stage}: {reason}")
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        self._bars = Bars(*columns, console=self._terminal, transient=True)
        self._bars.start()
        return _BarProgress(self._bars, stage, self._terminal)

    def stage_ended(self, stage: str, status: str, **facts: Any) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None
        mark, colour = _MARKS[status]
        self._terminal.print(Text(f"{mark} ", style=colour), Text(f"{stage}: {ended_text(status, facts)}"), sep="")

    def result(self, value: dict[str, Any]) -> None:
        """The lines said it all."""


class _BarProgress:
    def __init__(self, bars: Bars, stage: str, terminal: Terminal) -> None:
        self._bars, self._terminal, self._meter = bars, terminal, Meter(0, "")
        self._task = bars.add_task(stage, total=None, state="")

    def start(self, total: int, unit: str) -> None:
        self._meter = Meter(total, unit)
        self._bars.update(self._task, total=total, completed=0, state=self._meter.text())

    def advance(self, amount: int = 1) -> None:
        self._meter.advance(amount)
        self._bars.update(self._task, completed=self._meter.done, state=self._meter.text())

    def note(self, text: str) -> None:
        self._terminal.print(Text(f"  {text}"))
