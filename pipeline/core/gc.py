"""What of a store nobody needs any more: old results, and what stopped attempts left.

Kept are the results that `latest/` names, and of each stage the newest ones, and as many unfinished attempts that the
next run of a resumable stage would go on from. Files that are hard-linked into a kept result stay on the disk.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.core.lock import holder
from pipeline.core.store import Store

__all__ = ["Removal", "collect", "remove", "require_quiet"]


@dataclass(frozen=True, slots=True)
class Removal:
    """One folder or file that can go."""

    path: Path
    size: int
    """Bytes, hard links counted as if they were copies."""
    reason: str


def collect(store: Store, keep: int) -> list[Removal]:
    """Everything that can go, the results of each stage first, when the newest `keep` of each stage stay."""
    removals = [*_results(store, keep), *_attempts(store, keep)]
    return [*removals, *_logs(store, {removal.path for removal in removals})]


def require_quiet(store: Store) -> None:
    """Refuse while a build is at work in this store."""
    for lock in sorted((store.root / "locks").glob("*.lock")):
        if at_work := holder(lock):
            raise ConfigError(f"{at_work}, is building {lock.name.partition('-')[0]} in {store.root}: wait for it, or stop it.")


def remove(store: Store, removal: Removal) -> None:
    """Move it out of sight in one step, then delete it: no half of a result is ever found."""
    hidden = store.root / "work" / f".removed.{uuid.uuid4().hex[:8]}"
    hidden.parent.mkdir(exist_ok=True)
    os.rename(removal.path, hidden)
    if hidden.is_dir():
        shutil.rmtree(hidden)
    else:
        hidden.unlink()


def _results(store: Store, keep: int) -> Iterator[Removal]:
    used = {link.resolve().parent for link in (store.root / "latest").glob("*")}
    for folder in _folders(store.root / "results"):
        for result in store.all(folder.name)[keep:]:
            if result.folder.resolve() not in used:
                finished = result.manifest.get("finished", "an earlier build")
                yield Removal(result.folder, _size(result.folder), f"result of {finished}")


def _attempts(store: Store, keep: int) -> Iterator[Removal]:
    for hidden in sorted((store.root / "work").glob(".removed.*")):
        yield Removal(hidden, _size(hidden), "left by a gc that was stopped")
    for stage in _folders(store.root / "work"):
        attempts = sorted(_folders(stage), key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
        resumable = [folder for folder in attempts if "." not in folder.name][:keep]
        for folder in attempts:
            if folder not in resumable and holder(store.lock_file(stage.name, folder.name)) is None:
                yield Removal(folder, _size(folder), "left by an attempt that was stopped")


def _logs(store: Store, gone: set[Path]) -> Iterator[Removal]:
    """Logs of stages of which neither a result nor an attempt is left."""
    kept = {f"{path.parent.name}-{path.name[:12]}" for path in store.root.glob("[rw]*/*/*") if path not in gone}
    for log in sorted((store.root / "logs").glob("*.log")):
        if log.stem not in kept:
            yield Removal(log, _size(log), "log of a result that is gone")


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if path.is_dir() and not path.name.startswith("."))


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.lstat().st_size for file in files)
