"""What each version line of TensorRT-LLM accepts, as data: a new release is a new file, which lists what differs from another.

`1.0.yaml` explains the rows. A line that `extends` another holds its tables with its own rows over them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.fields import Field, field_of
from pipeline.engines.trtllm.tables import read_table, table_names

__all__ = [
    "Union", "VersionLine", "known_lines", "last_with_tensorrt", "later_lines", "release_order", "require_pytorch", "version_line",
]  # fmt: skip

Rows = Mapping[str, Any]
_MERGED = ("fields", "sections", "unions", "environment_defaults", "aliases", "ignored")
"""Tables of which a line inherits what it does not change; the others say what changed in it alone."""


@dataclass(frozen=True, slots=True)
class Union:
    """A table whose keys depend on one of them, such as speculative_config on decoding_type."""

    by: str
    common: str
    """Section whose keys every kind has."""
    kinds: Mapping[str, Any]
    """Value of `by` -> section."""
    default: str | None = None


@dataclass(frozen=True, kw_only=True)
class VersionLine:
    """One file, with what it extends."""

    line: str
    triton_containers: list[str]
    """Tags of Triton's container that hold this line."""
    mtp_key: str
    """Name of the draft length in speculative_config."""
    tensorrt_backend: str
    """always, never, or the last release that has it."""
    environment_defaults: dict[str, str]
    """Variables whose value is that already without being set."""
    rows: Rows = field(repr=False)
    """Tables `fields`, `sections`, `unions` as they are written."""
    aliases: Mapping[str, str]
    """Old path -> path, where the old one is still accepted."""
    ignored: Mapping[str, str]
    """Path -> why it has no effect; `path@KIND` holds for one kind of a union."""
    moved: Mapping[str, str]
    """What the line before called a path -> what this one calls it."""
    gone: Mapping[str, str]
    """What the line before had -> what replaces it, or why it went."""
    values: Mapping[str, Mapping[str, str]]
    """Path -> {value that the line before had: what this one calls it}."""
    replaced: Mapping[str, Mapping[str, str]]
    """The same for values that are gone: {value: what does its work now}."""
    complete: bool
    """Whether every argument of the line is here."""

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Every argument of the top level."""
        return self._read(self.rows["fields"])

    @cached_property
    def unions(self) -> dict[str, Union]:
        """By name."""
        return {name: Union(**table) for name, table in self.rows["unions"].items()}

    def section(self, name: str, table: Any = None) -> dict[str, Field]:
        """Arguments of a section; of a union, those of the kind that `table` is (all kinds' where it says none)."""
        union = self.unions.get(name)
        if union is None:
            return self._section(name)
        kind = table.get(union.by, union.default) if isinstance(table, Mapping) else None
        found = {union.by: Field(("null",) if union.default else (), tuple(union.kinds), default=union.default)}
        chosen = [kind] if isinstance(kind, str) and kind in union.kinds else union.kinds
        for item in (union.common, *(union.kinds[key] for key in chosen)):
            found = {**self._section(item), **found} if item else found
        return found

    def kind(self, name: str | None, table: Mapping[str, Any]) -> str:
        """Which kind of the union `name` a table is; empty where that is none."""
        union = self.unions.get(name or "")
        return str(table.get(union.by, union.default)) if union else ""

    @cached_property
    def known(self) -> dict[str, Field]:
        """Every argument by its dotted path; what kinds of a union share, once."""
        found: dict[str, Field] = {}
        waiting = [("", self.fields)]
        for prefix, fields in waiting:  # which grows
            for name, item in fields.items():
                path = f"{prefix}{name}"
                if path not in found:
                    found[path] = item
                    waiting += [(f"{path}.", self.section(item.section))] if item.section else []
        return found

    @cache  # noqa: B019 - lines live as long as the process
    def _section(self, name: str) -> dict[str, Field]:
        return self._read(self.rows["sections"][name])

    def _read(self, rows: Rows) -> dict[str, Field]:
        names = {**self.rows["sections"], **self.rows["unions"]}
        return {name: field_of(row, names) for name, row in rows.items()}

    def __hash__(self) -> int:
        return hash(self.line)


@cache
def known_lines() -> tuple[str, ...]:
    """All version lines, oldest first."""
    return tuple(sorted(table_names(__name__), key=release_order))


def later_lines(line: str) -> tuple[str, ...]:
    """The lines after `line`, oldest first."""
    return tuple(other for other in known_lines() if release_order(other) > release_order(line))


@cache
def version_line(version: str) -> VersionLine:
    """The line of `version`: "1.2", or a release such as "1.2.1" or "1.3.0rc20"."""
    line = ".".join(version.split(".")[:2])
    if line not in known_lines():
        raise ConfigError(
            f"engine.trtllm.version={version} is not known: choose one of {', '.join(known_lines())}, or add "
            f"pipeline/engines/trtllm/versions/{line}.yaml."
        )
    return _line(line)


@cache
def last_with_tensorrt() -> str:
    """The last release that has the TensorRT backend."""
    found = (version_line(name).tensorrt_backend for name in known_lines())
    return next(last for last in found if last not in ("always", "never"))


def require_pytorch(version: str) -> None:
    """For engine.trtllm.backend=tensorrt.

    Raises:
        ConfigError: always, with what became of that backend in `version`.
    """
    last = version_line(version).tensorrt_backend
    release = version.count(".") > 1  # of a line, the newest is meant
    there = last == "always" or (last != "never" and release and release_order(version) <= release_order(last))
    gone = "is gone" if last in ("always", "never") else f"is gone after {last}"
    what = (
        "has it, for engines of trtllm-build, into which no script converts a DeepSeek-R1 checkpoint (TensorRT-LLM issue 9981)"
        if there
        else f"has none: it {gone} (legacy/tensorrt-backend-removal.md)"
    )
    raise ConfigError(f"engine.trtllm.backend=tensorrt: TensorRT-LLM {version} {what}. Set engine.trtllm.backend=pytorch.")


@cache
def _line(line: str) -> VersionLine:
    tables = _tables(line)
    rows = {name: tables.pop(name) for name in ("fields", "sections", "unions")}
    return VersionLine(rows=rows, **tables)


def _tables(line: str) -> dict[str, Any]:
    """A file over the one that it extends."""
    own = dict(read_table(__name__, line))
    base = _tables(own.pop("extends")) if "extends" in own else {}
    changes: dict[str, Any] = {"moved": {}, "gone": {}, "values": {}, "replaced": {}, "complete": True}
    changes |= {name: _over(base.get(name, {}), own.pop(name, {})) for name in _MERGED}
    return {**base, **changes, **own}


def _over(base: Any, own: Any) -> Any:
    """`own` over `base`, tables merged; null takes a row away."""
    if not isinstance(base, Mapping) or not isinstance(own, Mapping):
        return own
    merged = {**base, **{key: _over(base.get(key), value) for key, value in own.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def release_order(version: str) -> tuple[int, ...]:
    """Sorts versions: 1.2, 1.3.0rc9, 1.3.0rc20, 1.3.0, 1.4. What is no version sorts first."""
    found = re.match(r"([\d.]*)(?:(rc|\.?dev)(\d+))?", version)
    assert found is not None  # the pattern takes any text
    parts = [int(part) for part in found[1].split(".") if part]
    return (*[*parts, 0, 0, 0][:3], 0 if found[2] else 1, int(found[3] or 0))
