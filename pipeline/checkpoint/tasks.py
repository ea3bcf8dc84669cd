"""A conversion cut into tasks: what is read at once, converted at once, and forgotten.

A task holds small parameters together, or a range of rows of a large one, so memory follows from the limits here and not
from the checkpoint. Ranges begin at multiples of 128 rows, which no scale of any format crosses. A tensor-wide scale
needs the largest magnitude of the parameter and of its fused partner before the first code is written: both are found
on the way where the pair fits into one task, as R1's experts do, and otherwise by reading what is large (in R1 the
dense MLP and o_proj, 1 % of it) once more, before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from pipeline.checkpoint.conversion import ConversionPlan, OutputShard, Step
from pipeline.checkpoint.reader import DTYPES, TensorInfo
from pipeline.layouts import Form

__all__ = ["ROWS", "TASK_BYTES", "Part", "Range", "Task", "TaskCutter", "row_units", "unit_rows"]

ROWS = 128
TASK_BYTES = 16 << 20
"""Small parameters are gathered, and large ones cut, to about this."""
UNIT_BYTES = 32 << 20
"""Parameters with one scale are held together up to this."""


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive bytes of a stored tensor that make an array of `shape`."""

    info: TensorInfo
    offset: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """To be read."""
        return prod(self.shape) * DTYPES[self.info.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter, or a range of its rows, in a task."""

    step: Step
    rows: slice | None
    """None: all of it, whatever its shape."""
    measures: bool
    """Whether its largest magnitude has to be found and checked."""
    converts: bool

    @property
    def first(self) -> bool:
        """Whether it brings the tensors that do not go by rows."""
        return self.rows is None or self.rows.start == 0

    @property
    def num_rows(self) -> int:
        """Of the weight; a scalar has one."""
        return self.rows.stop - self.rows.start if self.rows else (self.step.entry.shape or (1,))[0]

    @property
    def names(self) -> list[str]:
        """Of the stored tensors, by the entry's form, to which a plain parameter is a weight."""
        stored = self.step.entry.tensors
        return list(stored) if len(stored) > 1 else ["weight"]

    @property
    def sources(self) -> list[Range]:
        """What is to be read of each stored tensor."""
        entry = self.step.entry
        if self.rows is None:
            return [Range(info, 0, info.shape) for info in entry.tensors.values()]
        units = row_units(entry.form)
        places = zip(self.names, entry.tensors.values(), strict=True)
        return [_range(info, units[name], self.rows, entry.shape[0]) for name, info in places]

    @property
    def num_bytes(self) -> int:
        """Of the source, each byte counted for one part."""
        return sum(item.num_bytes for item in self.sources if item.offset or self.first or item.shape != item.info.shape)


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker does at a time."""

    shard: int
    """Its number."""
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Of the source that are done with it."""
        return sum(part.num_bytes for part in self.parts if part.converts)


class TaskCutter:
    """Cuts the shards of a plan one after the other, and remembers what has been measured on the way."""

    def __init__(self, plan: ConversionPlan) -> None:
        self._steps = {step.entry.name: step for step in plan.steps}
        self._known: set[str] = set()

    def cut(self, number: int, shard: OutputShard) -> Iterator[Task]:
        """The tasks of one shard, in the order of its file. A task waits for magnitudes of earlier ones, never of later."""
        batch: list[Part] = []
        size = 0
        for unit in _units(shard.steps):
            for group in self._groups(unit):
                count = sum(part.num_bytes for part in group)
                if batch and size + count > TASK_BYTES:
                    yield Task(number, tuple(batch))
                    batch, size = [], 0
                batch += group
                size += count
        if batch:
            yield Task(number, tuple(batch))

    def _groups(self, unit: tuple[Step, ...]) -> Iterator[tuple[Part, ...]]:
        """Parts that stay together: first what must be measured, one by one, then the unit itself."""
        whole = sum(step.entry.num_bytes for step in unit) <= UNIT_BYTES
        here = {step.entry.name for step in unit} if whole else set()
        wanted = [name for step in unit if step.needs_amax for name in (step.entry.name, step.fused) if name]
        for name in dict.fromkeys(wanted):
            if name not in self._known | here:
                yield from ((Part(self._steps[name], rows, True, False),) for rows in _ranges(self._steps[name]))
                self._known.add(name)
        if whole:
            yield tuple(Part(step, None, True, True) for step in unit)
            self._known |= here
            return
        for step in unit:
            fresh = step.entry.name not in self._known
            yield from ((Part(step, rows, fresh, True),) for rows in _ranges(step))


def _units(steps: Iterable[Step]) -> Iterator[tuple[Step, ...]]:
    """Steps by name, which is their order in the file; fused pairs together where they are small enough."""
    ordered = sorted(steps, key=lambda step: step.entry.name)
    by_name = {step.entry.name: step for step in ordered}
    done: set[str] = set()
    for step in ordered:
        if step.entry.name in done:
            continue
        partner = by_name.get(step.fused or "")
        pair = (step,) if partner is None or partner.entry.name in done else (step, partner)
        unit = pair if sum(member.entry.num_bytes for member in pair) <= UNIT_BYTES else (step,)
        done.update(member.entry.name for member in unit)
        yield unit


def _ranges(step: Step) -> list[slice | None]:
    """Ranges of rows of about a task each; what does not go by rows is one."""
    entry = step.entry
    ways = (entry.form,) if step.copies else (entry.form, step.form)
    if len(entry.shape) != 2 or not all(row_units(form) for form in ways):
        return [None]
    rows, block = entry.shape[0], max(1, entry.num_bytes * ROWS // max(1, entry.shape[0]))
    fit = max(1, TASK_BYTES // block) * ROWS
    return [slice(start, min(start + fit, rows)) for start in range(0, rows, fit)]


@cache
def row_units(form: Form) -> dict[str, int]:
    """Rows of each stored tensor that belong to ROWS rows of the weight, 0 for one that is the same for all of them.

    Empty where the form does not go by rows: AutoAWQ and GPTQ pack along them.
    """
    few, many = (form.outputs("", (count, ROWS)) for count in (ROWS, 2 * ROWS))
    if any(a.shape[1:] != b.shape[1:] for a, b in zip(few, many, strict=True)):
        return {}
    return {a.suffix: b.shape[0] - a.shape[0] if a.shape else 0 for a, b in zip(few, many, strict=True)}


def _range(info: TensorInfo, units: int, rows: slice, count: int) -> Range:
    """What of a stored tensor belongs to `rows` of a weight of `count` rows."""
    if not units:
        return Range(info, 0, info.shape)
    found = unit_rows(info.shape[0], units, rows, count)
    stride = prod(info.shape[1:]) * DTYPES[info.dtype].itemsize
    return Range(info, found.start * stride, (found.stop - found.start, *info.shape[1:]))


def unit_rows(length: int, units: int, rows: slice, count: int) -> slice:
    """The rows of a stored tensor, `length` long, that belong to `rows` of a weight of `count` rows."""
    return slice(rows.start // ROWS * units, length if rows.stop == count else rows.stop // ROWS * units)
