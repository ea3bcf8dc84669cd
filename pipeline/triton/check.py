"""Static check of a model repository of ours, with the rules of `lint`: mistakes that a server reports late, badly, or never.

Triton loads an empty repository as READY, takes any folder in its root for a model, hangs when model.py is missing
and believes `string_value: "${x}"`. All of that is visible in the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError, StageError
from pipeline.lint.base import NOTE
from pipeline.lint.repository import findings, open_repository
from pipeline.lint.target import Target

if TYPE_CHECKING:
    from pipeline.triton import pbtxt

__all__ = ["check_repository"]

FORBIDDEN_NOTES = ("triton/stray-file", "triton/no-config", "triton/placeholder-unset")
"""Harmless in anyone's repository, mistakes in one that was generated."""


def check_repository(repository: Path, triton: str | None = None) -> dict[str, pbtxt.ModelConfig]:
    """The models by name; StageError with every problem found if there is one, also those of release `triton` alone."""
    try:
        opened = open_repository(repository, Target(triton=triton))
        found = [item for item in findings(opened) if item.level != NOTE or item.rule in FORBIDDEN_NOTES]
    except ConfigError as error:
        raise StageError(f"Model repository {repository} cannot be served: there is no model in it ({error})") from error
    if found:
        problems = "\n".join(f"  - {item.place.file.relative_to(repository)}: {item.reason}; {item.fix}" for item in found)
        raise StageError(f"Model repository {repository} cannot be served:\n{problems}")
    return {name: model.config for name, model in opened.models.items()}
