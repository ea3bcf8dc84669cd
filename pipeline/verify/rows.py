"""The tensors of one parameter, a range of rows at a time.

Ranges are read into buffers of their own, never mapped, so the memory of a comparison does not depend on the size of a
tensor: `lm_head` of R1 takes 1.9 GB. Every range but the last is a multiple of 128 rows, which no block scale crosses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from pipeline.checkpoint.directio import read_into
from pipeline.checkpoint.reader import DTYPES, TensorInfo
from pipeline.checkpoint.source import Entry
from pipeline.core.errors import ConfigError
from pipeline.formats.numerics import Array

__all__ = ["PIECE_ELEMENTS", "Arena", "Scales", "read_range", "read_rows", "row_pieces"]

PIECE_ELEMENTS = 1 << 20
"""Most weights of one range, where 128 rows do not hold more."""
BLOCK = 128
ALIGNMENT = 64
WORDS = "I32"
_WHOLE = frozenset({"pre_quant_scale"})
"""Runs along K."""


def row_pieces(entry: Entry) -> list[slice]:
    """Ranges of rows that cover a weight; a vector, and codes in words that must be unpacked as a whole, are one range."""
    rows = entry.shape[0] if entry.shape else 1
    if len(entry.shape) < 2 or entry.main.dtype == WORDS:
        return [slice(0, rows)]
    fit = max(1, PIECE_ELEMENTS // max(1, prod(entry.shape[1:])) // BLOCK) * BLOCK
    return [slice(start, min(start + fit, rows)) for start in range(0, max(1, rows), fit)]


class Arena(threading.local):
    """Memory of one thread that is used again and again: fresh pages cost as much as reading into them."""

    def __init__(self) -> None:
        self._buffer, self._used, self._wanted = np.empty(0, np.uint8), 0, 0

    def reset(self) -> None:
        """Everything that was taken before may be overwritten; what did not fit will fit next time."""
        if self._wanted > self._buffer.size:
            self._buffer = np.empty(self._wanted, np.uint8)
        self._used = self._wanted = 0

    def take(self, num_bytes: int) -> Array:
        """Bytes [num_bytes], of the arena where it has them."""
        start, room = self._used, -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._wanted += room
        if start + num_bytes > self._buffer.size:
            return np.empty(num_bytes, np.uint8)
        self._used += room
        return self._buffer[start : start + num_bytes]


def read_rows(entry: Entry, rows: slice, arena: Arena | None = None) -> dict[str, Array]:
    """The stored tensors for these rows of the weight, by the names that formats use."""
    num_rows = entry.shape[0] if entry.shape else 1
    if _stored_as_meant(entry):
        return {role: _read(info, _stored_rows(role, info.shape, rows, num_rows), arena) for role, info in _roles(entry)}
    loaded = entry.load()
    return {role: array[_stored_rows(role, array.shape, rows, num_rows) or ...] for role, array in loaded.items()}


class Scales(Mapping[str, Array]):
    """An entry's tensors, each read whole when it is asked for: what `Format.limit` takes."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __getitem__(self, role: str) -> Array:
        if _stored_as_meant(self._entry):
            return _read(self._entry.tensors[role], None)
        return self._entry.load()[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry.tensors)

    def __len__(self) -> int:
        return len(self._entry.tensors)


def _roles(entry: Entry) -> Iterator[tuple[str, TensorInfo]]:
    """A parameter such as `e_score_correction_bias` is a plain weight to formats."""
    if len(entry.tensors) == 1:
        yield "weight", entry.main
    else:
        yield from entry.tensors.items()


def _stored_as_meant(entry: Entry) -> bool:
    """Whether the tensors on disk are those of the format, so that parts of them can be read."""
    if not entry.quantised:
        return len(entry.tensors) == 1
    wanted = {output.suffix: (output.dtype, output.shape) for output in entry.format.outputs(entry.place.module, entry.shape)}
    return {suffix: (info.dtype, info.shape) for suffix, info in entry.tensors.items()} == wanted


def _stored_rows(role: str, shape: tuple[int, ...], rows: slice, num_rows: int) -> slice | None:
    """The rows of a stored tensor that belong to rows of the weight; None: all of it."""
    if not shape or role in _WHOLE:
        return None
    each = 1 if shape[0] == num_rows else 2 if shape[0] * 2 == num_rows else BLOCK
    return slice(rows.start // each, -(-rows.stop // each))


def read_range(info: TensorInfo, offset: int, shape: tuple[int, ...], arena: Arena | None = None) -> Array:
    """An array of `shape` from byte `offset` of the tensor's file, in a new buffer or the arena's."""
    num_bytes = prod(shape) * DTYPES[info.dtype].itemsize
    buffer = arena.take(num_bytes) if arena else np.empty(num_bytes, np.uint8)
    _read_into(info, memoryview(buffer), offset)
    return buffer.view(DTYPES[info.dtype]).reshape(shape)


def _read(info: TensorInfo, rows: slice | None, arena: Arena | None = None) -> Array:
    """Rows of one tensor, or all of it."""
    if rows is None:
        return read_range(info, info.start, info.shape, arena)
    stride = prod(info.shape[1:]) * DTYPES[info.dtype].itemsize
    return read_range(info, info.start + rows.start * stride, (rows.stop - rows.start, *info.shape[1:]), arena)


def _read_into(info: TensorInfo, buffer: memoryview, offset: int) -> None:
    try:
        descriptor = os.open(info.file, os.O_RDONLY)
        try:
            read_into(descriptor, buffer, offset, len(buffer))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{info.file} cannot be read at {info.name}: {error}. Copy the file again.") from error
