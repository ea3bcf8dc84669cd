"""What a rule of `lint` is, and what it finds.

A rule looks at one subject (a file of LLM arguments, a model of a Triton repository, ...) and yields a `Fault` for each place
that breaks it. How to mend it and where that is known from stand at the rule, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from yaml import YAMLError

from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Level

__all__ = ["ERROR", "NOTE", "WARNING", "Fault", "Finding", "Level", "Place", "Rule", "apply"]

S = TypeVar("S")
ODD = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError, AssertionError, YAMLError)
"""What code raises that meets a file of a shape that nobody thought of."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is wrong."""

    file: Path
    line: int | None = None
    """From 1; None where the whole file, or a folder, is meant."""
    key: str = ""
    """Key path, field or tensor."""

    def __str__(self) -> str:
        line = f":{self.line}" if self.line else ""
        return f"{self.file}{line}{f' {self.key}' if self.key else ''}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One breach of a rule."""

    place: Place
    reason: str
    """The fact with its values, and what comes of it; no full stop."""
    fix: str = ""
    """What to do here, where that is not the rule's own."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """One thing to check."""

    id: str
    """area/name."""
    level: Level
    """error: it is refused or gives wrong results. warning: it works, but not as asked. note: worth knowing."""
    check: Callable[[S], Iterable[Fault]]
    fix: str
    """What to do, as an imperative."""
    source: str
    """Where this is known from: a public document, file, issue or release note."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach, complete in itself."""

    rule: str
    level: Level
    place: Place
    reason: str
    fix: str
    source: str

    def lines(self) -> Iterator[str]:
        """For people; the first line is one that editors can jump from."""
        yield f"{self.place}: {self.level} {self.rule}: {self.reason}."
        yield f"    fix: {self.fix} [{self.source}]"

    def plain(self) -> dict[str, Any]:
        """For machines."""
        return {
            "rule": self.rule, "level": self.level, "file": str(self.place.file), "line": self.place.line,
            "key": self.place.key, "reason": self.reason, "fix": self.fix, "source": self.source,
        }  # fmt: skip


def apply(rules: Iterable[Rule[S]], subject: S, where: Path) -> Iterator[Finding]:
    """Every breach of `rules` by `subject`; a rule that cannot be applied is told, and the others go on."""
    for rule in rules:
        try:
            faults = tuple(rule.check(subject))
        except ODD as error:
            reason = f"{rule.id} could not be applied ({type(error).__name__}: {str(error)[:200]})"
            faults, rule = (Fault(Place(where), reason),), NOT_APPLIED
        for fault in faults:
            yield Finding(rule.id, rule.level, fault.place, fault.reason.rstrip("."), fault.fix or rule.fix, rule.source)


NOT_APPLIED: Rule[Any] = Rule(
    "file/not-applied", WARNING, lambda subject: (), "mend what the other findings name, then lint again",
    "pipeline/lint/base.py",
)  # fmt: skip
