"""What is wrong with a checkpoint, as sentences that can be collected and shown all together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from pipeline.core.errors import ConfigError

__all__ = ["Problem", "Report", "refuse", "refuse_all", "sentences"]

MOST = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault. `kind` groups those that have the same cause; `tensor` is empty where a file or a key is meant."""

    kind: str
    tensor: str
    text: str
    note: bool = False
    """Whether it is only good to know."""


Report = Callable[[Problem], None]
"""Takes a problem: a list's `append`, or `refuse`."""


def refuse(problem: Problem) -> NoReturn:
    """The strict `Report`: the first problem ends it."""
    raise ConfigError(problem.text)


def refuse_all(problems: Iterable[Problem]) -> None:
    """One error with every problem."""
    if found := sentences(problems):
        raise ConfigError("\n".join(found))


def sentences(problems: Iterable[Problem], most: int = MOST) -> list[str]:
    """The sentences, kind by kind in order of appearance; after `most` of a kind only their number."""
    by_kind: dict[str, list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, []).append(problem)
    lines = []
    for kind, same in by_kind.items():
        lines += [problem.text for problem in same[:most]]
        if len(same) > most:
            last = f", the last {same[-1].tensor}" if same[-1].tensor else ""
            lines.append(f"... and {len(same) - most:,} more like it ({kind}){last}.")
    return lines
