"""A lock that says who holds it. It saves double work; correctness does not hang on it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.core.errors import StageError
from pipeline.core.jsonio import read_json, write_json

__all__ = ["held", "holder"]

LOCK_SECONDS = 24 * 3600


@contextmanager
def held(path: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock `path`. If another process does, `say` who and since when, then wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for {_owner(path)}, which is building {what}")
        _wait(lock, path, what)  # a day at most
    try:
        write_json(_card(path), {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%H:%M:%S")})
        yield
    finally:
        _card(path).unlink(missing_ok=True)
        lock.release()


def holder(path: Path) -> str | None:
    """Who holds the lock, None if nobody does."""
    if not path.exists():
        return None
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return _owner(path)
    lock.release()
    return None


def _wait(lock: FileLock, path: Path, what: str) -> None:
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout as error:
        raise StageError(
            f"{_owner(path)} has been building {what} for a day: look for it, or remove {path.name} in locks/."
        ) from error


def _card(path: Path) -> Path:
    """Beside the lock: opening a lock file empties it."""
    return path.with_suffix(".holder.json")


def _owner(path: Path) -> str:
    for _ in range(10):  # it may have the lock and not yet have written its card
        try:
            card = read_json(_card(path))
            here = "" if card["host"] == socket.gethostname() else f" on {card['host']}"
            return f"process {card['pid']}{here}, since {card['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.05)
    return "another process"
