"""What happens to the numbers of a part: its largest magnitude, and its new tensors. Safe to call from several threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from pipeline.checkpoint.conversion import Step, not_finite
from pipeline.checkpoint.flow import Flow
from pipeline.checkpoint.problems import refuse
from pipeline.checkpoint.reader import DTYPES
from pipeline.checkpoint.recipe import Recipe
from pipeline.checkpoint.tasks import ROWS, Part, row_units, unit_rows
from pipeline.formats import Format, fast, on_gpu
from pipeline.formats.numerics import BF16, Array
from pipeline.layouts import stored_as
from pipeline.layouts.modelopt import MODELOPT

__all__ = ["Amaxes", "Arithmetic", "Scratch", "Sink"]

Scratch = dict[tuple[Any, ...], Mapping[str, Array]]
"""Arrays of one thread to write results into, by what they are for: fresh memory costs more than the arithmetic."""
MAX_KINDS = 8
STRIP_ELEMENTS = 1 << 22
"""Elements converted at a time: few enough for temporaries, and enough to forget what a call costs."""
MEASURED_ELEMENTS = 1 << 24
"""Elements measured at a time, which writes nothing."""


class Sink(Protocol):
    """Takes pieces of output tensors: the tensor's name, the offset in it in bytes, the array."""

    def put(self, name: str, offset: int, array: Array) -> None:
        """A finished piece, which may be the array of its `room`."""

    def room(self, name: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """The memory where the piece belongs, to be filled and then put; None where it is not one array."""


class Amaxes:
    """Largest magnitudes by parameter; a range of rows brings its share."""

    def __init__(self, flow: Flow, steps: Iterable[Step]) -> None:
        self._flow = flow
        self._values: dict[str, float] = {}
        self._missing = {step.entry.name: step.entry.shape[0] for step in steps if step.needs_amax}

    def add(self, name: str, value: float, rows: int) -> None:
        """Of so many rows."""
        with self._flow.changed:
            self._values[name] = max(value, self._values.get(name, 0.0))
            self._missing[name] -= rows
            self._flow.changed.notify_all()

    def of(self, name: str) -> float:
        """That of the whole parameter; waits until all its rows have been measured."""
        with self._flow.changed:
            self._flow.wait_until(lambda: self._missing[name] <= 0)
            return self._values[name]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """By a recipe."""

    recipe: Recipe
    amaxes: Amaxes
    device: str = "cpu"

    def measure(self, part: Part, stored: Mapping[str, Array]) -> None:
        """Find the part's largest magnitude; NaN and infinity are refused by name, here or by `convert`."""
        step, item = part.step, part.step.entry.format
        exact, quick = step.needs_amax and self.recipe.exact(step.target), fast.sees_nan(item, step.target)
        for rows, tensors in _strips(part, stored, MEASURED_ELEMENTS):
            amax = self._kernels(step).amax(item, tensors, exact=exact, quick=quick)
            if not isfinite(np.float32(amax).astype(BF16)):
                refuse(not_finite(step.entry))
            if step.needs_amax:
                self.amaxes.add(step.entry.name, amax, rows.stop - rows.start)

    def convert(self, part: Part, stored: Mapping[str, Array], sink: Sink, scratch: Scratch) -> None:
        """Bring the part's new tensors: strip by strip where their form goes by rows, otherwise at once."""
        step, entry = part.step, part.step.entry
        if step.copies:
            for item, array in zip(part.sources, stored.values(), strict=True):
                if part.first or item.offset:
                    sink.put(item.info.name, item.offset, array)
            return
        amax = self._amax(step) if step.needs_amax else 0.0
        joins = len(entry.shape) == 2 and not row_units(step.form) and not step.relays
        strips = self._converted(part, stored, amax, *((None, {}) if joins else (sink, scratch)))
        if joins:
            strips = iter([(slice(0, entry.shape[0]), _joined(step.target, [tensors for _, tensors in strips]))])
        for rows, tensors in strips:
            for suffix, offset, array in _stored(step, rows, tensors):
                sink.put(_name(step, suffix), offset, array)

    def _converted(
        self, part: Part, stored: Mapping[str, Array], amax: float, sink: Sink | None, scratch: Scratch
    ) -> Iterator[tuple[slice, Mapping[str, Array]]]:
        """Rows with the target's tensors for them, in the rooms of `sink` or else in `scratch`, until the next strip."""
        target, shape = self.recipe.searching(part.step.target), part.step.entry.shape
        for rows, tensors in _strips(part, stored):
            kind = (target.name, rows.stop - rows.start, *shape[1:])
            rooms = _rooms(part.step, rows, sink) if sink else {}
            new = self._new(part.step, target, tensors, amax, {**scratch.get(kind, {}), **rooms})
            if len(shape) == 2 and not part.step.relays and len(scratch) < MAX_KINDS:
                scratch[kind] = {suffix: array for suffix, array in new.items() if suffix not in rooms}
            yield rows, new

    def _new(
        self, step: Step, target: Format, tensors: Mapping[str, Array], amax: float, out: Mapping[str, Array]
    ) -> Mapping[str, Array]:
        """The target's own tensors, in the arrays of `out` where there are any."""
        recipe = self.recipe
        if step.relays:
            return recipe.completed(target, tensors)
        if len(step.outputs) == 1 and step.outputs[0][1] == "F32":
            return {"weight": step.entry.format.dequantize(tensors)}
        options = {"amax": amax, "input_scale": recipe.input_scale, "exact": recipe.exact(target)}
        try:
            return self._kernels(step).requantize(step.entry.format, tensors, target, **options, out=out)
        except fast.NotFiniteError:
            refuse(not_finite(step.entry))

    def _kernels(self, step: Step) -> ModuleType:
        """The module that computes it, with the same bytes: `fast`, or `on_gpu` for what that takes, if asked for."""
        on_device = self.device == "cuda" and on_gpu.takes(step.entry.format, self.recipe.searching(step.target))
        return on_gpu if on_device else fast

    def _amax(self, step: Step) -> float:
        """That of all layers fused with this one."""
        own = self.amaxes.of(step.entry.name)
        return max(own, self.amaxes.of(step.fused)) if step.fused else own


def _strips(part: Part, stored: Mapping[str, Array], elements: int = STRIP_ELEMENTS) -> Iterator[tuple[slice, Mapping[str, Array]]]:
    """Rows of the weight, a few at a time, with the tensors that its format has for them."""
    step, entry, count = part.step, part.step.entry, part.num_rows
    begin = part.rows.start if part.rows else 0
    if len(entry.shape) != 2:
        yield slice(begin, begin + count), stored
        return
    units = row_units(entry.form) if row_units(step.form) or not step.relays else {}
    fit = max(1, elements // max(1, ROWS * entry.shape[1])) * ROWS if units else max(1, count)
    for start in range(0, count, fit):
        rows = slice(start, min(start + fit, count))
        strip = {name: a[unit_rows(len(a), units[name], rows, count)] if units.get(name) else a for name, a in stored.items()}
        yield slice(begin + rows.start, begin + rows.stop), entry.form.load(strip, (rows.stop - rows.start, entry.shape[1]))


def _name(step: Step, suffix: str) -> str:
    """Of a stored tensor."""
    return step.entry.name if len(step.outputs) == 1 else f"{step.entry.place.module}.{suffix}"


def _rooms(step: Step, rows: slice, sink: Sink) -> dict[str, Array]:
    """Where what goes by rows belongs, if the form stores the format's own tensors as they are."""
    if step.form.fields or step.relays or len(step.entry.shape) != 2:
        return {}
    units, found = row_units(step.form), {}
    for output in step.form.outputs("", (rows.stop - rows.start, step.entry.shape[1])):
        dtype = DTYPES[output.dtype]
        offset = rows.start // ROWS * units[output.suffix] * prod(output.shape[1:]) * dtype.itemsize
        if units[output.suffix] and (room := sink.room(_name(step, output.suffix), offset, output.shape, dtype)) is not None:
            found[output.suffix] = room
    return found


def _stored(step: Step, rows: slice, tensors: Mapping[str, Array]) -> Iterator[tuple[str, int, Array]]:
    """As the form stores them: name, offset and bytes of each; what does not go by rows comes with the first ones."""
    if len(step.entry.shape) != 2:
        yield "weight", 0, tensors["weight"]
        return
    units = row_units(step.form)
    for suffix, array in step.form.store(tensors, (rows.stop - rows.start, step.entry.shape[1])).items():
        if units.get(suffix):
            yield suffix, rows.start // ROWS * units[suffix] * array[:1].nbytes, array
        elif rows.start == 0:
            make = next((field.make for field in step.form.fields if field.name == suffix), None)
            yield suffix, 0, make(step.entry.shape) if make else array


def _joined(item: Format, strips: list[Mapping[str, Array]]) -> Mapping[str, Array]:
    """The format's tensors of several strips, as one."""
    units = row_units(stored_as(MODELOPT, item))
    return {name: np.concatenate([s[name] for s in strips]) if units[name] else array for name, array in strips[0].items()}
