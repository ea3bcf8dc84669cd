"""Every weight against the source's, streamed in ranges of rows by several threads, without torch.

SQNR is 10 log10(sum w^2 / sum (w' - w)^2), with w the source's float32 weight and w' the converted one. For weights
near normal, NVFP4 gives about 20.5 dB, FP8 about 31.5; a global scale that is wrong by 1.25x leaves 11.5. Results are
the same for any number of threads, and with or without the compiled kernels.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite, log10, prod
from typing import TypeVar

from pipeline.checkpoint.source import Checkpoint, Entry
from pipeline.formats.row_errors import RowErrors
from pipeline.verify.rows import Scales, row_pieces
from pipeline.verify.sums import Piece, join, measure

__all__ = ["FLOOR_DB", "TensorError", "compare_weights", "in_order", "num_threads"]

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
class _Task:
    """One range of rows of one parameter."""

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
    tasks = (task for origin, entry in pairs for task in _tasks(origin, entry))
    results = in_order(_measure, tasks, threads or num_threads())
    for _, group in groupby(results, key=lambda result: result[0].entry.name):
        measured = list(group)
        origin, entry = measured[0][0].origin, measured[0][0].entry
        yield _error(origin, entry, measured), origin.num_bytes + entry.num_bytes


def _comparable(source: Checkpoint, entry: Entry) -> bool:
    return entry.name in source.entries and source.entries[entry.name].shape == entry.shape


def _tasks(origin: Entry, entry: Entry) -> list[_Task]:
    found: list[float] = []

    def limit() -> float:
        """Largest magnitude that the entry's scales can express; the first range that needs it reads them."""
        if not found:
            found.append(entry.format.limit(Scales(entry)) if entry.quantised else float("inf"))
        return found[0]

    return [_Task(origin, entry, rows, limit) for rows in row_pieces(entry)]


def _measure(task: _Task) -> tuple[_Task, Piece]:
    return task, measure(task.origin, task.entry, task.rows, task.limit())


def _error(origin: Entry, entry: Entry, measured: list[tuple[_Task, Piece]]) -> TensorError:
    elements = prod(entry.shape)
    faults = sorted(frozenset().union(*(piece.faults for _, piece in measured)))
    exact = TensorError(
        entry.name, entry.place.kind, entry.place.layer, origin.format.name, entry.format.name, elements,
        0.0, None, 0.0, 0.0, tuple(faults),
    )  # fmt: skip
    if all(piece.errors is None for _, piece in measured):
        return exact
    signal, noise, max_abs, num_clipped = join(_all_rows(measured)).totals()
    clipped = round(num_clipped / max(1, elements), 6)
    if not isfinite(noise):
        return replace(exact, relative_l2=None, sqnr_db=FLOOR_DB, max_abs=None, clipped=clipped)
    relative = (noise / signal) ** 0.5 if signal else None if noise else 0.0
    return replace(
        exact, relative_l2=_significant(relative), sqnr_db=_decibel(signal, noise), max_abs=_significant(max_abs),
        clipped=clipped,
    )  # fmt: skip


def _all_rows(measured: list[tuple[_Task, Piece]]) -> Iterator[RowErrors]:
    """Where only some ranges hold the source's bytes, those are decoded after all, for their signal."""
    for task, piece in measured:
        if piece.errors is None:
            piece = measure(task.origin, task.entry, task.rows, task.limit(), shortcut=False)
        if piece.errors is not None:
            yield piece.errors


def _decibel(signal: float, noise: float) -> float | None:
    if noise == 0:
        return None
    return round(10 * log10(signal / noise), 2) if signal else FLOOR_DB


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """`map` over a pool that takes new items only as results are taken."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
