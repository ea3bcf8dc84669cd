"""A Triton model repository as rules see it, whoever wrote it: every model with its config, versions and settings."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from pipeline.core.errors import ConfigError
from pipeline.lint.base import Place
from pipeline.lint.document import MOST_BYTES, Document, read_document, read_text
from pipeline.lint.names import CONFIG, ENGINE_ARGS, SETTINGS
from pipeline.lint.target import Target

__all__ = ["RUN", "Model", "Placeholder", "Repository", "open_repository", "tensors"]

RUN = "seen on tritonserver 2.51.0"
"""Where most rules are known from."""

QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*')
MOST_FILES = 50
"""Of a model's code; NVIDIA's have up to 5."""
PLACEHOLDER = re.compile(r"\$\{[^}\n]*}?")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A `${...}` that nobody filled."""

    text: str
    line: int
    quoted: bool
    """Inside a string, where the parser takes it for a value."""


@dataclass(frozen=True)
class Model:
    """A folder in the root of a repository."""

    folder: Path
    target: Target
    siblings: Mapping[str, Model]
    """All models of the repository, by name."""
    text: str = ""
    """config.pbtxt without its comments; empty where there is none."""
    unreadable: str = ""
    """Why config.pbtxt cannot be read as text."""
    given: Document | None = None
    """model.json, where it was named by itself."""
    notes: dict[Path, str] = field(default_factory=dict)
    """Settings files that cannot be read, and why."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.name

    @property
    def file(self) -> Path:
        """Its config.pbtxt, there or not."""
        return self.folder / CONFIG

    @cached_property
    def _parsed(self) -> tuple[pb.ModelConfig, str]:
        if self.unreadable or not self.text:
            return pb.ModelConfig(), self.unreadable
        try:
            return text_format.Parse(self.text, pb.ModelConfig()), ""
        except (text_format.ParseError, ValueError, RecursionError) as error:
            return pb.ModelConfig(), str(error) or type(error).__name__

    @property
    def config(self) -> pb.ModelConfig:
        """Of config.pbtxt; an empty one where it cannot be parsed."""
        return self._parsed[0]

    @property
    def broken(self) -> str:
        """Why config.pbtxt cannot be parsed; empty where it can, or is not there."""
        return self._parsed[1]

    @property
    def understood(self) -> bool:
        """Whether there is a config, and it could be parsed."""
        return bool(self.text) and not self.broken

    @cached_property
    def placeholders(self) -> list[Placeholder]:
        """All that are left."""
        quoted = [found.span() for found in QUOTED.finditer(self.text)]
        return [
            Placeholder(found.group(), self.line(found.start()), any(a <= found.start() < b for a, b in quoted))
            for found in PLACEHOLDER.finditer(self.text)
        ]

    @cached_property
    def versions(self) -> list[Path]:
        """Version folders that Triton sees, oldest first: names of digits that do not begin with 0."""
        folders = [path for path in _entries(self.folder) if path.is_dir() and re.fullmatch(r"[1-9]\d*", path.name)]
        return sorted(folders, key=lambda path: int(path.name))

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Of config.pbtxt; an unfilled placeholder counts as absent, as the backends take it."""
        values = {key: value.string_value for key, value in self.config.parameters.items()}
        return {key: value for key, value in values.items() if value and not PLACEHOLDER.search(value)}

    @cached_property
    def settings(self) -> Document | None:
        """model.yaml of the newest version: TensorRT-LLM's llmapi model."""
        return self._document(SETTINGS)

    @cached_property
    def engine_args(self) -> Document | None:
        """model.json of the newest version: Triton's vLLM backend."""
        return self.given or self._document(ENGINE_ARGS)

    def _document(self, name: str) -> Document | None:
        file = self.versions[-1] / name if self.versions else None
        if file is None or not file.is_file():
            return None
        try:
            return read_document(file)
        except ConfigError as error:
            self.notes[file] = str(error)
            return None

    @cached_property
    def code(self) -> dict[Path, ast.Module | SyntaxError]:
        """Python files beside model.py of the newest version, and one folder below (a checkpoint may bring its own)."""
        found: dict[Path, ast.Module | SyntaxError] = {}
        newest = self.versions[-1:]
        files = [file for folder in newest for pattern in ("*.py", "*/*.py") for file in sorted(folder.glob(pattern))]
        for file in [file for file in files if file.parent.name != "checkpoint"][:MOST_FILES]:
            try:
                with warnings.catch_warnings(action="ignore"):
                    found[file] = ast.parse(read_text(file), str(file))
            except SyntaxError as error:
                found[file] = error
            except (ConfigError, ValueError, RecursionError, MemoryError) as error:
                found[file] = SyntaxError(str(error))
        return found

    @property
    def entry(self) -> str:
        """The file that its backend loads."""
        return self.config.default_model_filename or "model.py"

    @property
    def count(self) -> int:
        """Instances that are asked for."""
        return sum(max(1, group.count) for group in self.config.instance_group) or 1

    def line(self, position: int) -> int:
        """Of a position in `text`, from 1."""
        return self.text.count("\n", 0, position) + 1

    def at(self, pattern: str = "", key: str = "", nth: int = 0) -> Place:
        """The line of the nth match of `pattern` in config.pbtxt."""
        found = [match.start() for match in re.finditer(pattern, self.text)] if pattern else []
        line = self.line(found[min(nth, len(found) - 1)]) if found else None
        return Place(self.file if self.text else self.folder, line, key or pattern.replace("\\b", ""))

    def at_parameter(self, key: str) -> Place:
        """The line of a parameter."""
        return self.at(rf'key\s*:\s*"{re.escape(key)}"', f"parameters.{key}")

    def at_tensor(self, name: str, nth: int = 0) -> Place:
        """The line of an input or output."""
        return self.at(rf'\bname\s*:\s*"{re.escape(name)}"', name, nth)


@dataclass(frozen=True)
class Repository:
    """A folder of models."""

    folder: Path
    models: dict[str, Model]
    others: tuple[Path, ...]
    """What lies in the root and is no folder."""


def open_repository(folder: Path, target: Target) -> Repository:
    """Every folder in the root of a repository.

    Raises:
        ConfigError: if the folder cannot be listed.
    """
    models: dict[str, Model] = {}
    entries = _entries(folder)
    for entry in entries:
        if entry.is_dir():
            models[entry.name] = _open(entry, target, models)
    return Repository(folder, models, tuple(entry for entry in entries if not entry.is_dir()))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be listed: {error.strerror or error}.") from error


def _open(folder: Path, target: Target, siblings: Mapping[str, Model]) -> Model:
    file = folder / CONFIG
    if not file.is_file():
        return Model(folder, target, siblings)
    try:
        return Model(folder, target, siblings, _without_comments(_pbtxt(file)))
    except ConfigError as error:
        return Model(folder, target, siblings, text=" ", unreadable=str(error))


def _pbtxt(file: Path) -> str:
    """UTF-8, or what the server also takes: Latin-1 in comments."""
    try:
        return read_text(file)
    except ConfigError:
        raw = file.read_bytes() if file.is_file() and file.stat().st_size <= MOST_BYTES else b"\0"
        text = _without_comments(raw.decode("latin-1"))
        if "\0" in text or not text.isascii():
            raise
        return text


def _without_comments(text: str) -> str:
    return QUOTED.sub(lambda found: "" if found.group().startswith("#") else found.group(), text)


def tensors(config: Any) -> Iterator[tuple[str, Any]]:
    """(input or output, tensor) of all of them."""
    yield from (("input", tensor) for tensor in config.input)
    yield from (("output", tensor) for tensor in config.output)
