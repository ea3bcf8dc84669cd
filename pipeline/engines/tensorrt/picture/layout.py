"""Where boxes stand: rows by what each waits for, each box near those that it is joined to, clusters one below the other.

Sugiyama's method in its plain form: longest paths give rows, a line that passes a row gets a place in it, and sweeps by the mean of
the neighbours' places order each row. Everything is deterministic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Place", "rows_of", "spread"]

SWEEPS = 8
GAP = 28
"""Pixels between the boxes of a row."""
LANE = 14
"""Pixels that a passing line takes."""


@dataclass(slots=True)
class Place:
    """A box, or a line's passage through a row."""

    row: int
    x: float = 0.0
    """Of the middle."""
    width: float = LANE


def rows_of(names: Sequence[str], reads: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Name -> row, one below the lowest of what it reads; `names` are in order. Sources stand right above their first reader, what
    comes from outside in row -1, and what goes outside below all."""
    rows: dict[str, int] = {}
    for name in names:
        rows[name] = 1 + max((rows[source] for source in reads[name] if source in rows), default=-1)
    readers: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        for source in reads[name]:
            readers[source].append(name)
    for name in reversed(names):
        if not reads[name] and readers[name]:
            rows[name] = max(0, min(rows[reader] for reader in readers[name]) - 1)
    lowest = max(rows.values())
    rows |= {source: -1 for name in names for source in reads[name] if source not in rows}
    return rows | {name: lowest + 1 for name in reads if name not in rows}


def spread(names: Sequence[str], reads: Mapping[str, Sequence[str]], widths: Mapping[str, float]) -> tuple[
    dict[str, Place], dict[tuple[str, str], list[Place]]
]:  # fmt: skip
    """Places of the boxes, and of each line's passages from top to bottom. What `reads` mentions beside `names` lies outside."""
    rows = rows_of(names, reads)
    places = {name: Place(row, width=widths.get(name, LANE)) for name, row in rows.items()}
    passages = {
        (source, name): [Place(row) for row in range(rows[source] + 1, rows[name])] for name in reads for source in reads[name]
    }
    grid: defaultdict[int, list[Place]] = defaultdict(list)
    for place in [*places.values(), *(place for line in passages.values() for place in line)]:
        grid[place.row].append(place)
    near = _neighbours(places, passages)
    for row in sorted(grid):
        _pack(grid[row])
    for sweep in range(SWEEPS):
        for row in sorted(grid, reverse=bool(sweep % 2)):
            _settle(grid[row], near, -1 if sweep % 2 == 0 else 1)
    return places, passages


def _neighbours(
    places: Mapping[str, Place], passages: Mapping[tuple[str, str], Sequence[Place]]
) -> dict[int, list[tuple[int, Place]]]:
    """Id of a place -> the places that lines join it to in the rows above (-1) and below (1)."""
    near: defaultdict[int, list[tuple[int, Place]]] = defaultdict(list)
    for (source, name), between in passages.items():
        path = [places[source], *between, places[name]]
        for upper, lower in pairwise(path):
            near[id(upper)].append((1, lower))
            near[id(lower)].append((-1, upper))
    return near


def _settle(row: list[Place], near: Mapping[int, list[tuple[int, Place]]], side: int) -> None:
    """Order a row by the middle of the neighbours on one side, then move apart what overlaps."""

    def wanted(place: Place) -> float:
        found = [other.x for where, other in near.get(id(place), []) if where == side]
        return sum(found) / len(found) if found else place.x

    aims = {id(place): wanted(place) for place in row}
    row.sort(key=lambda place: aims[id(place)])
    _pack(row)
    shift = sum(aims[id(place)] - place.x for place in row) / len(row)
    for place in row:
        place.x += shift
    _relax(row, aims)


def _pack(row: Sequence[Place]) -> None:
    """Side by side, around 0."""
    total = sum(place.width for place in row) + GAP * (len(row) - 1)
    left = -total / 2
    for place in row:
        place.x = left + place.width / 2
        left += place.width + GAP


def _relax(row: Sequence[Place], aims: Mapping[int, float]) -> None:
    """Let each go where it wants, as far as its neighbours let it."""
    for _ in range(3):
        for index in range(len(row)):
            low = row[index - 1].x + (row[index - 1].width + row[index].width) / 2 + GAP if index else float("-inf")
            high = float("inf")
            if index + 1 < len(row):
                high = row[index + 1].x - (row[index + 1].width + row[index].width) / 2 - GAP
            row[index].x = max(low, min(high, aims[id(row[index])]))
