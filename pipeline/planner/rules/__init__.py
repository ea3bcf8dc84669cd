"""Combinations that cannot work, and those that work but not as asked: one table, a family of rules a file.

A rule looks at a `Setup`, so the planner's own choice and a user's file of LLM arguments are held to the same ones. A new rule
is a function and a row in its family, and a case in tests/unit/test_plan_rules.py, which fails without one.
"""

from __future__ import annotations

from dataclasses import asdict

from pipeline.planner.rules import capacity, engine, moe, parallel, precision
from pipeline.planner.rules.base import REFUSE, WARN, Finding, Rule, broken
from pipeline.planner.setup import Setup

__all__ = ["REFUSE", "RULES", "WARN", "Finding", "Rule", "check", "table"]

STRUCTURE = (*engine.RULES, *precision.RULES, *capacity.LENGTHS, *parallel.RULES, *moe.RULES)
RULES = (*STRUCTURE, *capacity.MEMORY)
"""All of them, in the order in which they are reported."""


def check(setup: Setup) -> list[Finding]:
    """Every rule that `setup` does not keep. Memory is only judged where the layout can be loaded at all."""
    found = broken(STRUCTURE, setup)
    unloadable = {finding.rule for finding in found} & {"expert_tp", "stages", "sm"}
    return found if unloadable else found + broken(capacity.MEMORY, setup)


def table() -> list[dict[str, str]]:
    """Id, level and source of every rule, for reports."""
    return [{name: value for name, value in asdict(rule).items() if name != "check"} for rule in RULES]
