"""Which Triton release holds which server, engine, Python, CUDA and driver, and which fields of config.pbtxt it takes.

The data is `releases.yaml`; `target` is the release that a configuration is packaged for (`serve.triton`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.core.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from pipeline.config.schema import Config

__all__ = [
    "Image",
    "Release",
    "field_release",
    "holding",
    "python_backend",
    "refused_fields",
    "release",
    "releases",
    "takes",
    "target",
]

CONTAINERS = {"trtllm": "trtllm-python-py3", "vllm": "vllm-python-py3"}
"""Engine kind -> suffix of its container's tag."""


@dataclass(frozen=True, slots=True)
class Image:
    """One container of a release."""

    container: str
    """Name and tag, without a registry: tritonserver:25.12-trtllm-python-py3."""
    version: str
    """Of the engine."""
    python: str
    cuda: str
    driver: str
    """CUDA driver that it was built for."""

    def holds(self, version: str) -> bool:
        """True if `version` is the engine's, or a line of it: 1.2 holds for 1.2.1."""
        return f"{self.version}.".startswith(f"{version}.")


@dataclass(frozen=True, slots=True)
class Release:
    """One release of Triton."""

    tag: str
    server: str
    """Version of tritonserver."""
    images: dict[str, Image]
    """Engine kind -> its container; without those that are not published."""


@cache
def releases() -> tuple[Release, ...]:
    """All known releases, oldest first."""
    found = []
    for tag, row in _table()["releases"].items():
        images = {
            kind: Image(f"tritonserver:{tag}-{suffix}", *map(str, row[kind])) for kind, suffix in CONTAINERS.items() if row[kind]
        }
        found.append(Release(tag, str(row["server"]), images))
    return tuple(found)


def release(tag: str) -> Release:
    """The release with this tag."""
    known = {item.tag: item for item in releases()}
    tag = f"{tag:0<5}"  # Guard: an unquoted 25.10 arrives as the number 25.1
    if tag not in known:
        raise ConfigError(
            f"serve.triton={tag} is not a known release of Triton: choose one of {', '.join(known)}, or add it to "
            "pipeline/triton/releases/releases.yaml."
        )
    return known[tag]


def holding(engine: str, version: str) -> tuple[Release, ...]:
    """Releases whose container of `engine` (trtllm, vllm) holds `version` ("1.2" or "1.2.1"), oldest first."""
    return tuple(item for item in releases() if engine in item.images and item.images[engine].holds(version))


def target(config: Config) -> Release | None:
    """The release to package for: serve.triton, else the newest that holds the engine's version; None if none does.

    The embedded engine needs no container of its own: without serve.triton it is packaged for the oldest release, whose
    config fields every later one takes.

    Raises:
        ConfigError: serve.triton is unknown, or its container does not hold the engine in the configured version.
    """
    kind, wanted = config.engine.kind, config.serve.triton
    if kind not in CONTAINERS:
        return release(wanted) if wanted else releases()[0]
    version = getattr(config.engine, kind).version
    fitting = holding(kind, version)
    if wanted is None:
        return fitting[-1] if fitting else None
    chosen = release(wanted)
    if chosen not in fitting:
        raise ConfigError(_mismatch(chosen, kind, version, fitting))
    return chosen


def takes(item: Release | None, field: str) -> bool:
    """Whether the server of a release takes a config field, by its dotted path; None: whether every server does."""
    since = field_release(field)
    return since is None or (item is not None and _order(item.tag) >= _order(since))


def refused_fields(config: Message, tag: str) -> list[str]:
    """Fields of a config.pbtxt that the server of release `tag` does not know; it would refuse the whole file."""
    item = release(tag)
    return [path for path in _paths(config) if not takes(item, path)]


def field_release(path: str) -> str | None:
    """The first release that takes a config field, by its dotted path; None for those that all take."""
    since: str | None = _table()["fields"].get(path)
    return since


def python_backend() -> dict[str, Any]:
    """What model code may count on: `numpy` (a version range) and `logger` (names of pb_utils.Logger)."""
    return dict(_table()["python_backend"])


def _mismatch(chosen: Release, kind: str, version: str, fitting: tuple[Release, ...]) -> str:
    held = f"holds {kind} {chosen.images[kind].version}" if kind in chosen.images else f"has no {kind} container"
    others = ", ".join(item.tag for item in fitting)
    way_out = f"set serve.triton to one of {others}" if fitting else f"no release holds {version} yet: choose another version"
    return f"serve.triton={chosen.tag} {held}, but engine.{kind}.version={version}: {way_out}."


def _paths(message: Message, prefix: str = "") -> Iterator[str]:
    for descriptor, value in message.ListFields():
        yield f"{prefix}{descriptor.name}"
        if descriptor.message_type and not descriptor.is_repeated:
            yield from _paths(value, f"{prefix}{descriptor.name}.")


def _order(tag: str) -> tuple[int, ...]:
    return tuple(int(part) for part in tag.split("."))


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(files(__name__).joinpath("releases.yaml").read_text(encoding="utf-8"))
    return table
