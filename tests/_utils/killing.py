"""Kills a conversion with SIGKILL at a chosen call to the file system, or after a time, as often as wanted.

A forked child runs the stage and publishes its result in a store, as the graph does. `os` functions that change files are
counted; at the chosen one the child dies, before it, after it, or half-way through a write. Blocks, tasks and the size
from which files are opened directly are made small, so that a small checkpoint passes through every path of a large one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.store import SCHEMA, Result, Store, describe_tree
from tests._utils.run_stage import Notes, convert, recipe

__all__ = ["Kill", "Trial", "small_steps"]

KEY = "0123456789abcdef"
CALLS = ("open", "pwrite", "write", "fsync", "replace", "rename", "ftruncate", "unlink", "mkdir", "rmdir")
RARE = ("fsync", "replace", "rename", "ftruncate", "unlink")


@dataclass(frozen=True, slots=True)
class Kill:
    """When a child dies: at its `call`-th call that changes files (of those named `name`, if it is), or after `seconds`."""

    call: int | None = None
    name: str | None = None
    seconds: float | None = None
    moment: str = "before"
    """before, after, or half (of a write)."""

    @classmethod
    def of(cls, rng: random.Random, calls: Mapping[str, int], seconds: float) -> Kill:
        """A random one for a run of about so many calls and seconds: a quarter by time, a half at calls that are few."""
        draw, moment = rng.random(), rng.choice(("before", "after", "half"))
        if draw < 0.25:
            return cls(seconds=rng.uniform(0, seconds))
        if draw < 0.75:
            name = rng.choice(RARE)
            return cls(call=rng.randrange(1, calls[name] + 1), name=name, moment=moment)
        return cls(call=rng.randrange(1, sum(calls.values()) + 1), moment=moment)


@dataclass
class Trial:
    """One store that is killed again and again, until a run gets through."""

    source: Path
    root: Path
    table: dict[str, Any] = field(default_factory=lambda: recipe("nvfp4", mtp="bf16", o_proj="fp8"))
    seen: Counter[str] = field(default_factory=Counter)
    """Calls at which children died, by name; `timer` for those that were killed from outside, `done` for those that ended."""
    calls: dict[str, int] = field(default_factory=dict)
    """Of the last run that ended by itself while they were counted."""

    def run(self, kill: Kill | None = None) -> Result | None:
        """One attempt; the result if it was published."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._child(kill, writer)
        os.close(writer)
        if kill and kill.seconds is not None:
            time.sleep(kill.seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with open(reader, "rb") as pipe:
            where = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        ended = os.waitstatus_to_exitcode(status)
        if ended not in (0, -signal.SIGKILL):
            raise AssertionError(f"the conversion failed by itself: {where}")
        if ended == 0 and where:
            self.calls = json.loads(where)
        self.seen["done" if ended == 0 else where or "timer"] += 1
        with small_steps():  # digests depend on the size of a piece
            return Store(self.root).find("convert", KEY)

    def torn(self, clean: Path) -> list[str]:
        """Files that anybody could take for finished ones, and are not: there must be none."""
        work, visible = self.root / "work" / "convert" / KEY / "out", []
        if work.is_dir():
            visible = [file for file in work.glob("*.safetensors") if file.read_bytes() != (clean / file.name).read_bytes()]
        return [file.name for file in visible]

    def _child(self, kill: Kill | None, pipe: int) -> None:
        """Never returns."""
        status = 1
        try:
            with contextlib.redirect_stdout(io.StringIO()), _killed(kill, pipe) if kill and kill.call else contextlib.nullcontext():
                self._convert()
            status = 0
        except BaseException as error:
            os.write(pipe, repr(error).encode())
        finally:
            os._exit(status)

    def _convert(self) -> None:
        store = Store(self.root)
        with small_steps(), store.attempt("convert", KEY, resumable=True) as attempt:
            if store.find("convert", KEY):
                return
            convert(self.source, attempt.folder, self.table, Notes())
            outputs = attempt.outputs()
            assert outputs == describe_tree(attempt.out), "a digest that was handed over is wrong"
            store.publish(attempt, {"schema": SCHEMA, "stage": "convert", "key": KEY, "parts": {}, "outputs": outputs})


@contextlib.contextmanager
def small_steps(block: int = 64 << 10, task: int = 96 << 10, unit: int = 160 << 10) -> Iterator[None]:
    """Sizes that make a checkpoint of 14 MB large."""
    from pipeline.checkpoint import blocks, source_files, stream, tasks
    from pipeline.core import filehash

    sizes = {
        (blocks, "PIECE_BYTES"): block, (filehash, "PIECE_BYTES"): block, (blocks, "DIRECT_FROM"): 0,
        (source_files, "DIRECT_FROM"): 0, (source_files, "DIRECT_RANGE"): 16 << 10, (tasks, "TASK_BYTES"): task,
        (tasks, "UNIT_BYTES"): unit, (stream, "UNIT_BYTES"): unit,
    }  # fmt: skip
    usual = {(module, name): getattr(module, name) for module, name in sizes}
    for (module, name), size in sizes.items():
        setattr(module, name, size)
    try:
        yield
    finally:
        for (module, name), size in usual.items():
            setattr(module, name, size)


@contextlib.contextmanager
def _killed(kill: Kill, pipe: int) -> Iterator[None]:
    """Count calls, and die at the chosen one."""
    lock, count = threading.Lock(), Counter[str]()

    def die(name: str) -> None:
        original["write"](pipe, name.encode())
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def watched(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with lock:
                count[name] += 1
                mine = name == (kill.name or name) and kill.call == (count[name] if kill.name else count.total())
            if mine and kill.moment == "half" and name in ("write", "pwrite"):
                data = arguments[1][: len(arguments[1]) // 2 // 4096 * 4096]
                original[name](arguments[0], data, *arguments[2:])
            if mine and kill.moment != "after":
                die(name)
            result = original[name](*arguments, **options)
            if mine:
                die(name)
            return result

        return call

    original = {name: getattr(os, name) for name in CALLS}
    for name in CALLS:
        setattr(os, name, watched(name))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(os, name, function)
        original["write"](pipe, json.dumps(dict.fromkeys(RARE, 1) | count).encode())
