"""What is summed over a range of rows: signal, error, clipping, and whether the scales are sound.

This is the reference, in float64 on float32 weights; a faster path must give the same numbers to the digits shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.checkpoint.source import Entry
from pipeline.formats.numerics import Array, Float32, decode_e8m0, row_strips
from pipeline.verify.rows import read_rows

__all__ = ["Sums", "measure"]

TOLERANCE = 1 + 2**-8
"""Rounding the source to BF16 is not clipping."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one range of rows; they add up to those of the parameter."""

    signal: float = 0.0
    noise: float = 0.0
    max_abs: float = 0.0
    clipped: int = 0
    elements: int = 0
    faults: frozenset[str] = frozenset()
    """Scales that hold a value which is not finite and above 0."""
    same: bool = False
    """Whether the stored bytes are those of the source; the signal is then not summed."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.signal + other.signal, self.noise + other.noise, max(self.max_abs, other.max_abs),
            self.clipped + other.clipped, self.elements + other.elements, self.faults | other.faults,
        )  # fmt: skip


def measure(origin: Entry, entry: Entry, rows: slice, limit: float, *, shortcut: bool = True) -> Sums:
    """Compare rows of a converted parameter with its source; equal bytes are not decoded where a `shortcut` will do."""
    before, after = read_rows(origin, rows), read_rows(entry, rows)
    faults = frozenset(_faults(after)) if entry.quantised else frozenset()
    if shortcut and origin.format is entry.format and _same_bytes(before, after):
        elements = (rows.stop - rows.start) * int(np.prod(entry.shape[1:]))
        return Sums(elements=elements, faults=faults, same=True)
    with np.errstate(all="ignore"):  # a damaged checkpoint overflows; the sums say so
        wanted, got = origin.format.dequantize(before), entry.format.dequantize(after)
        return _sums(wanted, got, limit * TOLERANCE, faults)


def _sums(wanted: Float32, got: Float32, limit: float, faults: frozenset[str]) -> Sums:
    """Strip by strip, so that temporaries stay in the cache."""
    width = wanted.shape[-1] if wanted.ndim > 1 else wanted.size
    wanted, got = wanted.reshape(-1, width), got.reshape(-1, width)
    total = Sums(faults=faults)
    for rows in row_strips(wanted.shape):
        w = wanted[rows].astype(np.float64)
        error = got[rows] - w
        total += Sums(
            float(np.einsum("ij,ij->", w, w)), float(np.einsum("ij,ij->", error, error)),
            float(np.abs(error).max(initial=0.0)), int((np.abs(w) > limit).sum()), w.size,
        )  # fmt: skip
    return total


def _same_bytes(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and np.array_equal(_bytes(one[k]), _bytes(other[k])) for k in one
    )


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _faults(tensors: Mapping[str, Array]) -> list[str]:
    scales = {role: array for role, array in tensors.items() if role != "weight"}
    return [role for role, array in scales.items() if not _sound(array)]


def _sound(scales: Array) -> bool:
    """Finite and above 0, all of them; E4M3 and E8M0 are judged by their codes."""
    if scales.dtype.itemsize == 1 and scales.dtype != np.uint8:
        codes = scales.reshape(-1).view(np.uint8)
        return bool(((codes > 0) & (codes < 0x7F)).all())
    values = decode_e8m0(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)
    return bool(np.isfinite(values).all() and (values > 0).all())
