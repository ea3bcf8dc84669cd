"""Errors of a converted weight against its source, row by row, in float64.

The order of the sums is fixed, so that reports are equal byte for byte on every machine: element i of a row goes to
lane i mod 16, each lane is summed from left to right, at the end lanes are folded in halves (i and i + 8, then i and
i + 4, ...), and rows are added exactly (`math.fsum`). The compiled kernels do the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.numerics import Float32, row_strips

__all__ = ["RowErrors", "row_errors"]

Float64 = NDArray[np.float64]
LANES = 16


@dataclass(frozen=True, slots=True)
class RowErrors:
    """One entry a row."""

    signal: Float64
    """sum w^2"""
    noise: Float64
    """sum (w' - w)^2"""
    max_abs: Float64
    """Largest |w' - w|; NaN where any is."""
    clipped: NDArray[np.int64]
    """Elements with |w| beyond the limit."""

    @classmethod
    def empty(cls, rows: int) -> RowErrors:
        """To be filled in."""
        return cls(np.empty(rows), np.empty(rows), np.empty(rows), np.empty(rows, np.int64))

    def totals(self) -> tuple[float, float, float, int]:
        """Signal, noise, largest error, clipped elements of all rows; sums are rounded once, whatever their order."""
        return _total(self.signal), _total(self.noise), float(self.max_abs.max(initial=0.0)), int(self.clipped.sum())


def row_errors(wanted: Float32, got: Float32, limit: float) -> RowErrors:
    """Of two [N, K] weights."""
    result = RowErrors.empty(len(wanted))
    for rows in row_strips(wanted.shape):
        w = wanted[rows].astype(np.float64)
        error = got[rows] - w
        result.signal[rows], result.noise[rows] = _folded(np.square(w)), _folded(np.square(error))
        result.max_abs[rows] = np.abs(error).max(axis=1)
        result.clipped[rows] = (np.abs(w) > limit).sum(axis=1)
    return result


def _folded(squares: Float64) -> Float64:
    """[n, K] -> [n]"""
    n, k = squares.shape
    terms = np.pad(squares, ((0, 0), (0, -k % LANES))).reshape(n, -1, LANES)
    lanes = np.add.accumulate(terms, axis=1)[:, -1]
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _total(sums: Float64) -> float:
    """NaN and infinity as plain addition gives them."""
    return fsum(sums) if np.isfinite(sums).all() else float(sums.sum())
