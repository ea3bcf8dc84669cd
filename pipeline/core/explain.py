"""Why a stage runs: the leaves of its key that differ from the nearest earlier result."""

from __future__ import annotations

from typing import Any

from pipeline.core.key import flatten

__all__ = ["changed_leaves", "explain_miss"]

_SHOWN = 3


def explain_miss(parts: dict[str, Any], earlier: list[dict[str, Any]]) -> str:
    """One line: `quant.name was fp8_block, is nvfp4`, or that there is no earlier result."""
    if not earlier:
        return "no earlier result"
    changes = min((changed_leaves(old, parts) for old in earlier), key=len)
    if not changes:
        return "its earlier result is damaged or incomplete"
    more = f" (and {len(changes) - _SHOWN} more)" if len(changes) > _SHOWN else ""
    return "; ".join(changes[:_SHOWN]) + more


def changed_leaves(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Sentences, one a changed leaf, the user's own choices (config) first."""
    before, after = _leaves(old), _leaves(new)
    names = [name for name in [*after, *(before.keys() - after.keys())] if before.get(name) != after.get(name)]
    return [_sentence(name, before.get(name), after.get(name)) for name in sorted(names, key=_rank)]


def _leaves(parts: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """{(part, leaf): value}; leaf names may hold dots and slashes, so parts are not flattened into one string."""
    leaves: dict[tuple[str, str], Any] = {}
    for part, value in parts.items():
        named = flatten(value) if part not in ("code", "inputs", "toolchain") else value
        leaves |= {(part, leaf): entry for leaf, entry in named.items()} if isinstance(value, dict) else {(part, ""): value}
    return leaves


def _rank(name: tuple[str, str]) -> tuple[int, str]:
    order = ("config", "inputs", "toolchain", "code", "version", "stage", "schema")
    return order.index(name[0]) if name[0] in order else len(order), name[1]


def _sentence(name: tuple[str, str], old: Any, new: Any) -> str:
    part, leaf = name
    match part:
        case "code":
            return f"code {leaf} {'was added' if old is None else 'is gone' if new is None else 'changed'}"
        case "inputs":
            return f"{leaf} has other content ({str(old)[:8]} -> {str(new)[:8]})"
        case "toolchain":
            return f"toolchain {leaf} was {old}, is {new}"
        case _:
            return f"{leaf or part} was {_text(old)}, is {_text(new)}"


def _text(value: Any) -> str:
    """As in YAML; `0 == False`, so types are asked first."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
