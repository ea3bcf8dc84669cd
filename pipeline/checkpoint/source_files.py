"""Reads the bytes of a task into one buffer: neighbours in one call, large ranges past the page cache."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.checkpoint.directio import ALIGNMENT, DIRECT_FROM, aligned, allocate, open_direct, read_into
from pipeline.checkpoint.reader import DTYPES
from pipeline.checkpoint.tasks import Range
from pipeline.core.errors import StageError
from pipeline.formats.numerics import Array

__all__ = ["SourceFiles"]

MAX_OPEN = 16
GAP = 64 << 10
"""Bytes that are rather read than skipped."""
DIRECT_RANGE = 1 << 20
"""Smaller ranges, scales above all, are read through the page cache, where planning has left them."""


@dataclass(slots=True)
class _Span:
    """Consecutive bytes of one file, for some of a task's ranges."""

    file: Path
    start: int
    stop: int
    members: list[int]


@dataclass(frozen=True, slots=True)
class _Open:
    """Descriptors of one file."""

    cached: int
    direct: int | None


class SourceFiles:
    """For one thread; files are opened when first needed and closed when many others were used since."""

    def __init__(self, direct: bool = True) -> None:
        self._direct = direct
        self._open: OrderedDict[Path, _Open] = OrderedDict()

    def read(self, ranges: Sequence[Range], buffer: memoryview) -> tuple[list[Array], memoryview]:
        """An array for each range, and the buffer that holds them: a larger one where `buffer` is too small."""
        spans = list(_spans(ranges))
        room = sum(aligned(span.stop) - span.start // ALIGNMENT * ALIGNMENT for span in spans)
        buffer = buffer if room <= len(buffer) else allocate(room)
        arrays: dict[int, Array] = {}
        at = 0
        for span in spans:
            low, high = span.start // ALIGNMENT * ALIGNMENT, aligned(span.stop)
            self._read_span(span, low, buffer[at : at + high - low])
            for member in span.members:
                item = ranges[member]
                begin = at + item.info.start + item.offset - low
                arrays[member] = _array(buffer[begin : begin + item.num_bytes], item)
            at += high - low
        empty = {index: np.empty(item.shape, DTYPES[item.info.dtype]) for index, item in enumerate(ranges) if not item.num_bytes}
        return [(arrays | empty)[index] for index in range(len(ranges))], buffer

    def close(self) -> None:
        """Every file."""
        while self._open:
            _close(self._open.popitem()[1])

    def _read_span(self, span: _Span, low: int, buffer: memoryview) -> None:
        try:
            found = self._file(span.file)
            descriptor = found.cached if found.direct is None or span.stop - span.start < DIRECT_RANGE else found.direct
            read_into(descriptor, buffer, low, span.stop - low)
        except OSError as error:
            raise StageError(
                f"{span.file} cannot be read at byte {span.start} ({error.strerror or error}): mend the disk or copy the "
                f"file again, then run the same command; what is finished is kept."
            ) from error

    def _file(self, path: Path) -> _Open:
        if path not in self._open:
            direct = self._direct and path.stat().st_size >= DIRECT_FROM
            descriptor, is_direct = open_direct(path, os.O_RDONLY) if direct else (-1, False)
            if descriptor >= 0 and not is_direct:
                os.close(descriptor)
            cached = os.open(path, os.O_RDONLY)
            if is_direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_RANDOM)
            self._open[path] = _Open(cached, descriptor if is_direct else None)
            if len(self._open) > MAX_OPEN:
                _close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        return self._open[path]


def _spans(ranges: Sequence[Range]) -> Iterator[_Span]:
    """Ranges that lie side by side become one."""
    wanted = [index for index, item in enumerate(ranges) if item.num_bytes]
    places = {index: ranges[index].info.start + ranges[index].offset for index in wanted}
    span: _Span | None = None
    for index in sorted(wanted, key=lambda i: (ranges[i].info.file, places[i])):
        file, start, stop = ranges[index].info.file, places[index], places[index] + ranges[index].num_bytes
        if span and span.file == file and start - span.stop <= GAP:
            span.stop = max(span.stop, stop)
            span.members.append(index)
            continue
        if span:
            yield span
        span = _Span(file, start, stop, [index])
    if span:
        yield span


def _array(data: memoryview, item: Range) -> Array:
    """A view; a copy where the file has the tensor at an odd place."""
    raw = np.frombuffer(data, np.uint8)
    kind = DTYPES[item.info.dtype]
    if (item.info.start + item.offset) % kind.itemsize:
        raw = raw.copy()
    return raw.view(kind).reshape(item.shape)


def _close(found: _Open) -> None:
    for descriptor in (found.cached, found.direct):
        if descriptor is not None:
            os.close(descriptor)
