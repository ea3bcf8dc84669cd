"""What a rule about a checkpoint is, and what it finds.

A rule looks at a `Subject` and yields a `Fault` for each tensor (or file, or key) that breaks it: which, and the fact. Why
that hurts and how to mend it stand at the rule, once. The sentence of a fault is fact and reason together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pipeline.inspect.contents import Contents
from pipeline.inspect.declared import Declaration, declarations, matched

if TYPE_CHECKING:
    from pipeline.config.schema import VerifyConfig
    from pipeline.verify.invariants.scan import Scan
    from pipeline.verify.weights import TensorError

__all__ = ["ERROR", "NOTE", "WARNING", "Fault", "Finding", "Level", "Rule", "Subject"]

Level = Literal["error", "warning", "note"]
ERROR: Level = "error"
WARNING: Level = "warning"
NOTE: Level = "note"
MOST = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """One breach. `tensor` is empty where a file or a key is meant."""

    tensor: str
    fact: str


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and as much as is known of it: headers always, the rest where it was read."""

    contents: Contents
    source: Contents | None = None
    """What it was made from."""
    scans: Mapping[str, Scan] = field(default_factory=dict)
    """Scale tensor -> what its values are."""
    errors: Sequence[TensorError] = ()
    """Of the parameters that were compared with the source."""
    limits: VerifyConfig | None = None
    uncompared: str = ""
    """Why nothing was compared though there is a source."""
    cut_off: Sequence[str] = ()
    """Tensors of the source of which bytes are missing."""

    @cached_property
    def declared(self) -> list[Declaration]:
        """What the configs say."""
        return declarations(self.contents)

    @cached_property
    def excluded(self) -> dict[str, dict[str, list[str]]]:
        """File -> exclude pattern -> the modules that it matches."""
        names = sorted(self.contents.modules)
        return {item.file: {pattern: matched(pattern, names) for pattern in item.excludes} for item in self.declared}


@dataclass(frozen=True, slots=True)
class Rule:
    """One invariant."""

    id: str
    level: Level
    check: Callable[[Subject], Iterable[Fault]]
    why: str
    """What comes of a breach; goes on after the fact and a colon."""
    fix: str
    """What to do, as an imperative."""

    def sentence(self, fault: Fault) -> str:
        """Fact and reason; a fact that has a colon gives its own."""
        return f"{fault.fact}." if ": " in fault.fact else f"{fault.fact}: {self.why}."


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule with everything that breaks it."""

    rule: Rule
    faults: tuple[Fault, ...]

    def lines(self) -> Iterator[str]:
        """For people: the first few by name, and how many there are."""
        rule = self.rule
        count = f" ({len(self.faults):,})" if len(self.faults) > 1 else ""
        yield f"{rule.level} {rule.id}{count}"
        yield from (f"  {fault.fact}" for fault in self.faults[:MOST])
        if (more := len(self.faults) - MOST) > 0:
            last = self.faults[-1]
            yield f"  ... and {more:,} more{f', the last {last.tensor}' if last.tensor else ''}"
        yield f"  why: {rule.why}"
        yield f"  fix: {rule.fix}"

    def sentence(self) -> str:
        """The first breach, how many more there are, and the way out."""
        more = f" ({len(self.faults) - 1:,} more)" if len(self.faults) > 1 else ""
        return f"{self.rule.sentence(self.faults[0]).rstrip('.')}{more}; {self.rule.fix}."

    def plain(self) -> dict[str, Any]:
        """For machines: every one."""
        return {
            "rule": self.rule.id, "level": self.rule.level, "why": self.rule.why, "fix": self.rule.fix,
            "count": len(self.faults), "faults": [{"tensor": f.tensor, "fact": f.fact} for f in self.faults],
        }  # fmt: skip
