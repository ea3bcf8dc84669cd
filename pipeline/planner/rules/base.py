"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.planner.setup import Setup

__all__ = ["ISSUE", "PULL", "REFUSE", "WARN", "Finding", "Rule", "broken"]

REFUSE, WARN = "refuse", "warn"
ISSUE, PULL = "NVIDIA/TensorRT-LLM issue", "NVIDIA/TensorRT-LLM pull request"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to check: a predicate that returns the sentence (value, limit, way out) or None."""

    id: str
    level: str
    """REFUSE: it cannot work. WARN: it works, but otherwise than asked."""
    check: Callable[[Setup], str | None]
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that is not kept."""

    rule: str
    level: str
    text: str
    source: str


def broken(rules: Iterable[Rule], setup: Setup) -> list[Finding]:
    """All rules of `rules` that `setup` does not keep."""
    return [Finding(rule.id, rule.level, text, rule.source) for rule in rules if (text := rule.check(setup))]
