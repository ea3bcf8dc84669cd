"""What a path is: LLM arguments, servers of a disaggregated deployment, a Triton repository or one model of it, a checkpoint, ...

By content, not by name. A folder that holds several of them (what `engine` and `package` write, a folder of recipes) is each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.dialects import dialect, dialect_of, dialects
from pipeline.engines.trtllm.versions import known_lines, version_line
from pipeline.lint.args.disaggregated import SECTIONS
from pipeline.lint.checkpoint import is_tensorrt_engine
from pipeline.lint.document import Document, read_document
from pipeline.lint.names import CONFIG, ENGINE_ARGS, LOADED, SETTINGS

__all__ = ["Artefact", "recognise"]

YAML = (".yaml", ".yml")
MOST_ENTRIES = 10_000
"""Of a folder that is looked through; a repository has tens."""
KINDS = {
    "arguments": "LLM arguments", "servers": "servers of trtllm-serve disaggregated", "repository": "a Triton model repository",
    "model": "a model of a Triton repository", "package": "what package wrote", "checkpoint": "a checkpoint",
    "engine": "a TensorRT engine", "vllm": "vLLM's engine arguments",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Artefact:
    """One thing to lint."""

    kind: str
    """A key of KINDS."""
    path: Path
    document: Document | None = None
    """Of a file that was read to recognise it."""
    version: str | None = None
    """Of TensorRT-LLM, where what lies beside it says what it was written for."""
    triton: str | None = None
    """Release of Triton, likewise."""


def recognise(path: Path) -> list[Artefact]:
    """What `path` holds.

    Raises:
        ConfigError: if it does not exist, cannot be read, or is none of what is known.
    """
    try:
        found = list(_folder(path)) if path.is_dir() else [_file(path)]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not found:
        raise ConfigError(f"{path} holds nothing that lint knows: it takes {', '.join(KINDS.values())}, as files or folders.")
    return found


def _file(path: Path) -> Artefact:
    if path.name == CONFIG:
        return Artefact("model", path.parent)
    if path.name in (SETTINGS, ENGINE_ARGS) and (path.parents[1] / CONFIG).is_file():
        return Artefact("model", path.parents[1])
    if path.name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json") or path.suffix == ".safetensors":
        return Artefact("checkpoint", path.parent)
    document = read_document(path)
    if path.suffix == ".json" and dialect_of(document.values) == "vllm":
        return Artefact("vllm", path, document)
    if not (kind := _kind(document)):
        keys = ", ".join(list(document.values)[:3]) or "no keys"
        raise ConfigError(f"{path} is no file that lint knows ({keys}): it takes LLM arguments, such as tensor_parallel_size: 8.")
    return Artefact(kind, path, document)


def _kind(document: Document) -> str | None:
    if SECTIONS.keys() & document.values.keys():
        return "servers"
    known = _names()
    keys = {key for key in document.values if isinstance(key, str)}
    if keys & known or "triton_config" in keys or any(get_close_matches(key, known, n=1, cutoff=0.85) for key in keys):
        return "arguments"
    return None


def _names() -> set[str]:
    """Every argument of every line, and other spellings of them."""
    names = {name for line in known_lines() for name in version_line(line).fields}
    names |= {name.partition(".")[0] for other in dialects() for name in dialect(other).names}
    return names - {"model", "model_type", "dtype", "backend", "revision"}


def _folder(path: Path) -> Iterator[Artefact]:
    if (path / CONFIG).is_file():
        yield Artefact("model", path)
        return
    if is_tensorrt_engine(path):
        yield Artefact("engine", path)
        return
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        yield Artefact("checkpoint", path)
        return
    if _is_repository(path):
        yield Artefact("repository", path)
        return
    version, triton = _written_for(path)
    yield from (replace(part, version=part.version or version, triton=part.triton or triton) for part in _parts(path))


def _written_for(path: Path) -> tuple[str | None, str | None]:
    """Versions of TensorRT-LLM and Triton in what `engine` and `package` write beside their results."""
    for name, version, triton in (("engine.json", "line", ""), ("package.json", "triton.engine_version", "triton.release")):
        try:
            about = read_document(path / name)
        except ConfigError:
            continue
        if "trtllm" in (about.get("kind"), about.get("engine")):
            return about.get(version), about.get(triton) if triton else None
    return None, None


def _is_repository(path: Path) -> bool:
    models = [entry for entry in _entries(path) if entry.is_dir()]
    return any((model / CONFIG).is_file() or any((model / "1" / name).exists() for name in LOADED) for model in models)


def _parts(path: Path) -> Iterator[Artefact]:
    """YAML files beside each other, and the folders of a bundle or a package."""
    if (path / "package.json").is_file() and (path / "launch" / "instance.sh").is_file():
        yield Artefact("package", path)
    for entry in _entries(path):
        if entry.is_file() and entry.suffix in YAML:
            try:
                yield _file(entry)
            except ConfigError:
                continue
    for name in ("out", "checkpoint", "repository"):
        if (path / name).is_dir():
            yield from _folder(path / name)
    for entry in _entries(path / "instances") if (path / "instances").is_dir() else ():
        yield from _folder(entry) if entry.is_dir() else ()


def _entries(path: Path) -> list[Path]:
    entries = sorted(entry for entry, _ in zip(path.iterdir(), range(MOST_ENTRIES + 1), strict=False))
    if len(entries) > MOST_ENTRIES:
        raise ConfigError(f"{path} has more than {MOST_ENTRIES:,} entries: name the folder that is meant.")
    return entries
