"""Every rule as a row, and beside them what is known to go wrong but cannot be seen in files: `lint --rules`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from pipeline.lint.base import Level

__all__ = ["Row", "lines", "not_static", "rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """One rule."""

    area: str
    id: str
    level: Level
    fix: str
    source: str


def rows() -> list[Row]:
    """All rules, by area."""
    from pipeline.lint import args, checkpoint, package, planned, repository
    from pipeline.lint.args import disaggregated
    from pipeline.planner import rules as planner

    tables: dict[str, Any] = {
        "LLM arguments": args.RULES,
        "disaggregated servers": (*disaggregated.RULES, *disaggregated.PAIR_RULES),
        "Triton repository": (*repository.ROOT_RULES, *repository.MODEL_RULES),
        "checkpoint": checkpoint.RULES,
        "package": package.RULES,
    }
    found = [Row(area, rule.id, rule.level, rule.fix, rule.source) for area, table in tables.items() for rule in table]
    found += [
        Row("checkpoint", f"checkpoint/{rule.id}", rule.level, rule.fix, "pipeline/verify/invariants")
        for rule in checkpoint.INVARIANTS
    ]
    return found + [
        Row("plan (hw=, model=)", f"plan/{rule.id}", planned.level_of(rule.id, rule.level), "as its sentence says", rule.source)
        for rule in planner.RULES
        if rule.id not in planned.SAID_BY_FILE
    ]


@cache
def not_static() -> tuple[dict[str, str], ...]:
    """What no file shows: `what` goes wrong, `why` it cannot be seen here, `where` it is checked, and the `source`."""
    return tuple(yaml.safe_load(files("pipeline.lint").joinpath("not_static.yaml").read_text(encoding="utf-8")))


def lines() -> Iterator[str]:
    """For the terminal, and as Markdown."""
    found = rows()
    yield "| area | rule | level | source |"
    yield "|---|---|---|---|"
    yield from (f"| {row.area} | {row.id} | {row.level} | {row.source} |" for row in found)
    yield ""
    yield f"{len(found)} rules. Not seen in files:"
    yield ""
    yield "| what goes wrong | why no file shows it | where it is checked | source |"
    yield "|---|---|---|---|"
    yield from (f"| {row['what']} | {row['why']} | {row['where']} | {row['source']} |" for row in not_static())
