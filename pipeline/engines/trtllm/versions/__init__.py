"""What each version line of TensorRT-LLM accepts, as data: a new release is a new file in this folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from pipeline.core.errors import ConfigError

__all__ = ["VersionLine", "known_lines", "version_line"]

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLine:
    """One file."""

    line: str
    triton_containers: list[str]
    """Tags of Triton's container that hold this line."""
    mtp_key: str
    """Name of the draft length in speculative_config."""
    environment_defaults: dict[str, str]
    """Variables whose value is that already without being set."""
    fields: Fields
    """Argument -> int, count, bool, fraction, a list of allowed values, or nested fields."""


@cache
def known_lines() -> tuple[str, ...]:
    """All version lines, oldest first."""
    names = (file.name for file in files(__name__).iterdir() if file.name.endswith(".yaml"))
    return tuple(sorted((name.removesuffix(".yaml") for name in names), key=_order))


@cache
def version_line(version: str) -> VersionLine:
    """The line of `version` ("1.2" or a release such as "1.2.1")."""
    line = ".".join(version.split(".")[:2])
    if line not in known_lines():
        raise ConfigError(
            f"engine.trtllm.version={version} is not known: choose one of {', '.join(known_lines())}, or add "
            f"pipeline/engines/trtllm/versions/{line}.yaml."
        )
    return VersionLine(**yaml.safe_load(files(__name__).joinpath(f"{line}.yaml").read_text(encoding="utf-8")))


def _order(line: str) -> tuple[int, ...]:
    return tuple(int(part) for part in line.split("."))
