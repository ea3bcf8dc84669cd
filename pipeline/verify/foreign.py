"""`verify DIR`: anyone's quantised checkpoint against the invariants, and against its source where that is given.

Everything that can be found is found in one run, however broken the folder is; what cannot be read is itself a finding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import native
from pipeline.checkpoint.reader import uncollected
from pipeline.checkpoint.source import Checkpoint, Entry, pair
from pipeline.core.errors import ConfigError, GateError
from pipeline.core.jsonio import write_atomic, write_json
from pipeline.core.stage import Progress
from pipeline.inspect.contents import Contents
from pipeline.models.arch import Arch
from pipeline.verify.heatmap import heatmap
from pipeline.verify.invariants import ERROR, RULES, Finding, Subject, check
from pipeline.verify.invariants.scan import scan_scales
from pipeline.verify.report import Report
from pipeline.verify.sample import choose, sentence
from pipeline.verify.weights import TensorError, compare_weights

if TYPE_CHECKING:
    from pipeline.config.schema import VerifyConfig

__all__ = ["Verdict", "verify_folder"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found."""

    folder: Path
    source: Path | None
    findings: tuple[Finding, ...]
    weights: Report | None
    """The comparison with the source."""
    num_tensors: int

    @property
    def exit_code(self) -> int:
        """4 where an error was found."""
        return GateError.exit_code if any(finding.rule.level == ERROR for finding in self.findings) else 0

    def lines(self) -> list[str]:
        """For people."""
        lines = [line for finding in self.findings for line in (*finding.lines(), "")]
        if self.weights is not None:
            lines += [*self.weights.lines(), ""]
        return [*lines, self.summary()]

    def summary(self) -> str:
        """One line."""
        levels = [finding.rule.level for finding in self.findings]
        counts = ", ".join(_count(levels.count(level), level) for level in dict.fromkeys(levels)) or "nothing to report"
        against = f" against {self.source}" if self.weights is not None else ""
        return f"{self.folder}: {self.num_tensors:,} tensors, {len(RULES)} rules{against}: {counts}"

    def plain(self) -> dict[str, Any]:
        """For machines."""
        return {
            "folder": str(self.folder),
            "source": str(self.source) if self.source else None,
            "exit_code": self.exit_code,
            "findings": [finding.plain() for finding in self.findings],
            "weights": self.weights.as_json() if self.weights else None,
        }

    def write(self, out: Path, limits: VerifyConfig) -> None:
        """report.json, report.md and, where weights were compared, heatmap.svg."""
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "report.json", self.plain())
        parts = ["# Findings", "", *(f"- {text}" for finding in self.findings for text in _markdown(finding)), ""]
        parts += [self.weights.as_markdown()] if self.weights else []
        write_atomic(out / "report.md", "\n".join(parts).encode())
        if self.weights:
            write_atomic(out / "heatmap.svg", heatmap(self.weights.errors, limits.min_sqnr_db, limits.alarm_sqnr_db).encode())


def verify_folder(folder: Path, source: Path | None, limits: VerifyConfig, progress: Progress) -> Verdict:
    """Read headers and scales of `folder`, compare its weights with `source` if there is one, and apply every rule."""
    contents, origin = _open(folder), _source(source) if source else None
    errors, chosen, total, reason = _compare(contents, origin, limits, progress) if origin else ([], [], 0, "")
    scans = scan_scales(contents, _wanted(contents, chosen, limits.sample), progress)
    found = check(Subject(contents, origin, scans, errors, limits, reason, _cut_off(origin) if origin else ()))
    weights = None
    if errors:
        failed = [finding.rule.id for finding in found if finding.rule.level == ERROR]
        weights = Report(errors=errors, compared=sentence(len(chosen), total, limits.sample), failed=failed,
                         note="Logits were not compared: verify DIR looks at weights.")  # fmt: skip
    return Verdict(folder, source, tuple(found), weights, len(contents.tensors))


@uncollected()
def _source(folder: Path) -> Contents:
    """Refused where there is nothing to compare with: a check that was asked for must not pass unmade."""
    return Contents.open(folder)


@uncollected()
def _open(folder: Path) -> Contents:
    """A folder without weights is a finding, one that is not there a refusal."""
    try:
        return Contents.open(folder)
    except ConfigError as error:
        if not folder.is_dir():
            raise
        return Contents.without_weights(folder, str(error))


def _compare(
    contents: Contents, origin: Contents, limits: VerifyConfig, progress: Progress
) -> tuple[list[TensorError], list[Entry], int, str]:
    """Errors, the entries chosen and how many there are; or the reason why there are none."""
    try:
        theirs, ours = _checkpoint(contents), _checkpoint(origin)
    except (ConfigError, TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        return [], [], 0, f"since a config.json is not understood ({str(error).rstrip('.') or type(error).__name__})"
    readable = {name: entry for name, entry in ours.entries.items() if _whole(entry)}
    common = [e for e in theirs.entries.values() if e.name in readable and readable[e.name].shape == e.shape and _whole(e)]
    chosen = choose(common, limits.sample)
    native.say_if_slow(progress.note)
    progress.start(sum(entry.num_bytes + readable[entry.name].num_bytes for entry in chosen), "B")
    errors = []
    for error, num_bytes in compare_weights(ours, chosen):
        errors.append(error)
        progress.advance(num_bytes)
    return errors, chosen, len(common), "" if errors else "since the two have no parameter in common that can be read"


@uncollected()
def _checkpoint(contents: Contents) -> Checkpoint:
    """Weights with their scales, also those that the index forgets; what cannot be paired is told by the rules."""
    arch = Arch.from_hf(contents.config)
    entries = {entry.name: entry for entry in pair(contents.tensors, arch, lambda problem: None, contents.lost)}
    return Checkpoint(contents.folder, contents.config, arch, contents.shards, contents.tensors, entries)


def _whole(entry: Entry) -> bool:
    """Whether all of its bytes are there."""
    return all(info.stop <= info.file.stat().st_size for info in entry.tensors.values())


def _cut_off(contents: Contents) -> list[str]:
    """Tensors of which bytes are missing."""
    sizes = {file: file.stat().st_size for file in contents.shards}
    return [name for name, info in contents.tensors.items() if info.stop > sizes[info.file]]


def _wanted(contents: Contents, chosen: list[Entry], sample: int) -> Collection[str]:
    """Modules whose scales are read."""
    return {entry.place.module for entry in chosen} if sample and chosen else contents.modules.keys()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _markdown(finding: Finding) -> list[str]:
    head, *rest = finding.lines()
    return [f"**{head}**: " + "; ".join(line.strip() for line in rest)]
