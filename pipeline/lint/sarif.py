"""Findings as SARIF 2.1.0, which code hosts and editors show at their lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline import __version__
from pipeline.lint.base import Finding

__all__ = ["sarif"]

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
ROOT = "%SRCROOT%"


def sarif(findings: Iterable[Finding]) -> dict[str, Any]:
    """One run. Paths are relative to the folder that lint runs in, where they lie below it."""
    found = list(findings)
    rules = {finding.rule: finding for finding in found}
    indices = {rule: index for index, rule in enumerate(rules)}
    driver = {"name": "r1-pipeline lint", "version": __version__, "rules": [_rule(finding) for finding in rules.values()]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, indices[finding.rule]) for finding in found],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.rule,
        "name": "".join(part.capitalize() for part in finding.rule.replace("/", "-").replace("_", "-").split("-")),
        "shortDescription": {"text": finding.rule.rpartition("/")[2].replace("-", " ").replace("_", " ")},
        "help": {"text": f"{finding.fix}. Source: {finding.source}"},
        "defaultConfiguration": {"level": finding.level},
    }


def _result(finding: Finding, index: int) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": _artifact(finding.place.file)}}
    if finding.place.line:
        location["physicalLocation"]["region"] = {"startLine": finding.place.line}
    if finding.place.key:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.place.key}]
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.level,
        "message": {"text": f"{finding.reason}. Fix: {finding.fix}{'' if finding.fix.endswith('?') else '.'}"},
        "locations": [location],
    }


def _artifact(file: Path) -> dict[str, str]:
    whole = file.absolute()
    if whole.is_relative_to(Path.cwd()):
        return {"uri": quote(whole.relative_to(Path.cwd()).as_posix()), "uriBaseId": ROOT}
    return {"uri": f"file://{quote(whole.as_posix())}"}
