"""Writes safetensors files tensor by tensor: the header first, from a plan, then the bytes in any order.

The file takes its name only when it is complete and on disk, so a reader never sees half of one. Tensors lie by
falling element size, then by name, which aligns each to its element; equal plans and arrays give equal bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from pipeline.checkpoint.directio import write_all
from pipeline.checkpoint.reader import DTYPES, TensorInfo
from pipeline.core.errors import StageError
from pipeline.core.jsonio import fsync_path
from pipeline.formats.numerics import Array

__all__ = ["ShardWriter", "TensorPlan", "lay_out", "publish"]

ALIGNMENT = 64

TensorPlan = tuple[str, str, tuple[int, ...]]
"""Name, dtype in safetensors' spelling, shape."""


class ShardWriter:
    """Context manager; leaving it without an error publishes the file, with one discards it."""

    def __init__(self, path: Path, plan: Iterable[TensorPlan], scratch: Path | None = None) -> None:
        """`scratch` is the folder of the unfinished file, on the same file system; by default that of `path`."""
        self.path = path
        self.part = (scratch or path.parent) / f".{path.name}.part"
        header, self.infos = lay_out(self.part, plan)
        self._left = set(self.infos)
        self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._fd, header, 0)
        os.truncate(self._fd, max((info.stop for info in self.infos.values()), default=len(header)))

    def write(self, name: str, array: Array) -> None:
        """Store one planned tensor; threads may call it side by side."""
        info = self.infos[name]
        if array.dtype != DTYPES[info.dtype] or array.shape != info.shape:
            raise StageError(
                f"{name} was planned as {info.dtype}{list(info.shape)}, but came as {array.dtype}{list(array.shape)}."
            )
        write_all(self._fd, memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), info.start)
        self._left.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._left:
            error = StageError(f"{self.path.name} lacks {len(self._left)} tensors, {min(self._left)} among them.")
        if error is None:
            publish(self._fd, self.part, self.path)
            return
        os.close(self._fd)
        self.part.unlink(missing_ok=True)
        if kind is None:
            raise error


def publish(descriptor: int, part: Path, path: Path) -> None:
    """Make a finished file durable, then visible; it is closed, and removed if that fails."""
    try:
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, path)
        fsync_path(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def lay_out(file: Path, plan: Iterable[TensorPlan]) -> tuple[bytes, dict[str, TensorInfo]]:
    """Header bytes, padded with spaces so that data starts aligned, and each tensor's place."""
    ordered = sorted(plan, key=lambda item: (-DTYPES[item[1]].itemsize, item[0]))
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, places = 0, []
    for name, dtype, shape in ordered:
        end = offset + prod(shape) * DTYPES[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        places.append((name, dtype, tuple(shape), offset, end))
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    base = 8 + len(text)
    infos = {name: TensorInfo(name, dtype, shape, file, base + a, base + b) for name, dtype, shape, a, b in places}
    return struct.pack("<Q", len(text)) + text, infos
