"""The invariants of a quantised checkpoint, one file a family. A new rule is a function and an entry in its file's table.

Rules that need headers alone run in `inspect` too; scales and weights are read only by `verify DIR`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.checkpoint.problems import Problem
from pipeline.inspect.contents import Contents
from pipeline.verify.invariants import against_source, config, files, formats, kv, model, pairs, scales
from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Fault, Finding, Level, Rule, Subject

__all__ = ["ERROR", "FAMILIES", "NOTE", "RULES", "WARNING", "Fault", "Finding", "Level", "Rule", "Subject", "check", "problems"]

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "files": files.RULES, "formats": formats.RULES, "scales": scales.RULES, "pairs": pairs.RULES, "kv": kv.RULES,
    "config": config.RULES, "model": model.RULES, "source": against_source.RULES,
}  # fmt: skip
RULES: dict[str, Rule] = {rule.id: rule for rules in FAMILIES.values() for rule in rules}
_ORDER = (ERROR, WARNING, NOTE)


def check(subject: Subject) -> list[Finding]:
    """Every rule that is broken, errors first."""
    found = [Finding(rule, tuple(rule.check(subject))) for rule in RULES.values()]
    return sorted((finding for finding in found if finding.faults), key=lambda finding: _ORDER.index(finding.rule.level))


def problems(contents: Contents) -> Iterator[Problem]:
    """What headers alone show, as `inspect` tells it."""
    subject = Subject(contents)
    for rule in RULES.values():
        for fault in rule.check(subject):
            yield Problem(rule.id, fault.tensor, rule.sentence(fault), note=rule.level == NOTE)
