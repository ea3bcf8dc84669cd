"""Limits of a dataclass's fields, declared beside each field and checked in one place.

    threads: int = limited(0, least=0, most=1024)

`mistakes` compares every field with its type hint and its limit, and yields a sentence for each that breaks one: numbers
must be finite, a bool is no number, the items of a list and the values of a table keep the limit of their field.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

__all__ = ["MOST_TOKENS", "limited", "mistakes"]

MOST_TOKENS = 2**27
"""Beyond any context window and any held-out text: a typing error."""

_LIMIT = "limit"
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list", dict: "a table"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a value must keep beside its type."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    one_of: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """The keys that a table may have."""
    empty: bool = True
    """Whether text may be empty."""
    plain: bool = False
    """Whether text is a plain name, which can be that of a folder."""
    hint: str = ""
    """The way out, where the limit alone does not say it."""


def limited(
    default: Any = dataclasses.MISSING, *, default_factory: Callable[[], Any] | Any = dataclasses.MISSING, **limits: Any
) -> Any:
    """A dataclass field with limits: least, above, most, below, one_of, keys, empty, plain, hint."""
    metadata = {_LIMIT: Limit(**limits)}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def mistakes(record: Any, prefix: str = "") -> Iterator[str]:
    """One sentence for each field of a dataclass, or of one inside it, that breaks its type or its limit."""
    hints = _hints(type(record))
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from mistakes(value, f"{name}.")
        else:
            yield from _value(name, value, hints[field.name], field.metadata.get(_LIMIT, Limit()))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(name: str, value: Any, hint: Any, limit: Limit) -> Iterator[str]:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if Any in kinds or (value is None and type(None) in kinds):
        return
    origins = [typing.get_origin(kind) or kind for kind in kinds]
    fitting = [kind for kind, origin in zip(kinds, origins, strict=True) if _fits(value, origin)]
    if not fitting:
        wanted = " or ".join(_KINDS[origin] for origin in origins if origin in _KINDS)
        yield f"{name}={_text(value)} is {_KINDS.get(type(value), 'nothing')}, but must be {wanted}."
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _value(f"{name}[{number}]", item, typing.get_args(fitting[0])[0], limit)
    elif isinstance(value, dict):
        yield from _table(name, value, typing.get_args(fitting[0])[1], limit)
    elif isinstance(value, str):
        yield from _words(name, value, limit)
    elif not isinstance(value, bool):
        yield from _number(name, value, limit)


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _table(name: str, table: dict[str, Any], hint: Any, limit: Limit) -> Iterator[str]:
    for key, value in table.items():
        if limit.keys and key not in limit.keys:
            yield f"There is no key {name}.{key}: known are {', '.join(limit.keys)}."
        else:
            yield from _value(f"{name}.{key}", value, hint, limit)


def _words(name: str, value: str, limit: Limit) -> Iterator[str]:
    if limit.one_of and value not in limit.one_of:
        yield f"{name}={value} is not supported: choose one of {', '.join(limit.one_of)}."
    elif limit.plain and not re.fullmatch(r"\w[\w.-]*", value, re.ASCII):
        yield f"{name}={value} is no plain name: use letters, digits and '_', and after the first also '-' and '.'."
    elif not value.strip() and not limit.empty:
        yield f"{name} is empty: {limit.hint or 'give it a value'}."


def _number(name: str, value: float, limit: Limit) -> Iterator[str]:
    way_out = f"; {limit.hint}" if limit.hint else ""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{name}={value} is not a finite number: give one{way_out}."
    elif limit.least is not None and value < limit.least:
        yield f"{name}={value} is too small: it must be at least {limit.least:,}{way_out}."
    elif limit.above is not None and value <= limit.above:
        yield f"{name}={value} is too small: it must be above {limit.above:,}{way_out}."
    elif limit.most is not None and value > limit.most:
        yield f"{name}={value} is too large: it must be at most {limit.most:,}{way_out}."
    elif limit.below is not None and value >= limit.below:
        yield f"{name}={value} is too large: it must be below {limit.below:,}{way_out}."


def _text(value: Any) -> str:
    """Short, as in JSON where it differs from Python."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
