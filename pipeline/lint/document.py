"""YAML and JSON files that somebody else wrote: read within limits, with the line of every key.

Nothing here is trusted. A file may be binary, endless, nested without end or hold itself through anchors; each ends in a
sentence. Keys that are given twice are kept, since loaders silently take the last one.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.errors import ConfigError
from pipeline.lint.base import Place

__all__ = ["MOST_BYTES", "Document", "read_document", "read_text", "value_at"]

MOST_BYTES, MOST_VALUES, DEEPEST = 1_000_000, 50_000, 40
"""Of one file; published ones have 20 kB, 100 values (17,600 with the placement of 61 x 288 experts) and 4 levels."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Document:
    """A file whose root is a table."""

    file: Path
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    """Key path, with dots and [index], -> line, from 1."""
    twice: tuple[str, ...] = ()
    """Key paths that are given more than once."""

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path; `default` where a part is absent or null."""
        value = value_at(self.values, path)
        return default if value is None else value

    def at(self, path: str) -> Place:
        """Where a key stands; the nearest table above it where it is absent."""
        near = path
        while near and near not in self.lines:
            near = near.rpartition(".")[0]
        return Place(self.file, self.lines.get(near) if near or self.values else None, path)

    def part(self, key: str) -> Document:
        """The table below `key`, with places in the same file; an empty one where there is none."""
        inner, prefix = self.values.get(key), f"{key}."
        lines = {"": self.lines[key]} if key in self.lines else {}
        lines |= {path.removeprefix(prefix): line for path, line in self.lines.items() if path.startswith(prefix)}
        twice = tuple(path.removeprefix(prefix) for path in self.twice if path.startswith(prefix))
        return Document(self.file, inner if isinstance(inner, dict) else {}, lines, twice)


def value_at(table: Any, path: str) -> Any:
    """The value at a dotted path; None where a part is absent or null."""
    for part in path.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None
    return table


def read_text(file: Path, most: int = MOST_BYTES) -> str:
    """The text of a small regular file.

    Raises:
        ConfigError: if it is none, cannot be read, is longer than `most` bytes, or is not text.
    """
    try:
        info = file.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"{file} is not a file that can be read through: name a file or a folder.")
        if info.st_size > most:
            raise ConfigError(f"{file} has {info.st_size:,} bytes, more than the {most:,} of a configuration: name a smaller one.")
        with file.open("rb") as stream:
            raw = stream.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    if b"\0" in raw or len(raw) > most:
        raise ConfigError(f"{file} is binary, or grows while it is read: name a text file.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 at byte {error.start:,}: save it as UTF-8.") from error


def read_document(file: Path) -> Document:
    """A YAML or JSON table (JSON is YAML, but for tabs).

    Raises:
        ConfigError: if the file cannot be read, is no YAML, is beyond the limits, or its root is no table.
    """
    text = read_text(file)
    if file.suffix == ".json":
        text = text.replace("\t", "  ")
    try:
        _require_shallow(text, file)
        node = yaml.compose(text, Loader=LOADER)
        builder = _Builder(file)
        values = builder.value(node, "") if node is not None else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} cannot be read as YAML: {_short(error)}.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        what = f"a {type(values).__name__}" if not isinstance(values, dict) else "numbers for keys"
        raise ConfigError(f"{file} holds {what}, not a table of settings.")
    return Document(file, values, builder.lines, tuple(builder.twice))


def _require_shallow(text: str, file: Path) -> None:
    """Before anything recursive sees the file."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=LOADER)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST or count > 2 * MOST_VALUES:
            raise ConfigError(f"{file} has more than {DEEPEST} levels or {MOST_VALUES:,} values: settings are a short table.")


class _Builder:
    """Values of a tree of nodes, within the limits, with lines."""

    def __init__(self, file: Path) -> None:
        self._file, self._left = file, MOST_VALUES
        self._scalars = yaml.SafeLoader("")
        self.lines: dict[str, int] = {}
        self.twice: list[str] = []

    def value(self, node: yaml.Node, path: str, depth: int = 0) -> Any:
        """Of `node`, which stands at `path`."""
        self._left -= 1
        if self._left < 0 or depth > DEEPEST:
            raise ConfigError(f"{self._file} holds more than {MOST_VALUES:,} values, or itself, through anchors: write them out.")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._table(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _table(self, node: yaml.MappingNode, path: str, depth: int) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for key, item in node.value:
            if key.tag == MERGE:
                for table in self._merged(item, path, depth):
                    merged = table | merged
                continue
            name = self._key(key)
            where = f"{path}.{name}" if path else str(name)
            if name in own:
                self.twice.append(where)
            self.lines[where] = key.start_mark.line + 1
            own[name] = self.value(item, where, depth + 1)
        return merged | own

    def _merged(self, node: yaml.Node, path: str, depth: int) -> Iterator[dict[Any, Any]]:
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(item, yaml.MappingNode):
                raise ConfigError(f"{self._file}:{node.start_mark.line + 1}: << merges tables only.")
            yield self.value(item, path, depth + 1)

    def _key(self, node: yaml.Node) -> str | int:
        """Names, and the numbers of layers or batch sizes that some tables are keyed by."""
        name = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(name, (str, int)) or isinstance(name, bool):
            shown = repr(name) if isinstance(node, yaml.ScalarNode) else "a table or list"
            raise ConfigError(f"{self._file}:{node.start_mark.line + 1}: the key {shown} is no name: keys are names of settings.")
        return name

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise ConfigError(f"{self._file}:{node.start_mark.line + 1}: {_short(error)}.") from error


def _short(error: Exception) -> str:
    """The first lines of a parser's message, as one."""
    said = str(error).replace('in "<unicode string>", ', "")
    return "; ".join(line.strip() for line in said.splitlines()[:3])[:300].rstrip(".") or type(error).__name__
