"""Errors a user can act on: each is a sentence with the value, the limit and the way out."""

from pathlib import Path

__all__ = ["ConfigError", "GateError", "MissingToolError", "PipelineError", "StageError"]


class PipelineError(Exception):
    """Base of every error that is shown without a traceback. `exit_code` is documented in the README."""

    exit_code = 1


class ConfigError(PipelineError, ValueError):
    """The configuration or the input asked for something that cannot be."""

    exit_code = 2


class StageError(PipelineError):
    """A stage failed while it ran; what was finished before it is kept."""

    exit_code = 3


class GateError(StageError):
    """`verify` measured an error above the configured threshold, or found damage, which no other precision mends."""

    exit_code = 4

    def __init__(self, *reasons: str, report: Path | None = None, damage: bool = False) -> None:
        super().__init__(" ".join([*reasons, *([f"The full report is {report}."] if report else [])]))
        self.reasons, self.report, self.damage = reasons, report, damage


class MissingToolError(PipelineError):
    """A tool or library that this step needs is not installed here."""

    exit_code = 5
