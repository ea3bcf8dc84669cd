"""What is summed over a range of rows: signal, error, clipping, and whether the scales are sound.

The arithmetic is `pipeline.formats.row_errors` or its compiled twin, which give the same bits. Rows are kept apart until all
of a parameter are there and are then added exactly, so the result does not depend on how rows were divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.checkpoint.source import Entry
from pipeline.formats import fast
from pipeline.formats.numerics import Array, Float32, decode_e8m0
from pipeline.formats.row_errors import RowErrors, row_errors
from pipeline.verify.rows import Arena, read_rows

__all__ = ["Piece", "join", "measure"]

TOLERANCE = 1 + 2**-7
"""Rounding the source to BF16 and then its scale, each by up to 2^-9, is not clipping."""

_ARENA = Arena()


@dataclass(frozen=True, slots=True)
class Piece:
    """Of one range of rows."""

    errors: RowErrors | None
    """None: the stored bytes are those of the source, or there are none."""
    faults: frozenset[str]
    """Scales that hold a value which is not finite and above 0."""


def measure(origin: Entry, entry: Entry, rows: slice, limit: float, *, shortcut: bool = True) -> Piece:
    """Compare rows of a converted parameter with its source; equal bytes are not decoded where a `shortcut` will do."""
    _ARENA.reset()
    before, after = read_rows(origin, rows, _ARENA), read_rows(entry, rows, _ARENA)
    faults = frozenset(_faults(after)) if entry.quantised else frozenset()
    if 0 in entry.shape or (shortcut and origin.format is entry.format and _same_bytes(before, after)):
        return Piece(None, faults)
    with np.errstate(all="ignore"):  # a damaged checkpoint overflows; the sums say so
        if len(entry.shape) == 2:
            return Piece(fast.errors(origin.format, before, entry.format, after, limit * TOLERANCE), faults)
        wanted, got = (_as_matrix(side.format.dequantize(tensors)) for side, tensors in ((origin, before), (entry, after)))
        return Piece(row_errors(wanted, got, limit * TOLERANCE), faults)


def join(parts: Iterable[RowErrors]) -> RowErrors:
    """The rows of all parts."""
    parts = list(parts)
    return RowErrors(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("signal", "noise", "max_abs", "clipped"))
    )


def _as_matrix(weight: Float32) -> Float32:
    """A vector is one row; what has three dimensions or more, rows of its last."""
    return weight.reshape(-1, weight.shape[-1]) if weight.ndim > 1 else weight.reshape(1, -1)


def _same_bytes(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and np.array_equal(_bytes(one[k]), _bytes(other[k])) for k in one
    )


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _faults(tensors: Mapping[str, Array]) -> list[str]:
    scales = {role: array for role, array in tensors.items() if role not in ("weight", "weight_zero_point")}
    return [role for role, array in scales.items() if not _sound(array)]


def _sound(scales: Array) -> bool:
    """Finite and above 0, all of them; E4M3 is judged by its codes."""
    if scales.dtype.itemsize == 1 and scales.dtype != np.uint8:
        codes = scales.reshape(-1).view(np.uint8)
        return bool(((codes > 0) & (codes < 0x7F)).all())
    values = decode_e8m0(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)
    return bool(np.isfinite(values).all() and (values > 0).all())
