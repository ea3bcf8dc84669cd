"""Lint paths against a target: what was recognised, and every finding, errors first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError, GateError
from pipeline.lint.args import Args, args_of, disaggregated
from pipeline.lint.args import findings as args_findings
from pipeline.lint.base import ERROR, NOTE, WARNING, Finding, Place, apply
from pipeline.lint.document import Document
from pipeline.lint.names import OWN_KEYS
from pipeline.lint.recognise import Artefact, recognise
from pipeline.lint.target import Target

__all__ = ["Report", "lint"]

ORDER = (ERROR, WARNING, NOTE)
UNKNOWN = "file/not-recognised"
NAMES_OF_ROLES = {"prefill": {"ctx", "context", "prefill"}, "decode": {"gen", "generation", "decode"}}
"""Words in the name of a file or folder that tell what an instance is for."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was found."""

    linted: tuple[Artefact, ...]
    findings: tuple[Finding, ...]
    target: Target

    @property
    def exit_code(self) -> int:
        """4 where there is an error."""
        return GateError.exit_code if any(finding.level == ERROR for finding in self.findings) else 0

    def lines(self) -> Iterator[str]:
        """For people."""
        for finding in self.findings:
            yield from finding.lines()
        yield self.summary()

    def summary(self) -> str:
        """One line."""
        levels = [finding.level for finding in self.findings]
        counts = ", ".join(_plural(levels.count(level), level) for level in ORDER if level in levels) or "nothing to report"
        against = f" against {self.target}" if str(self.target) else ""
        return f"{_plural(len(self.linted), 'subject')}{against}: {counts}"

    def plain(self) -> dict[str, Any]:
        """For machines, without the findings."""
        levels = [finding.level for finding in self.findings]
        return {
            "linted": [{"kind": item.kind, "path": str(item.path)} for item in self.linted],
            "counts": {level: levels.count(level) for level in ORDER},
            "exit_code": self.exit_code,
        }


def lint(paths: Iterable[Path], target: Target) -> Report:
    """Everything about `paths`.

    Raises:
        ConfigError: if a path does not exist, or none is anything that is known.
    """
    linted: list[Artefact] = []
    found: list[Finding] = []
    refusals: list[str] = []
    for path in paths:
        try:
            artefacts = recognise(path)
        except ConfigError as error:
            if not path.exists() and not path.is_symlink():
                raise ConfigError(f"{path} does not exist: name a file or a folder.") from error
            refusals.append(str(error))
            reason, fix = str(error).rstrip("."), "mend it, or name another path"
            found.append(Finding(UNKNOWN, ERROR, Place(path), reason, fix, "pipeline/lint/recognise.py"))
            continue
        linted += artefacts
        for artefact in artefacts:
            found += _findings(artefact, _meant(artefact, target))
    found += _instances(linted, target)
    if refusals and not linted:
        raise ConfigError("\n".join(refusals))
    ordered = sorted(_unique(found), key=lambda finding: ORDER.index(finding.level))
    return Report(tuple(linted), tuple(ordered), target)


def _meant(artefact: Artefact, target: Target) -> Target:
    """What was asked for, else what the artefact was written for."""
    return replace(target, version=target.version or artefact.version, triton=target.triton or artefact.triton)


def _unique(findings: list[Finding]) -> list[Finding]:
    """A path may have been named in two ways."""
    return list(dict.fromkeys(findings))


def _findings(artefact: Artefact, target: Target) -> Iterator[Finding]:
    match artefact.kind:
        case "arguments":
            assert artefact.document is not None
            yield from _arguments(artefact.document, target, _checkpoint(artefact.path))
        case "servers":
            assert artefact.document is not None
            yield from _servers(artefact.document, target)
        case "checkpoint":
            from pipeline.lint.checkpoint import findings

            yield from findings(artefact.path, target)
        case "package":
            from pipeline.lint.package import findings as package_findings

            yield from package_findings(artefact.path)
        case "engine":
            from pipeline.lint.checkpoint import tensorrt_findings

            yield from tensorrt_findings(artefact.path, target)
        case "vllm":
            from pipeline.lint.repository import Model, vllm

            alone = Model(artefact.path.parent, target, {}, given=artefact.document)
            yield from apply(vllm.RULES, alone, artefact.path)
        case "repository":
            yield from _repository(artefact.path, None, target)
        case "model":
            yield from _repository(artefact.path.absolute().parent, artefact.path.absolute().name, target)


def _arguments(document: Document, target: Target, checkpoint: Path) -> Iterator[Finding]:
    """`checkpoint` is the one that they are for, if it is there."""
    values = {key: value for key, value in document.values.items() if key not in OWN_KEYS}
    yield from _judged(args_of(replace(document, values=values), target, _role(document)), checkpoint)


def _judged(args: Args, checkpoint: Path | None = None) -> Iterator[Finding]:
    """By the rules that need the file alone, and by those that need a machine, where one is given."""
    yield from args_findings(args)
    if args.target.config is not None:
        from pipeline.lint.checkpoint import open_contents
        from pipeline.lint.planned import findings, formats_of

        yield from findings(args, formats_of(open_contents(checkpoint)) if checkpoint and checkpoint.is_dir() else None)


def _checkpoint(file: Path) -> Path:
    """Beside the arguments, or beside the folder of instances that they are in."""
    bundle = file.absolute().parent
    return (bundle.parents[1] if bundle.parent.name == "instances" else bundle) / "checkpoint"


def _role(document: Document) -> str:
    """Of arguments that hand a cache over, by the name of their file or folder; else both."""
    if document.get("cache_transceiver_config") is None:
        return "both"
    words = set(re.split(r"[/_.-]", f"{document.file.parent.name}/{document.file.name}".lower()))
    return next((role for role, names in NAMES_OF_ROLES.items() if words & names), "both")


def _servers(document: Document, target: Target) -> Iterator[Finding]:
    servers = disaggregated.Servers(document, target)
    yield from apply(disaggregated.RULES, servers, document.file)
    yield from apply(disaggregated.PAIR_RULES, servers.sides, document.file)
    for args in servers.sides.values():
        yield from _judged(args)


def _instances(artefacts: list[Artefact], target: Target) -> Iterator[Finding]:
    """Files of LLM arguments for prompts and for tokens that lie apart, as a bundle has them, held against each other."""
    sides = {}
    for artefact in artefacts:
        role = _role(artefact.document) if artefact.document and artefact.kind == "arguments" else "both"
        names = [name for name, of in disaggregated.SECTIONS.items() if of == role]
        sides |= {name: args_of(artefact.document, _meant(artefact, target), role) for name in names if artefact.document}
    if len(sides) == len(disaggregated.SECTIONS):
        yield from apply(disaggregated.PAIR_RULES, sides, artefacts[0].path)


def _repository(folder: Path, only: str | None, target: Target) -> Iterator[Finding]:
    from pipeline.lint.repository import findings, open_repository

    opened = open_repository(folder, target)
    for finding in findings(opened, whole=only is None):
        if only is None or (folder / only) in (finding.place.file, *finding.place.file.parents):
            yield finding
    for model in opened.models.values():
        if model.settings is not None and only in (None, model.name):
            checkpoint = model.settings.file.parent / "checkpoint"
            yield from _arguments(model.settings, target, checkpoint)
            if checkpoint.is_dir():
                yield from _findings(Artefact("checkpoint", checkpoint), target)


def _plural(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
