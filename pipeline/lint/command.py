"""The arguments of `lint PATH... [version=1.2] [triton=25.12] [hw=b200 [model=deepseek_r1] [SETTING=VALUE ...]]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.core.events import Console

if TYPE_CHECKING:
    from pipeline.cli import Options
    from pipeline.lint.base import Finding

__all__ = ["lint_command"]


def lint_command(options: Options, console: Console) -> int:
    """Lint paths, or show the rules; 4 where an error was found."""
    if options.rules:
        return _rules(options, console)
    paths = [Path(word).expanduser() for word in options.overrides if "=" not in word or Path(word).exists()]
    if not paths:
        raise ConfigError(
            "lint takes files or folders: LLM arguments, checkpoints, Triton repositories; lint --rules lists the rules."
        )
    from pipeline.lint.report import lint
    from pipeline.lint.target import target_of

    settings = [word for word in options.overrides if "=" in word and not Path(word).exists()]
    report = lint(paths, target_of(settings, options.config_dir))
    if options.sarif is not None:
        _write(options.sarif, report.findings)
    for line in report.lines() if not options.as_json else ():
        console.line(line)
    if options.as_json:
        for finding in report.findings:
            console.result({"command": "lint", "finding": finding.plain()})
        console.result({"command": "lint", **report.plain()})
    return report.exit_code


def _rules(options: Options, console: Console) -> int:
    from dataclasses import asdict

    from pipeline.lint import catalogue

    if options.overrides:
        raise ConfigError(f"lint --rules takes no paths or settings, but got {options.overrides[0]}.")
    for line in catalogue.lines() if not options.as_json else ():
        console.line(line)
    if options.as_json:
        console.result(
            {"command": "lint", "rules": [asdict(row) for row in catalogue.rows()], "not_static": catalogue.not_static()}
        )
    return 0


def _write(file: Path, findings: tuple[Finding, ...]) -> None:
    from pipeline.core.jsonio import write_json
    from pipeline.lint.sarif import sarif

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, sarif(findings))
    except OSError as error:
        raise ConfigError(f"--sarif {file} cannot be written: {error.strerror or error}.") from error
