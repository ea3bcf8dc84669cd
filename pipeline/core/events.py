"""What the user sees while stages run: bars on a terminal, plain lines otherwise, JSON lines for machines.

A stage reports to a `Progress`; in a process of its own it writes JSON lines (`EventWriter`) which the executor
feeds back into the console's `Progress` (`replay`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from pipeline.core.meter import Meter
from pipeline.core.stage import Progress

__all__ = ["Console", "EventWriter", "JsonConsole", "PlainConsole", "human_bytes", "make_console", "replay"]


class Console(Protocol):
    """Where a run reports to."""

    def stage_started(self, stage: str, reason: str) -> Progress:
        """A stage begins to run; the returned `Progress` is valid until the matching end."""

    def stage_ended(self, stage: str, status: str, **facts: Any) -> None:
        """A stage is `built`, `cached` or `failed`; facts: key, digest, seconds, peak_memory_bytes, ..."""

    def line(self, text: str) -> None:
        """One line of result text."""

    def result(self, value: dict[str, Any]) -> None:
        """The outcome of the command, for machines."""


class EventWriter:
    """`Progress` of a stage in its own process: one JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, total: int, unit: str) -> None:
        self.send(event="start", total=total, unit=unit)

    def advance(self, amount: int = 1) -> None:
        self.send(event="advance", amount=amount)

    def note(self, text: str) -> None:
        self.send(event="note", text=text)

    def send(self, **event: Any) -> None:
        """Write one event; a reader that has gone away is not an error of the stage."""
        print(json.dumps(event, ensure_ascii=False), file=self._stream, flush=True)


def replay(event: dict[str, Any], progress: Progress) -> None:
    """Apply one event of an `EventWriter` to a `Progress`."""
    match event["event"]:
        case "start":
            progress.start(event["total"], event["unit"])
        case "advance":
            progress.advance(event["amount"])
        case "note":
            progress.note(event["text"])


class PlainConsole:
    """Lines of text: for logs, CI and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def stage_started(self, stage: str, reason: str) -> Progress:
        self.line(f"[{stage}] {reason}")
        return _LineProgress(stage, self.line)

    def stage_ended(self, stage: str, status: str, **facts: Any) -> None:
        self.line(f"[{stage}] {ended_text(status, facts)}")

    def result(self, value: dict[str, Any]) -> None:
        """The lines said it all."""


class JsonConsole:
    """JSON lines on standard output, one event each; the last is the result."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def stage_started(self, stage: str, reason: str) -> Progress:
        self._print(event="stage_started", stage=stage, reason=reason)
        return _JsonProgress(stage, self._print)

    def stage_ended(self, stage: str, status: str, **facts: Any) -> None:
        self._print(event="stage_ended", stage=stage, status=status, **facts)

    def line(self, text: str) -> None:
        self._print(event="line", text=text)

    def result(self, value: dict[str, Any]) -> None:
        self._print(event="result", **value)

    def _print(self, **event: Any) -> None:
        print(json.dumps(event, ensure_ascii=False), file=self._stream, flush=True)


def make_console(*, as_json: bool) -> Console:
    """The console that fits standard output."""
    if as_json:
        return JsonConsole()
    if sys.stdout.isatty():
        from pipeline.core.terminal import RichConsole  # rich costs 100 ms: only where it is seen

        return RichConsole()
    return PlainConsole()


def ended_text(status: str, facts: dict[str, Any]) -> str:
    """`built in 12.3 s, peak 512 MiB, 26.1 MiB out, 1a2b3c4d5e6f`."""
    words = {"cached": "up to date", "built": "built", "failed": "failed"}[status]
    if "seconds" in facts:
        words += f" in {facts['seconds']:.1f} s"
    if facts.get("peak_memory_bytes"):
        words += f", peak {human_bytes(facts['peak_memory_bytes'])}"
    if facts.get("size"):
        words += f", {human_bytes(facts['size'])} out"
    return words + (f", digest {facts['digest'][:12]}" if "digest" in facts else "")


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


class _LineProgress:
    """Says how far a stage is every ten seconds."""

    def __init__(self, stage: str, line: Callable[[str], None]) -> None:
        self._stage, self._line = stage, line
        self._meter, self._next = Meter(0, ""), 0.0

    def start(self, total: int, unit: str) -> None:
        self._meter, self._next = Meter(total, unit), time.monotonic() + 10

    def advance(self, amount: int = 1) -> None:
        self._meter.advance(amount)
        if self._meter.total and time.monotonic() >= self._next:
            self._next = time.monotonic() + 10
            self._line(f"[{self._stage}] {self._meter.text()}")

    def note(self, text: str) -> None:
        self._line(f"[{self._stage}] {text}")


class _JsonProgress:
    """Passes every event on, with the stage's name."""

    def __init__(self, stage: str, emit: Callable[..., None]) -> None:
        self._stage, self._emit = stage, emit

    def start(self, total: int, unit: str) -> None:
        self._emit(event="start", stage=self._stage, total=total, unit=unit)

    def advance(self, amount: int = 1) -> None:
        self._emit(event="advance", stage=self._stage, amount=amount)

    def note(self, text: str) -> None:
        self._emit(event="note", stage=self._stage, text=text)
