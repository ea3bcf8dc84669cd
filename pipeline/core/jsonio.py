"""JSON that is the same bytes for the same content, and files that are whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["canonical", "fsync_path", "fsync_tree", "read_json", "write_atomic", "write_json"]


def canonical(value: Any) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def read_json(path: Path) -> Any:
    """Parsed content of a UTF-8 JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` readably and reproducibly (sorted keys); the file is whole or absent."""
    write_atomic(path, (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Write beside `path`, fsync, rename: a reader sees the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def fsync_tree(folder: Path) -> None:
    """Flush every file, then every folder from the leaves up, so that a rename publishes real bytes."""
    for base, _, files in os.walk(folder, topdown=False):
        for path in [*(os.path.join(base, name) for name in files), base]:
            if not os.path.islink(path):
                fsync_path(path)


def fsync_path(path: str | Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
