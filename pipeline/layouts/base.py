"""What an on-disk layout is: how an ecosystem names and packs the tensors of a linear layer, and declares them.

A format's arithmetic is in terms of its canonical tensors, those of `Format.outputs`. A layout has a `Form` for each
format that it can hold: which tensors are stored, and both ways between them and the canonical ones. Bits of codes and
block scales never change on the way; what is not lossless is said at the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.core.errors import ConfigError
from pipeline.formats import Format, Output
from pipeline.formats.numerics import Array

__all__ = ["MAIN_LEAVES", "Field", "Form", "Layout", "Shape", "Stored", "Table", "Written"]

MAIN_LEAVES = ("weight", "weight_packed", "qweight")
"""Names that the tensor with a layer's codes has, by layout."""

Shape = tuple[int, ...]
Table = dict[str, Any]


class Stored(Protocol):
    """What a header says of one tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...


def _same(array: Array) -> Array:
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One stored tensor of a form."""

    name: str
    """What follows the module's name: weight_packed."""
    dtypes: tuple[str, ...]
    """The type that is written, then others that are read too."""
    shape: Callable[[Shape], Shape]
    """From the weight's [N, K]."""
    role: str | None = None
    """The canonical tensor that it carries; None: it follows from the shape alone."""
    store: Callable[[Array], Array] = _same
    """From the canonical tensor."""
    load: Callable[[Array], Array] = _same
    """To the canonical tensor, up to its shape."""
    make: Callable[[Shape], Array] | None = None
    """What is stored where the canonical tensor is not there, from [N, K]."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Form:
    """How one layout stores one format. Without fields: as the format's own canonical tensors."""

    layout: str
    item: Format
    fields: tuple[Field, ...] = ()
    """The first carries the codes."""
    unpacked: Callable[[Shape], Shape] | None = None
    """[N, K] from the shape of the codes; None: by the format's own packing."""
    implied: Mapping[str, Callable[[Shape], Array]] | None = None
    """Canonical tensors that are not stored, from [N, K]."""
    finish: Callable[[dict[str, Array]], dict[str, Array]] | None = None
    """What reading more than one tensor at a time takes."""
    written: bool = True
    """False: only read."""

    def outputs(self, module: str, shape: Shape) -> tuple[Output, ...]:
        """What is stored for a weight of `shape`; refuses shapes that the format cannot hold."""
        canonical = self.item.outputs(module, shape)
        if not self.fields:
            return canonical
        return tuple(Output(field.name, field.dtypes[0], field.shape(shape)) for field in self.fields)

    def dtypes(self, name: str) -> tuple[str, ...]:
        """Types in which a stored tensor is read."""
        return next((field.dtypes for field in self.fields if field.name == name), ())

    def shape_of(self, codes: Shape) -> Shape:
        """Of the weight that is meant."""
        if len(codes) != 2:
            return codes
        if self.unpacked is not None:
            return self.unpacked(codes)
        return codes[0] * self.item.packing[0], codes[1] * self.item.packing[1]

    def misfit(self, module: str, tensors: Mapping[str, Stored], shape: Shape) -> Output | None:
        """The first tensor that the form stores otherwise; refuses shapes that the format cannot hold."""
        for output in self.outputs(module, shape):
            info = tensors[output.suffix]
            if info.shape != output.shape or info.dtype not in (output.dtype, *self.dtypes(output.suffix)):
                return output
        return None

    def load(self, stored: Mapping[str, Array], shape: Shape) -> dict[str, Array]:
        """Canonical tensors of what is stored for a weight of `shape`."""
        if not self.fields:
            return dict(stored)
        wanted = {output.suffix: output.shape for output in self.item.outputs("", shape)}
        found = {field.role: field.load(stored[field.name]) for field in self.fields if field.role}
        found = {role: array.reshape(wanted.get(role, array.shape)) for role, array in found.items()}
        found |= {role: make(shape) for role, make in (self.implied or {}).items()}
        return self.finish(found) if self.finish else found

    def store(self, canonical: Mapping[str, Array], shape: Shape) -> dict[str, Array]:
        """What to store; the inverse of `load`. Refuses canonical tensors that say something and have no place."""
        _refuse_lost(self, canonical)
        if not self.fields:
            return {output.suffix: canonical[output.suffix] for output in self.item.outputs("", shape)}
        return {field.name: _stored(field, canonical, shape) for field in self.fields}


def _stored(field: Field, canonical: Mapping[str, Array], shape: Shape) -> Array:
    if field.make is not None and field.role not in canonical:
        return field.make(shape)
    assert field.role is not None
    return field.store(canonical[field.role]).reshape(field.shape(shape))


def _refuse_lost(form: Form, canonical: Mapping[str, Array]) -> None:
    """Zero points that are not 0, and factors of the activations that are not 1, change what a weight means."""
    if form.fields:
        roles = {field.role for field in form.fields}
    else:
        roles = {output.suffix for output in form.item.outputs("", (128, 128))}
    for role, neutral in (("weight_zero_point", 0), ("pre_quant_scale", 1)):
        if role not in roles and role in canonical and (canonical[role] != neutral).any():
            raise ConfigError(
                f"A weight in {form.item.name} has a {role}, for which the layout {form.layout} has no place: keep its "
                f"layout, or convert it to another format."
            )


@dataclass(frozen=True, slots=True)
class Written:
    """One weight matrix of a finished checkpoint, for the config tables."""

    module: str
    item: Format | None
    """None: not quantised."""
    linear: bool
    """Whether runtimes build it as a layer that could be quantised."""
    mtp: bool = False


class Layout(Protocol):
    """One ecosystem's way to store quantised checkpoints."""

    name: str
    """As in the configuration: compressed_tensors."""
    reader: str
    """Who loads it, for people."""
    forms: tuple[Form, ...]
    """Where stored tensors fit several, the first wins."""
    scale_rounding: tuple[str, ...]
    """Types to which INT4 scales are rounded, one after the other, before codes are computed: loaders keep no more."""

    def tables(self, written: Iterable[Written], kv_cache: str) -> tuple[Table | None, Table | None]:
        """`quantization_config` of config.json and the content of hf_quant_config.json; None where there is none."""
