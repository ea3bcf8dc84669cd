"""The content digest of a checkpoint folder, computed once.

Hashing 689 GB takes minutes, so each file's digest is remembered under its path, size, inode, modification time and change
time. The last is the kernel's own: `touch -r`, `cp -p` and `rsync -t` give a changed file its old modification time back.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

from pipeline.core.errors import ConfigError

__all__ = ["companions", "content_files", "digest", "file_sha256"]

SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
_REPLACED = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", "conversion.json")
NUM_THREADS = 4


def content_files(folder: Path) -> list[Path]:
    """The files that make up a checkpoint: weights, configs, tokenizer, held-out text, model code."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: set checkpoint= to a Hugging Face checkpoint.")
    files = (file for file in folder.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    return sorted((file for file in files if file.is_file()), key=lambda file: file.name)


def companions(folder: Path) -> list[Path]:
    """The files that a converted checkpoint takes over unchanged."""
    return [f for f in content_files(folder) if f.suffix != ".safetensors" and f.name not in _REPLACED]


def file_sha256(file: Path) -> str:
    """Of the file's bytes."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def digest(folder: Path, cache: Path | None = None) -> str:
    """Changes exactly when a content file is added, removed, renamed or altered. `cache` is a file to keep."""
    files = content_files(folder)
    known = _load(cache)
    stamps = {file: _stamp(file) for file in files}
    stale = [file for file in files if stamps[file] not in known]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        known |= dict(zip((stamps[file] for file in stale), pool.map(file_sha256, stale), strict=True))
    if stale and cache is not None:
        _save(cache, known)
    lines = (f"{file.name}\0{known[stamps[file]]}\n" for file in files)
    return sha256("".join(lines).encode()).hexdigest()


def _stamp(file: Path) -> str:
    """What must not change for a remembered digest to hold."""
    stat = file.stat()
    return f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"


def _load(cache: Path | None) -> dict[str, str]:
    """What was remembered; a damaged cache is forgotten."""
    try:
        table = json.loads(cache.read_text(encoding="utf-8")) if cache else {}
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _save(cache: Path, table: dict[str, str]) -> None:
    """Replace the cache in one step; where it cannot be written it is done without."""
    part = cache.with_name(f".{cache.name}.{os.getpid()}")
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(table, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(part, cache)
