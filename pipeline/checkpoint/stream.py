"""The conversion itself: one thread reads, one a core converts, one writes, all at the same time.

    reader ── task + buffer ──► workers ── whole blocks, hashed ──► writer ── shard ──► the caller, who publishes it

Every arrow is a bounded queue and every buffer is used again, so memory is the same for any checkpoint. At most two shards
are open: the next one is read while the last blocks of one are written. The bytes do not depend on the number of
workers, for each is computed by itself and has its place.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.checkpoint.arithmetic import Amaxes, Arithmetic, Scratch
from pipeline.checkpoint.blocks import Block, BlockPool, ShardFile
from pipeline.checkpoint.conversion import ConversionPlan, OutputShard
from pipeline.checkpoint.directio import allocate
from pipeline.checkpoint.flow import Channel, Flow, StoppedError
from pipeline.checkpoint.source_files import SourceFiles
from pipeline.checkpoint.tasks import UNIT_BYTES, Task, TaskCutter
from pipeline.core.errors import StageError
from pipeline.core.filehash import Facts
from pipeline.formats.numerics import Array

__all__ = ["Finished", "Options", "convert_shards", "num_cores"]

MAX_WORKERS = 8
SPARE = 4
"""Tasks that are being read, or wait, while every worker has one; and as many blocks wait to be written."""
SLACK = 1 << 20
"""Room in a buffer for alignment."""


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Options:
    """How the work is spread; nothing here changes a byte."""

    workers: int = field(default_factory=lambda: min(MAX_WORKERS, num_cores()))
    direct: bool = True
    """Whether large files bypass the page cache."""
    device: str = "cpu"
    """cuda: on the GPU what `pipeline.formats.on_gpu` takes."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A shard that is durable and visible."""

    shard: OutputShard
    facts: Facts


def convert_shards(
    plan: ConversionPlan, shards: Sequence[OutputShard], out: Path, scratch: Path, options: Options | None = None
) -> Iterator[int | Finished]:
    """Write `shards` into `out`; yields source bytes as they are done, and each shard once it is published.

    Close the iterator to give up: unfinished shards are removed from `scratch` then.
    """
    run = _Run(plan, shards, out, scratch, options or Options())
    try:
        yield from run.events()
    except StoppedError:
        raise run.flow.error or AssertionError from None
    finally:
        run.close()


class _Run:
    """The threads of one conversion."""

    def __init__(
        self, plan: ConversionPlan, shards: Sequence[OutputShard], out: Path, scratch: Path, options: Options
    ) -> None:
        self.plan, self.shards, self.out, self.scratch, self.options = plan, shards, out, scratch, options
        self.flow = Flow()
        self.pool = BlockPool()
        self.arithmetic = Arithmetic(plan.recipe, Amaxes(self.flow, plan.steps), options.device)
        self.files: dict[int, ShardFile] = {}
        self.published = 0
        buffers = (allocate(UNIT_BYTES + SLACK) for _ in range(options.workers + SPARE))
        self.buffers: Channel[memoryview] = Channel(self.flow, items=buffers)
        self.tasks: Channel[tuple[Task, list[Array], memoryview] | None] = Channel(self.flow)
        self.blocks: Channel[Block] = Channel(self.flow, options.workers + SPARE)
        self.done: Channel[int | ShardFile] = Channel(self.flow)

    def events(self) -> Iterator[int | Finished]:
        """Publish what is written, until everything is."""
        self.flow.start(self.read)
        self.flow.start(self.work, self.options.workers)
        self.flow.start(self.write)
        left = sum(shard.num_source_bytes for shard in self.shards)
        while left or self.published < len(self.shards):
            event = self.done.get()
            if isinstance(event, int):
                left -= event
                yield event
            else:
                yield self.publish(event)

    def publish(self, file: ShardFile) -> Finished:
        """Make a written shard visible; it may be that of a later number."""
        number = next(number for number, found in self.files.items() if found is file)
        del self.files[number]
        with _disk(file.path):
            file.publish()
        with self.flow.changed:
            self.published += 1
            self.flow.changed.notify_all()
        return Finished(self.shards[number], file.facts)

    def read(self) -> None:
        """Thread: fill buffers in the order of the tasks."""
        cutter, sources = TaskCutter(self.plan), SourceFiles(self.options.direct)
        try:
            for number, shard in enumerate(self.shards):
                self.flow.wait_until(lambda least=number - 1: self.published >= least)
                self.files[number] = self.open(shard)
                self.files[number].begin()
                for task in cutter.cut(number, shard):
                    ranges = [item for part in task.parts for item in part.sources]
                    arrays, buffer = sources.read(ranges, self.buffers.get())
                    self.tasks.put((task, arrays, buffer))
            for _ in range(self.options.workers):
                self.tasks.put(None)
        finally:
            sources.close()

    def open(self, shard: OutputShard) -> ShardFile:
        """An unfinished file."""
        with _disk(path := self.out / shard.name):
            return ShardFile(path, shard.plan, self.scratch, self.pool, self.blocks.put, self.options.direct)

    def work(self) -> None:
        """Thread: convert tasks."""
        scratch: Scratch = {}
        while (item := self.tasks.get()) is not None:
            task, arrays, buffer = item
            self.convert(task, arrays, scratch)
            self.buffers.put(buffer)
            self.done.put(task.num_bytes)

    def convert(self, task: Task, arrays: list[Array], scratch: Scratch) -> None:
        """Measure everything first: a part may need what another one of the task brings."""
        left, stored = iter(arrays), []
        for part in task.parts:
            stored.append({name: next(left) for name in part.names})
        for part, tensors in zip(task.parts, stored, strict=True):
            if part.measures:
                self.arithmetic.measure(part, tensors)
        for part, tensors in zip(task.parts, stored, strict=True):
            if part.converts:
                self.arithmetic.convert(part, tensors, self.files[task.shard], scratch)

    def write(self) -> None:
        """Thread: blocks to disk."""
        written: dict[ShardFile, int] = {}
        while True:
            block = self.blocks.get()
            file = block.file
            with _disk(file.path):
                block.write()
            self.pool.give(block.memory)
            written[file] = written.get(file, 0) + 1
            if written[file] == file.num_blocks:
                self.done.put(file)

    def close(self) -> None:
        """End the threads, and remove what is not finished."""
        self.flow.stop()
        self.flow.join()
        for file in self.files.values():
            file.discard()


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Say in a sentence why writing failed."""
    try:
        yield
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise StageError(
            f"{path} cannot be written ({why}): make room, or put the store elsewhere with store.root=DIR, then run the "
            f"same command; what is finished is kept."
        ) from error
