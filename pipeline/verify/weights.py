"""Every weight against the source's, one at a time, without torch.

SQNR is 10 log10(sum w^2 / sum (w' - w)^2), with w the source's float32 weight and w' the converted one. For weights
near normal, NVFP4 gives about 20.5 dB, FP8 about 31.5; a global scale that is wrong by 1.25x leaves 11.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite, log10

import numpy as np

from pipeline.checkpoint.source import Checkpoint, Entry
from pipeline.formats.numerics import Array, Float32, decode_e8m0, row_strips

__all__ = ["FLOOR_DB", "TensorError", "broken_scales", "compare_weights"]

FLOOR_DB = -300.0
"""Reported where the ratio has no finite logarithm: NaN or infinity in the converted weight, or a source of zeros."""
NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class TensorError:
    """Errors of one parameter; rounded, so that reports are equal byte for byte."""

    name: str
    kind: str
    format: str
    relative_l2: float | None
    """None: not finite."""
    sqnr_db: float | None
    """None: exact."""
    max_abs: float | None
    clipped: float
    """Share of elements beyond what the tensor's scales can express."""

    @property
    def rank(self) -> float:
        """For ordering: worst first."""
        return float("inf") if self.sqnr_db is None else self.sqnr_db


def compare_weights(source: Checkpoint, converted: Checkpoint) -> Iterator[tuple[TensorError, int]]:
    """Each parameter's errors with the bytes that were read for it, in the converted checkpoint's order."""

    def work(entry: Entry) -> tuple[TensorError, int]:
        origin = source.entries[entry.name]
        return _compare(origin, entry), origin.num_bytes + entry.num_bytes

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        yield from pool.map(work, converted.entries.values())


def broken_scales(converted: Checkpoint) -> list[str]:
    """What runtimes compute wrongly in silence, one sentence each: bad scales, and fused layers that disagree."""
    return [text for entry in converted.entries.values() if entry.quantised for text in _scale_faults(converted, entry)]


def _compare(origin: Entry, entry: Entry) -> TensorError:
    place = entry.place
    if origin.format is entry.format and _same_bytes(origin.load(), entry.load()):
        return TensorError(entry.name, place.kind, entry.format.name, 0.0, None, 0.0, 0.0)
    limit = entry.format.limit(entry.load()) if entry.quantised else float("inf")
    signal, noise, max_abs, clipped = _sums(origin.dequantized(), entry.dequantized(), limit)
    if not isfinite(noise):
        return TensorError(entry.name, place.kind, entry.format.name, None, FLOOR_DB, None, clipped)
    relative = (noise / signal) ** 0.5 if signal else None
    return TensorError(
        entry.name, place.kind, entry.format.name, _significant(relative), _decibel(signal, noise),
        _significant(max_abs), clipped,
    )


def _same_bytes(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and np.array_equal(_bytes(one[k]), _bytes(other[k])) for k in one
    )


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _sums(wanted: Float32, got: Float32, limit: float) -> tuple[float, float, float, float]:
    """Squared signal, squared error, largest error, clipped share; strip by strip, in float64."""
    wanted, got = wanted.reshape(-1, wanted.shape[-1]), got.reshape(-1, got.shape[-1])
    signal = noise = max_abs = 0.0
    clipped = 0
    for rows in row_strips(wanted.shape):
        w = wanted[rows].astype(np.float64)
        error = got[rows] - w
        signal += float(np.square(w).sum())
        noise += float(np.square(error).sum())
        max_abs = max(max_abs, float(np.abs(error).max(initial=0.0)))
        clipped += int((np.abs(w) > limit * (1 + 2**-8)).sum())  # BF16 rounding of the source is not clipping
    return signal, noise, max_abs, round(clipped / max(1, wanted.size), 6)


def _decibel(signal: float, noise: float) -> float | None:
    if noise == 0:
        return None
    return round(10 * log10(signal / noise), 2) if signal else FLOOR_DB


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _scale_faults(converted: Checkpoint, entry: Entry) -> Iterator[str]:
    stored = entry.load()
    scales = {suffix: array for suffix, array in stored.items() if suffix != "weight"}
    for suffix, array in scales.items():
        values = decode_e8m0(array) if array.dtype == np.uint8 else array.astype(np.float32)
        if not (np.isfinite(values).all() and (values > 0).all()):
            yield f"{entry.place.module}.{suffix} holds a value that is not finite and above 0"
    partner = converted.entries.get(f"{entry.place.partner}.weight")
    if partner is None or not entry.format.tensor_scale or partner.name < entry.name:
        return
    other = partner.load()
    for suffix, array in scales.items():
        if array.ndim == 0 and (suffix not in other or other[suffix].tobytes() != array.tobytes()):
            yield f"{entry.place.module} and {partner.place.module} are fused by runtimes, but their {suffix} differ"
