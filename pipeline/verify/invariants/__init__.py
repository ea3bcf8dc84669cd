"""The invariants of a quantised checkpoint, one file a family. A new rule is a function and an entry in its file's table.

Rules that need headers alone run in `inspect` too; scales and weights are read only by `verify DIR`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.checkpoint.problems import Problem
from pipeline.core.errors import PipelineError
from pipeline.inspect.contents import Contents
from pipeline.verify.invariants import against_source, config, files, formats, kv, model, pairs, scales
from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Fault, Finding, Level, Rule, Subject

__all__ = ["ERROR", "FAMILIES", "NOTE", "RULES", "WARNING", "Fault", "Finding", "Level", "Rule", "Subject", "check", "problems"]

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "files": files.RULES, "formats": formats.RULES, "scales": scales.RULES, "pairs": pairs.RULES, "kv": kv.RULES,
    "config": config.RULES, "model": model.RULES, "source": against_source.RULES,
}  # fmt: skip
RULES: dict[str, Rule] = {rule.id: rule for rules in FAMILIES.values() for rule in rules}
NOT_CHECKED = Rule(
    "not-checked", WARNING, lambda subject: (), "what the rule would have told is not known",
    "mend what the other findings name, then verify again",
)  # fmt: skip
_ORDER = (ERROR, WARNING, NOTE)
_ODD_FOLDER = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError, PipelineError)
"""What code raises that meets a config of a shape that nobody thought of."""


def check(subject: Subject) -> list[Finding]:
    """Every rule that is broken, errors first."""
    found = [finding for finding in _findings(subject) if finding.faults]
    return sorted(found, key=lambda finding: _ORDER.index(finding.rule.level))


def problems(contents: Contents) -> Iterator[Problem]:
    """What headers alone show, as `inspect` tells it."""
    for finding in _findings(Subject(contents)):
        for fault in finding.faults:
            yield Problem(finding.rule.id, fault.tensor, finding.rule.sentence(fault), note=finding.rule.level == NOTE)


def _findings(subject: Subject) -> Iterator[Finding]:
    """Of each rule, in order; one that cannot be applied does not keep the others from being told."""
    failed = []
    for rule in RULES.values():
        try:
            yield Finding(rule, tuple(rule.check(subject)))
        except _ODD_FOLDER as error:
            failed.append(Fault(rule.id, f"{rule.id} could not be applied ({type(error).__name__}: {error})"))
    yield Finding(NOT_CHECKED, tuple(failed))
