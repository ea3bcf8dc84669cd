"""Which parameters are compared: all of them, or a number from each stratum.

A stratum is a layer, a projection (with the expert's number left out) and a format, so a sample leaves no layer, no
projection and no format out; what there is once, such as a layer's attention, is always compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipeline.checkpoint.source import Entry

__all__ = ["choose", "projection", "sentence"]

_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"^model\.layers\.\d+\.")


def projection(module: str) -> str:
    """model.layers.3.mlp.experts.7.up_proj -> mlp.experts.*.up_proj"""
    return _EXPERT.sub(".experts.*.", _LAYER.sub("", module))


def choose(entries: Iterable[Entry], per_stratum: int) -> list[Entry]:
    """`per_stratum` entries of each, evenly spread over the experts, in the given order; 0 takes all."""
    everything = list(entries)
    if not per_stratum:
        return everything
    strata: dict[tuple[int | None, str, str], list[str]] = {}
    for entry in everything:
        key = (entry.place.layer, projection(entry.name), entry.format.name)
        strata.setdefault(key, []).append(entry.name)
    kept = {name for names in strata.values() for name in _spread(names, per_stratum)}
    return [entry for entry in everything if entry.name in kept]


def sentence(num_chosen: int, total: int, per_stratum: int) -> str:
    """What was compared, for the report."""
    if num_chosen == total:
        return f"All {total:,} parameters were compared."
    return (
        f"{num_chosen:,} of {total:,} parameters were compared: up to {per_stratum} of each layer, projection and format, "
        f"evenly spread (verify.sample={per_stratum}); scales that cover a tensor were checked for all."
    )


def _spread(names: list[str], count: int) -> list[str]:
    """The first, the last, and others between them at equal distance, by expert number."""
    if len(names) <= count:
        return names
    names = sorted(names, key=lambda name: (len(name), name))
    last = len(names) - 1
    return [names[round(i * last / max(1, count - 1))] for i in range(count)]
