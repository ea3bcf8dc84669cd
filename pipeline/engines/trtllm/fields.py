"""One argument of TensorRT-LLM as a row of a version line says it: `int>=1 | null = 2048 !beta`.

Types stand between bars: int, float, bool, str, list, dict, any, null, a section (its name begins with a capital and is one of
the line's), or a word that is a value by itself. Numbers may have bounds, lists the words they hold: list(cutlass, cublaslt).
Values are judged as pydantic does by default: "8" and 8.0 are whole numbers, 0 and 1 are truth values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Field", "field_of", "shown"]

_ROW = re.compile(r"^(?P<types>.*?)(?: = (?P<default>.*?))?(?: !(?P<status>\w+))?$")
_NUMBER = re.compile(r"^(?P<kind>int|float)(?P<low>>=?-?[\d.]+)?(?P<high><=?-?[\d.]+)?$")
_LIST = re.compile(r"^list\((?P<words>.*)\)$")
_PLAIN = ("bool", "str", "list", "dict", "any", "null")
_TRUTH = ("0", "1", "true", "false", "yes", "no", "on", "off")
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Field:
    """What one argument takes."""

    types: tuple[str, ...]
    """int, float, bool, str, list, dict, any, null."""
    words: tuple[str, ...] = ()
    """Values that are allowed by themselves."""
    low: str = ""
    """Bound of numbers, with its sign: >=1."""
    high: str = ""
    holds: tuple[str, ...] = ()
    """What a list may hold; empty: anything."""
    section: str | None = None
    """Section or union whose keys a table under this argument has."""
    default: Any = None
    status: str = "stable"
    """stable, beta, prototype or deprecated."""

    def refusal(self, value: Any) -> str | None:
        """Of `value`, which is no table of a section's: "type" or "value" where the engine would refuse it, None where not."""
        if value is None:
            return None if "null" in self.types or "any" in self.types else "type"
        if isinstance(value, str) and value in self.words:
            return None
        fits = [kind for kind in self.types if _is(kind, value)]
        if not fits:
            return "value" if isinstance(value, str) and self.words else "type"
        if isinstance(value, list) and self.holds:
            return None if value and all(item in self.holds for item in value) else "value"
        if any(kind in ("int", "float") for kind in fits) and "str" not in fits:
            return None if self._within(float(value)) else "value"
        return None

    def wanted(self) -> str:
        """What it takes, for a sentence."""
        names = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list"}
        parts = [f"one of {', '.join(self.words)}"] if self.words else []
        parts += [names[kind] for kind in self.types if kind in names]
        parts += ["a table"] if self.section or "dict" in self.types else []
        parts += ["null"] if "null" in self.types else []
        bounds = " and ".join(_BOUND[sign] + number for sign, number in map(_split, filter(None, (self.low, self.high))))
        held = f" of {', '.join(self.holds)}" if self.holds else ""
        return " or ".join(parts) + held + (f" ({bounds})" if bounds else "")

    def _within(self, number: float) -> bool:
        for sign, limit in map(_split, filter(None, (self.low, self.high))):
            bound = float(limit)
            if not {">=": number >= bound, ">": number > bound, "<=": number <= bound, "<": number < bound}[sign]:
                return False
        return True


_BOUND = {">=": "at least ", ">": "above ", "<=": "at most ", "<": "below "}


def _split(bound: str) -> tuple[str, str]:
    sign = bound[:2] if bound[1] == "=" else bound[0]
    return sign, bound[len(sign) :]


def _is(kind: str, value: Any) -> bool:
    """Whether pydantic takes `value` for a `kind`."""
    if kind == "any":
        return True
    if kind == "bool":
        return isinstance(value, bool) or value in (0, 1) or (isinstance(value, str) and value.lower() in _TRUTH)
    if kind in ("int", "float"):
        return _number(kind, value)
    return isinstance(value, {"str": str, "list": list, "dict": Mapping}.get(kind, ()))


def _number(kind: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return False
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return False
    return kind == "float" or number.is_integer()


def field_of(row: str, sections: Mapping[str, Any]) -> Field:
    """Read one row; `sections` are the names that are not values.

    Raises:
        ValueError: if a type is none.
    """
    found = _ROW.match(row)
    assert found is not None  # the pattern takes any line
    types: list[str] = []
    more: dict[str, Any] = {}
    words: list[str] = []
    for text in (part.strip() for part in found["types"].split(" | ")):
        if number := _NUMBER.match(text):
            types.append(number["kind"])
            more |= {name: number[name] for name in ("low", "high") if number[name]}
        elif held := _LIST.match(text):
            types.append("list")
            more["holds"] = tuple(word.strip() for word in held["words"].split(","))
        elif text in _PLAIN:
            types.append(text)
        elif text in sections:
            more["section"] = text
        elif re.fullmatch(r"'?[\w-]+'?", text):
            words.append(text.strip("'"))
        else:
            raise ValueError(f"{text!r} in {row!r} is no type")
    return Field(tuple(types), tuple(words), default=_default(found["default"]), status=found["status"] or "stable", **more)


def _default(text: str | None) -> Any:
    if text is None or text in _WORDS:
        return _WORDS[text] if text else None
    try:
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        return text


def shown(value: Any) -> str:
    """As YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
