"""Patterns of module names, few and exact: what checkpoints list as excluded, or as belonging to a scheme."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from pipeline.layouts.base import Written

__all__ = ["as_regex", "exclude_patterns", "excluded"]


def exclude_patterns(plain: Iterable[str], quantised: Iterable[str]) -> list[str]:
    """Few patterns that match every module of `plain` and none of `quantised`.

    `model.layers.1*` would also match layers 10 to 19, so a prefix is used only where nothing quantised begins with it.
    """
    ordered = sorted(quantised)
    found: set[str] = set()
    for module in plain:
        parts = module.split(".")
        for depth in range(min(3, len(parts)), len(parts)):
            prefix = ".".join(parts[:depth])
            if not _any_begins(ordered, prefix):
                found.add(prefix + "*")
                break
        else:
            found.add(module)
    return sorted(found)


def excluded(matrices: Sequence[Written]) -> list[str]:
    """Few patterns for the matrices that were not quantised."""
    plain, quantised = ({m.module for m in matrices if (m.item is None) == is_plain} for is_plain in (True, False))
    return exclude_patterns(plain, quantised)


def as_regex(pattern: str) -> str:
    """`a.b*` -> `a\\.b.*`; the expression must match from the start of a name, and a pattern without `*` all of it."""
    return re.escape(pattern.removesuffix("*")) + (".*" if pattern.endswith("*") else "$")


def _any_begins(ordered: list[str], prefix: str) -> bool:
    at = bisect_left(ordered, prefix)
    return at < len(ordered) and ordered[at].startswith(prefix)
