"""The content-addressed store: one folder a result, named by its key, published whole or not at all.

    ROOT/results/<stage>/<key>/manifest.json, out/...   finished results, never written again
    ROOT/work/<stage>/<key>[.<attempt>]/                results being made; the next attempt clears or resumes them
    ROOT/locks/<stage>-<key>.lock                       saves double work; correctness does not hang on it
    ROOT/latest/<stage>                                 link to the result used last, for people

Publishing: every file and folder is fsynced, then one rename of the directory makes the result appear
(the protocol of DeepGEMM's kernel cache). If another process was first, its result stays and ours is dropped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.core.errors import StageError
from pipeline.core.jsonio import canonical, fsync_path, fsync_tree, read_json, write_json

__all__ = ["Attempt", "Result", "Store", "describe_tree", "tree_digest"]

LOCK_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class Result:
    """A published result."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def out(self) -> Path:
        """Folder of the stage's own files."""
        return self.folder / "out"

    @property
    def key(self) -> str:
        return self.manifest["key"]

    def digest(self, path: str = "") -> str:
        """Digest of the outputs, or of the part of them at `path` (a file or a folder)."""
        return tree_digest(self.manifest["outputs"], path)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A result in the making. Nothing outside this folder is written before `Store.publish`."""

    stage: str
    key: str
    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"


class Store:
    """A folder of results on one file system."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def find(self, stage: str, key: str) -> Result | None:
        """The result of `key` if it is there and whole (every file present, with its size, unchanged since)."""
        result = self._load(self.root / "results" / stage / key)
        return result if result and _intact(result) else None

    def all(self, stage: str) -> list[Result]:
        """Every published result of a stage, newest first."""
        folders = sorted((self.root / "results" / stage).glob("*"), key=lambda folder: folder.stat().st_mtime_ns)
        return [result for folder in reversed(folders) if (result := self._load(folder))]

    @contextmanager
    def attempt(self, stage: str, key: str, *, resumable: bool) -> Iterator[Attempt]:
        """Hold the key's lock and a folder to work in.

        What an earlier attempt left is kept for a resumable stage and removed for the others, which get a fresh
        folder name each time, so that a straggler of a killed attempt can never write into this one.
        """
        work = self.root / "work" / stage
        work.mkdir(parents=True, exist_ok=True)
        with self._lock(stage, key):
            for stale in work.glob(f"{key}*"):
                if not (resumable and stale.name == key):
                    shutil.rmtree(stale, ignore_errors=True)
            attempt = Attempt(stage, key, work / (key if resumable else f"{key}.{uuid.uuid4().hex[:8]}"))
            shutil.rmtree(attempt.tmp, ignore_errors=True)
            attempt.out.mkdir(parents=True, exist_ok=True)
            attempt.tmp.mkdir()
            yield attempt

    def publish(self, attempt: Attempt, manifest: dict[str, Any]) -> Result:
        """Make the attempt visible under its key, whole, or keep the one that was first."""
        shutil.rmtree(attempt.tmp, ignore_errors=True)
        write_json(attempt.folder / "manifest.json", manifest)
        fsync_tree(attempt.folder)
        target = self.root / "results" / attempt.stage / attempt.key
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not self.find(attempt.stage, attempt.key):
            self._set_aside(target)
        try:
            os.rename(attempt.folder, target)  # atomic; refused when another process published first
        except OSError:
            if not (found := self.find(attempt.stage, attempt.key)):
                raise
            shutil.rmtree(attempt.folder, ignore_errors=True)
            return found
        fsync_path(target.parent)
        return Result(target, manifest)

    def point(self, result: Result) -> None:
        """Let ROOT/latest/<stage> name this result."""
        latest = self.root / "latest"
        latest.mkdir(parents=True, exist_ok=True)
        link, target = latest / result.manifest["stage"], os.path.relpath(result.out, latest)
        if link.is_symlink() and os.readlink(link) == target:
            return
        partial = latest / f".{link.name}.{os.getpid()}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(target)
        os.replace(partial, link)

    def _load(self, folder: Path) -> Result | None:
        try:
            return Result(folder, read_json(folder / "manifest.json"))
        except (OSError, ValueError):
            return None

    def _set_aside(self, target: Path) -> None:
        """A damaged result makes room; it is kept under work/ until the next attempt clears it."""
        os.rename(target, self.root / "work" / target.parent.name / f"{target.name}.damaged-{uuid.uuid4().hex[:8]}")

    @contextmanager
    def _lock(self, stage: str, key: str) -> Iterator[None]:
        path = self.root / "locks" / f"{stage}-{key[:16]}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(path, timeout=LOCK_SECONDS):
                yield
        except Timeout as error:
            raise StageError(
                f"another process has been building {stage} for a day: look for it, or remove {path.name} in locks/."
            ) from error


def describe_tree(folder: Path) -> dict[str, dict[str, Any]]:
    """{relative path: {sha256, size}} of every file below `folder`, sorted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _describe(path) for path in files}


def tree_digest(outputs: dict[str, dict[str, Any]], path: str = "") -> str:
    """SHA-256 over names, sizes and content digests of the outputs at or below `path`."""
    chosen = {name: entry for name, entry in outputs.items() if not path or name == path or name.startswith(path + "/")}
    if not chosen:
        raise AssertionError(f"no output at {path}")
    return hashlib.sha256(canonical(chosen)).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}


def _intact(result: Result) -> bool:
    """Results are never written again, so only a file younger than its manifest has to be read and hashed."""
    published = (result.folder / "manifest.json").stat().st_mtime_ns
    return all(_unchanged(result.out / name, entry, published) for name, entry in result.manifest["outputs"].items())


def _unchanged(path: Path, entry: dict[str, Any], published: int) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_size == entry["size"] and (found.st_mtime_ns <= published or _describe(path) == entry)
