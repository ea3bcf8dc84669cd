"""The content-addressed store: one folder a result, named by its key, published whole or not at all.

    ROOT/results/<stage>/<key>/manifest.json, out/...   finished results, never written again
    ROOT/work/<stage>/<key>[.<attempt>]/out, state, tmp results being made; the next attempt clears or resumes them
    ROOT/locks/<stage>-<key>.lock                       saves double work; correctness does not hang on it (`lock.py`)
    ROOT/latest/<stage>                                 link to the result used last, for people

Publishing: every file and folder is fsynced, then one rename of the directory makes the result appear
(the protocol of DeepGEMM's kernel cache). If another process was first, its result stays and ours is dropped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.core.filehash import Facts, describe_file, load_digests, trusted
from pipeline.core.jsonio import canonical, fsync_path, fsync_tree, read_json, write_json
from pipeline.core.lock import held

__all__ = ["SCHEMA", "Attempt", "Result", "Store", "describe_tree", "tree_digest"]

SCHEMA = 1
"""Of keys and manifests; raised when either means something else."""

SMALL = 2**20
"""Files up to here are hashed whenever a result is looked up; a larger one only when it is younger than its manifest."""


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

    @property
    def state(self) -> Path:
        """What a resumable stage keeps between attempts (`StageContext.state`)."""
        return self.folder / "state"

    def discard(self) -> None:
        """Nothing will come of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def outputs(self) -> dict[str, Facts]:
        """{relative path: digest and size}; files that the stage hashed while it wrote them are not read again."""
        return describe_tree(self.out, load_digests(self.state / "digests.json"))


class Store:
    """A folder of results on one file system."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def prepare(self) -> None:
        """Make the root, or say why it cannot hold results."""
        try:
            (self.root / "work").mkdir(parents=True, exist_ok=True)
            probe = self.root / "work" / f".probe.{uuid.uuid4().hex[:8]}"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise ConfigError(
                f"store.root={self.root} cannot hold results ({error.strerror}): name another folder as store.root=DIR."
            ) from error

    def find(self, stage: str, key: str) -> Result | None:
        """The result of `key` if it is there and whole (every file present, with its size, unchanged since)."""
        result = self._load(self.root / "results" / stage / key)
        return result if result and _intact(result) else None

    def all(self, stage: str) -> list[Result]:
        """Every published result of a stage, newest first."""
        folders = sorted((self.root / "results" / stage).glob("*"), key=lambda folder: folder.lstat().st_mtime_ns)
        return [result for folder in reversed(folders) if (result := self._load(folder))]

    def foreign(self, stage: str, key: str) -> bool:
        """Whether something that is no result of ours lies where the result of `key` belongs."""
        folder = self.root / "results" / stage / key
        return folder.exists() and self._load(folder) is None

    @contextmanager
    def attempt(
        self, stage: str, key: str, *, resumable: bool, say: Callable[[str], None] = lambda text: None
    ) -> Iterator[Attempt]:
        """Hold the key's lock and a folder to work in. `say` hears who holds the lock, if this has to wait.

        What an earlier attempt left is kept for a resumable stage and removed for the others, which get a fresh
        folder name each time, so that a straggler of a killed attempt can never write into this one.
        """
        work = self.root / "work" / stage
        work.mkdir(parents=True, exist_ok=True)
        with held(self.lock_file(stage, key), stage, say):
            for stale in work.glob(f"{key}*"):
                if not (resumable and stale.name == key):
                    shutil.rmtree(stale, ignore_errors=True)
            attempt = Attempt(stage, key, work / (key if resumable else f"{key}.{uuid.uuid4().hex[:8]}"))
            shutil.rmtree(attempt.tmp, ignore_errors=True)
            attempt.out.mkdir(parents=True, exist_ok=True)
            attempt.state.mkdir(exist_ok=True)
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
            attempt.discard()
            return found
        fsync_path(target.parent)
        shutil.rmtree(target / attempt.state.name, ignore_errors=True)  # last: till here a killed run could go on from it
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
        """None for what is absent, and for a manifest that this code did not write: it is treated as absent."""
        try:
            manifest = read_json(folder / "manifest.json")
        except (OSError, ValueError, RecursionError):
            return None
        return Result(folder, manifest) if _is_manifest(manifest, folder) else None

    def _set_aside(self, target: Path) -> None:
        """A damaged result makes room; it is kept under work/ until the next attempt clears it."""
        os.rename(target, self.root / "work" / target.parent.name / f"{target.name}.damaged-{uuid.uuid4().hex[:8]}")

    def lock_file(self, stage: str, key: str) -> Path:
        """The file whose lock a process holds while it makes this result."""
        return self.root / "locks" / f"{stage}-{key[:16]}.lock"


def describe_tree(folder: Path, digests: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Facts]:
    """{relative path: digest and size} of every file below `folder`, sorted; `digests` are records still to be checked."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: trusted(path, (digests or {}).get(name, {})) or describe_file(path) for name, path in files.items()}


def tree_digest(outputs: dict[str, dict[str, Any]], path: str = "") -> str:
    """SHA-256 over names, sizes and content digests of the outputs at or below `path`."""
    chosen = {name: entry for name, entry in outputs.items() if not path or name == path or name.startswith(path + "/")}
    if not chosen:
        raise AssertionError(f"no output at {path}")
    return hashlib.sha256(canonical(chosen)).hexdigest()


def _is_manifest(value: Any, folder: Path) -> bool:
    """Whether this is a manifest of this place: a table with its own key, its parts and its outputs."""
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        return False
    outputs = value.get("outputs")
    return (
        (value.get("stage"), value.get("key")) == (folder.parent.name, folder.name)
        and isinstance(value.get("parts"), dict)
        and isinstance(outputs, dict)
        and all(isinstance(entry, dict) and isinstance(entry.get("size"), int) for entry in outputs.values())
    )


def _intact(result: Result) -> bool:
    """Results are never written again, so a large file has to be read and hashed only where it is younger than its manifest."""
    published = (result.folder / "manifest.json").stat().st_mtime_ns
    return all(_unchanged(result.out / name, entry, published) for name, entry in result.manifest["outputs"].items())


def _unchanged(path: Path, entry: dict[str, Any], published: int) -> bool:
    try:
        found = path.stat()
        if found.st_size != entry["size"]:
            return False
        return (found.st_size > SMALL and found.st_mtime_ns <= published) or describe_file(path) == entry
    except OSError:
        return False
