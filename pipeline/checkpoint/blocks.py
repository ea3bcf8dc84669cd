"""A shard in the making: bytes arrive in any order from several threads, whole blocks go to disk, hashed.

The file is cut into blocks of one hash piece each. A block is assembled in aligned memory; whoever brings its last byte
hashes it and passes it to the writer. Steps come in the order of the file, so few blocks are open at a time: one in
each region of equal element size, and those that threads are at work on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from hashlib import sha256
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from pipeline.checkpoint.directio import DIRECT_FROM, aligned, allocate, open_direct, write_all
from pipeline.checkpoint.writer import TensorPlan, lay_out, publish
from pipeline.core.filehash import PIECE_BYTES, Facts, facts_of
from pipeline.formats.numerics import Array

__all__ = ["Block", "BlockPool", "ShardFile"]


class BlockPool:
    """Memory of blocks, used again and again."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """One block."""
        try:
            return self._free.pop()
        except IndexError:
            return allocate(PIECE_BYTES)

    def give(self, memory: memoryview) -> None:
        """It may be used again."""
        self._free.append(memory)


class Block:
    """Bytes [index * PIECE_BYTES, ...) of a shard."""

    __slots__ = ("file", "index", "left", "memory", "size")

    def __init__(self, file: ShardFile, index: int, memory: memoryview) -> None:
        self.file, self.index, self.memory = file, index, memory
        self.size = self.left = min(PIECE_BYTES, file.size - index * PIECE_BYTES)

    def write(self) -> None:
        """To its place in the file; direct writes take whole sectors, and what is too much is cut off at the end."""
        count = aligned(self.size) if self.file.direct else self.size
        write_all(self.file.descriptor, self.memory[:count], self.index * PIECE_BYTES)


class ShardFile:
    """Open from its making to `publish` or `discard`."""

    def __init__(
        self, path: Path, plan: Iterable[TensorPlan], scratch: Path, pool: BlockPool, full: Callable[[Block], None],
        direct: bool = True,
    ) -> None:
        """`scratch` is the folder of the unfinished file, on the same file system; `full` takes each whole block."""
        self.path, self.part = path, scratch / f".{path.name}.part"
        header, self.infos = lay_out(self.part, plan)
        self.size = max((info.stop for info in self.infos.values()), default=len(header))
        self._pool, self._full, self._lock = pool, full, Lock()
        self._open: dict[int, Block] = {}
        self._pieces: dict[int, bytes] = {}
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        if direct and self.size >= DIRECT_FROM:
            self.descriptor, self.direct = open_direct(self.part, flags)
        else:
            self.descriptor, self.direct = os.open(self.part, flags, 0o644), False
        self._header = header

    @property
    def num_blocks(self) -> int:
        """Of the whole file."""
        return -(-self.size // PIECE_BYTES)

    @property
    def facts(self) -> Facts:
        """Digest and size, once every block is full."""
        return facts_of((self._pieces[index] for index in range(self.num_blocks)), self.size)

    def begin(self) -> None:
        """Put the header in; it may fill a block."""
        self._put(0, memoryview(self._header))

    def put(self, name: str, offset: int, array: Array) -> None:
        """Bytes of one range of a tensor, brought exactly once."""
        self._put(self.infos[name].start + offset, memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))

    def room(self, name: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """Where these bytes lie in a block, if they lie in one, in steps of their type."""
        index, start = divmod(self.infos[name].start + offset, PIECE_BYTES)
        count = prod(shape) * dtype.itemsize
        if not count or start + count > PIECE_BYTES or start % dtype.itemsize:
            return None
        return np.frombuffer(self._block(index).memory[start : start + count], dtype).reshape(shape)

    def _put(self, offset: int, data: memoryview) -> None:
        while data:
            index, start = divmod(offset, PIECE_BYTES)
            count = min(len(data), PIECE_BYTES - start)
            block = self._block(index)
            place, brought = (np.frombuffer(part, np.uint8) for part in (block.memory[start : start + count], data[:count]))
            if place.ctypes.data != brought.ctypes.data:  # not written into its room
                np.copyto(place, brought)
            self._filled(block, count)
            data, offset = data[count:], offset + count

    def _block(self, index: int) -> Block:
        with self._lock:
            if index not in self._open:
                self._open[index] = Block(self, index, self._pool.take())
            return self._open[index]

    def _filled(self, block: Block, count: int) -> None:
        with self._lock:
            block.left -= count
            if block.left:
                return
            del self._open[block.index]
        digest = sha256(block.memory[: block.size]).digest()
        with self._lock:
            self._pieces[block.index] = digest
        self._full(block)

    def publish(self) -> None:
        """All blocks are on their way to the disk: make them durable, then visible."""
        os.ftruncate(self.descriptor, self.size)
        publish(self.descriptor, self.part, self.path)

    def discard(self) -> None:
        """Leave nothing."""
        os.close(self.descriptor)
        self.part.unlink(missing_ok=True)
