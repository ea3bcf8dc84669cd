"""Layers that runtimes run as one matrix: one format, one tensor-wide scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipeline.inspect.contents import SCALARS, Module
from pipeline.inspect.recognise import UNKNOWN
from pipeline.verify.invariants.base import ERROR, Fault, Rule, Subject
from pipeline.verify.sample import projection

__all__ = ["RULES"]


def _formats(subject: Subject) -> Iterator[Fault]:
    for one, two in _pairs(subject):
        if one.format != two.format:
            yield Fault(one.name, f"{one.name} is {one.format}, its partner {two.name} {two.format}")


def _scales(subject: Subject) -> Iterator[Fault]:
    values = subject.contents.scalars
    for one, two in _pairs(subject):
        for leaf in sorted(SCALARS):
            first, second = (values.get(f"{module.name}.{leaf}") for module in (one, two))
            if one.format == two.format and first is not None and second is not None and first != second:
                low, high = sorted((first, second))
                factor = f"{high / low:.3g}" if low > 0 else "infinity"
                yield Fault(
                    f"{one.name}.{leaf}",
                    f"{one.name} and {two.name} have {leaf} {first:.6g} and {second:.6g}, off by a factor of {factor}",
                )


def _experts(subject: Subject) -> Iterator[Fault]:
    """All routed experts of a layer go through one grouped product."""
    groups: dict[tuple[int | None, str], list[Module]] = {}
    for module in subject.contents.modules.values():
        if ".mlp.experts." in module.name and module.place.linear:
            groups.setdefault((module.place.layer, projection(module.name)), []).append(module)
    for (layer, name), modules in groups.items():
        formats = Counter(module.format for module in modules)
        if len(formats) > 1:
            usual = formats.most_common(1)[0][0]
            odd = next(module for module in modules if module.format != usual)
            others = ", ".join(f"{count} in {item}" for item, count in formats.most_common())
            yield Fault(odd.name, f"layer {layer} has {name} in several formats ({others}), {odd.name} in {odd.format}")


def _pairs(subject: Subject) -> Iterator[tuple[Module, Module]]:
    modules = subject.contents.modules
    for one in modules.values():
        two = modules.get(one.place.partner or "")
        if two is not None and one.name < two.name and UNKNOWN not in (one.format, two.format):
            yield one, two


RULES = (
    Rule(
        "formats-of-a-pair", ERROR, _formats, "runtimes run the two as one matrix and refuse, or read one of them wrongly",
        "give both layers the same format",
    ),
    Rule(
        "scales-of-a-pair", ERROR, _scales,
        "runtimes keep one for both without rescaling the block scales, so all weights of the other are wrong by that factor",
        "quantise the two again with the larger amax of both",
    ),
    Rule(
        "formats-of-experts", ERROR, _experts, "runtimes load the experts of a layer as one tensor, in one format",
        "give all routed experts of a layer one format",
    ),
)  # fmt: skip
