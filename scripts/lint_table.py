"""The README's table of `lint`: rules by area, public cases that each area catches, and alarms on what is known to run.

Everything is counted anew: the rules from their tables, the cases by linting them (tests/cases/test_lint_cases.py), false alarms
over NVIDIA's 18 published recipes and 133 layouts that InferenceX measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline.lint import catalogue
from pipeline.lint.checkpoint import INVARIANTS
from scripts._options import result_file
from tests._utils.known_good import MEASURED, RECIPES, TRUE_ALARMS, alarms_of_measured, alarms_of_recipe
from tests.cases.test_lint_cases import ARGUMENTS, RULES, TABLE, linted_arguments
from tests.unit.test_lint_repository import linted

AREAS = {row.id: row.area for row in catalogue.rows()}


def caught() -> Counter[str]:
    """Cases by the area of the rule that shows them; a case that is not shown is missing."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for case, (_, _, rule, _, _) in ARGUMENTS.items():
            counts[AREAS[rule]] += any(finding.rule == rule for finding in linted_arguments(Path(folder), case).findings)
        for case, (rule, _, _) in RULES.items():
            place = Path(folder) / case
            place.mkdir()
            counts[AREAS[rule]] += any(finding.rule == rule for finding in linted(place, rule).findings)
    counts["checkpoint"] += len(checkpoints())
    return counts


def checkpoints() -> list[str]:
    """Cases of an invariant that lint tells (tests/unit/test_verify_invariants.py breaks a checkpoint for each of them)."""
    told = {f"{{rule}}[{rule.id}]" for rule in INVARIANTS}
    return [name for name, case in TABLE.items() if told & set(case.get("tests", ()))]


def table() -> dict[str, Any]:
    """All that is counted."""
    rules, cases = Counter(AREAS.values()), caught()
    recipes = {file.stem: [item.rule for placed in (False, True) for item in alarms_of_recipe(file, placed)] for file in RECIPES}
    true = sum(recipes[name] == [rule] * 2 for name, rule in TRUE_ALARMS.items())
    false = sum(bool(found) for name, found in recipes.items() if name not in TRUE_ALARMS)
    return {
        "areas": {area: {"rules": rules[area], "cases": cases[area]} for area in rules},
        "rules": sum(rules.values()),
        "cases": {"caught": sum(cases.values()), "to be seen in files": len(ARGUMENTS) + len(RULES) + len(checkpoints())},
        "recipes": {"linted": len(RECIPES), "true alarms": true, "false alarms": false},
        "measured": {"linted": len(MEASURED), "false alarms": sum(bool(alarms_of_measured(row)) for row in MEASURED)},
        "not static": len(catalogue.not_static()),
    }


def markdown(found: dict[str, Any]) -> str:
    """The table for the README."""
    rows = [f"| {area} | {row['rules']} | {row['cases'] or '-'} |" for area, row in found["areas"].items()]
    cases, recipes, measured = found["cases"], found["recipes"], found["measured"]
    return "\n".join([
        "| area | rules | public cases caught |", "|---|---|---|", *rows,
        f"| all | {found['rules']} | {cases['caught']} of {cases['to be seen in files']} |", "",
        f"False alarms on what is known to run: {recipes['false alarms']} of {recipes['linted']} published recipes "
        f"({recipes['true alarms']} true: its own engine refuses it), {measured['false alarms']} of {measured['linted']} measured "
        f"layouts. {found['not static']} more failures are listed that no file shows, with where each is checked.",
    ])  # fmt: skip


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=result_file, help="write the counts there, too")
    options = parser.parse_args()
    found = table()
    print(markdown(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
