"""Every weight against the source's, streamed in ranges of rows by several threads, without torch.

SQNR is 10 log10(sum w^2 / sum (w' - w)^2), with w the source's float32 weight and w' the converted one. For weights
near normal, NVFP4 gives about 20.5 dB, FP8 about 31.5; a global scale that is wrong by 1.25x leaves 11.5. Results are
the same for any number of threads: ranges are added in order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from math import isfinite, log10, prod
from operator import add
from typing import TypeVar

from pipeline.checkpoint.source import Checkpoint, Entry
from pipeline.verify.rows import Scales, row_pieces
from pipeline.verify.sums import Sums, measure

__all__ = ["FLOOR_DB", "TensorError", "compare_weights", "differing_pairs", "num_threads"]

FLOOR_DB = -300.0
"""Reported where the ratio has no finite logarithm: NaN or infinity in the converted weight, or a source of zeros."""
MAX_THREADS = 8
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TensorError:
    """Errors of one parameter; rounded, so that reports are equal byte for byte."""

    name: str
    kind: str
    layer: int | None
    source: str
    """Format in the source."""
    format: str
    elements: int
    relative_l2: float | None
    """None: not finite."""
    sqnr_db: float | None
    """None: exact."""
    max_abs: float | None
    clipped: float
    """Share of elements beyond what the tensor's scales can express."""
    bad_scales: tuple[str, ...] = ()
    """Scales with a value that is not finite and above 0."""

    @property
    def limit_key(self) -> str:
        """Which limit holds: that of the format, or `kept` where it is quantised as it was."""
        return "kept" if self.format == self.source != "bf16" else self.format

    @property
    def rank(self) -> float:
        """For ordering: worst first."""
        return float("inf") if self.sqnr_db is None else self.sqnr_db


@dataclass(frozen=True, slots=True)
class _Piece:
    """One unit of work."""

    origin: Entry
    entry: Entry
    rows: slice
    limit: Callable[[], float]


def num_threads() -> int:
    """As many as there are processors for this process."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def compare_weights(
    source: Checkpoint, entries: Iterable[Entry], threads: int | None = None
) -> Iterator[tuple[TensorError, int]]:
    """Each entry's errors with the bytes that were read for it, in order; those that the source lacks are left out."""
    pairs = ((source.entries[entry.name], entry) for entry in entries if _comparable(source, entry))
    pieces = (piece for origin, entry in pairs for piece in _pieces(origin, entry))
    results = _in_order(_measure, pieces, threads or num_threads())
    for _, group in groupby(results, key=lambda result: result[0].entry.name):
        measured = list(group)
        origin, entry = measured[0][0].origin, measured[0][0].entry
        yield _error(origin, entry, _total(measured)), origin.num_bytes + entry.num_bytes


def differing_pairs(converted: Checkpoint) -> list[str]:
    """Layers that runtimes run as one matrix with one tensor-wide scale, and that have two; a sentence each."""
    return [text for entry in converted.entries.values() if entry.quantised for text in _differences(converted, entry)]


def _comparable(source: Checkpoint, entry: Entry) -> bool:
    return entry.name in source.entries and source.entries[entry.name].shape == entry.shape


def _pieces(origin: Entry, entry: Entry) -> list[_Piece]:
    found: list[float] = []

    def limit() -> float:
        """Largest magnitude that the entry's scales can express; the first range that needs it reads them."""
        if not found:
            found.append(entry.format.limit(Scales(entry)) if entry.quantised else float("inf"))
        return found[0]

    return [_Piece(origin, entry, rows, limit) for rows in row_pieces(entry.shape)]


def _measure(piece: _Piece) -> tuple[_Piece, Sums]:
    return piece, measure(piece.origin, piece.entry, piece.rows, piece.limit())


def _total(measured: list[tuple[_Piece, Sums]]) -> Sums:
    """The sum over all ranges. Where only some are the source's bytes, those are decoded after all, for the signal."""
    if all(sums.same for _, sums in measured):
        return replace(reduce(add, (sums for _, sums in measured)), same=True)
    whole = (
        measure(piece.origin, piece.entry, piece.rows, piece.limit(), shortcut=False) if sums.same else sums
        for piece, sums in measured
    )
    return reduce(add, whole)


def _error(origin: Entry, entry: Entry, sums: Sums) -> TensorError:
    elements = prod(entry.shape)
    exact = TensorError(
        entry.name, entry.place.kind, entry.place.layer, origin.format.name, entry.format.name, elements,
        0.0, None, 0.0, 0.0, tuple(sorted(sums.faults)),
    )  # fmt: skip
    if sums.same:
        return exact
    clipped = round(sums.clipped / max(1, elements), 6)
    if not isfinite(sums.noise):
        return replace(exact, relative_l2=None, sqnr_db=FLOOR_DB, max_abs=None, clipped=clipped)
    relative = (sums.noise / sums.signal) ** 0.5 if sums.signal else None
    return replace(
        exact, relative_l2=_significant(relative), sqnr_db=_decibel(sums.signal, sums.noise),
        max_abs=_significant(sums.max_abs), clipped=clipped,
    )  # fmt: skip


def _decibel(signal: float, noise: float) -> float | None:
    if noise == 0:
        return None
    return round(10 * log10(signal / noise), 2) if signal else FLOOR_DB


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """`map` over a pool that takes new items only as results are taken."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _differences(converted: Checkpoint, entry: Entry) -> Iterator[str]:
    partner = converted.entries.get(f"{entry.place.partner}.weight")
    if partner is None or not entry.format.tensor_scale or partner.name < entry.name:
        return
    mine, theirs = Scales(entry), Scales(partner)
    for suffix, info in entry.tensors.items():
        if info.shape == () and (suffix not in partner.tensors or theirs[suffix].tobytes() != mine[suffix].tobytes()):
            yield f"{entry.place.module} and {partner.place.module} are fused by runtimes, but their {suffix} differ"
