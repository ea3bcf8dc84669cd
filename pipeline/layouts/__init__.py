"""On-disk layouts, by the name that the configuration uses. A new layout is one file and one entry here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from pipeline.core.errors import ConfigError
from pipeline.formats import Format, get_format
from pipeline.layouts.autoawq import AUTOAWQ
from pipeline.layouts.base import MAIN_LEAVES, Form, Layout, Written
from pipeline.layouts.compressed_tensors import COMPRESSED_TENSORS
from pipeline.layouts.gptq import GPTQ
from pipeline.layouts.modelopt import MODELOPT

__all__ = ["LAYOUTS", "MAIN_LEAVES", "PLAIN", "SCALE_LEAVES", "Form", "Layout", "Written", "forms_like", "get_layout", "stored_as"]

LAYOUTS: dict[str, Layout] = {item.name: item for item in (MODELOPT, COMPRESSED_TENSORS, AUTOAWQ, GPTQ)}
"""The order is that of preference where tensors fit more than one."""


def get_layout(name: str) -> Layout:
    """The layout of that name."""
    if name not in LAYOUTS:
        raise ConfigError(f"{name!r} is not an on-disk layout: choose one of {', '.join(LAYOUTS)}.")
    return LAYOUTS[name]


def stored_as(layout: Layout, item: Format) -> Form:
    """How the layout stores the format; refuses formats for which it has no form. BF16 is the same everywhere."""
    if item.quant_algo is None:
        return PLAIN
    for form in layout.forms:
        if form.item is item and form.written:
            return form
    able = [name for name, other in LAYOUTS.items() if any(form.item is item and form.written for form in other.forms)]
    holds = ", ".join(dict.fromkeys(form.item.name for form in layout.forms if form.written))
    raise ConfigError(
        f"The layout {layout.name} has no form for {item.name}, only for {holds}: set quant.layout to one of {', '.join(able)}."
    )


def forms_like(dtype: str, names: Iterable[str]) -> list[Form]:
    """The forms whose tensors have those names, with codes of that type; the first name is that of the codes."""
    ordered = tuple(names)
    return _by_signature().get((ordered[0], dtype, frozenset(ordered)), [])


PLAIN = next(form for form in MODELOPT.forms if form.item is get_format("bf16"))


def _signatures(form: Form) -> Iterable[tuple[str, str, frozenset[str]]]:
    outputs = form.outputs("", (128, 128))
    names = frozenset(output.suffix for output in outputs)
    return [(outputs[0].suffix, dtype, names) for dtype in form.dtypes(outputs[0].suffix) or (outputs[0].dtype,)]


@cache
def _by_signature() -> dict[tuple[str, str, frozenset[str]], list[Form]]:
    table: dict[tuple[str, str, frozenset[str]], list[Form]] = {}
    for layout in LAYOUTS.values():
        for form in layout.forms:
            for signature in _signatures(form):
                table.setdefault(signature, []).append(form)
    return table


SCALE_LEAVES = frozenset(name for _, _, names in _by_signature() for name in names) - set(MAIN_LEAVES)
"""Every tensor beside the codes that some form has."""
