"""What the configs of a checkpoint say of its quantisation, against each other and against the tensors.

There are two places: `quantization_config` in config.json, and ModelOpt's hf_quant_config.json. Loaders read one or the
other, and build layers by it before they see a tensor.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from pipeline.checkpoint.problems import Problem
from pipeline.inspect.contents import Contents, Module
from pipeline.inspect.recognise import ALGORITHMS, PLAIN

__all__ = ["Declaration", "config_oddities", "declarations"]

MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one file says."""

    file: str
    algorithm: str
    excludes: tuple[str, ...]
    kv_cache: str | None
    layers: dict[str, str]
    """Module -> algorithm, where it is said layer by layer."""


def declarations(contents: Contents) -> list[Declaration]:
    """Of config.json and hf_quant_config.json, those that there are."""
    found = []
    inline = contents.config.get("quantization_config")
    if isinstance(inline, dict):
        excludes = inline.get("ignore") or inline.get("modules_to_not_convert") or inline.get("exclude_modules") or ()
        kv_cache = "FP8" if inline.get("kv_cache_scheme") else inline.get("kv_cache_quant_algo")
        found.append(Declaration("config.json", _algorithm(inline), tuple(excludes), kv_cache, _layers(inline)))
    own = (contents.quantisation or {}).get("quantization")
    if isinstance(own, dict):
        excludes, kv_cache = tuple(own.get("exclude_modules") or ()), own.get("kv_cache_quant_algo")
        found.append(Declaration("hf_quant_config.json", str(own.get("quant_algo")), excludes, kv_cache, _layers(own)))
    return found


def config_oddities(contents: Contents) -> Iterator[Problem]:
    """Of all checks."""
    found = declarations(contents)
    if len(found) == 2:
        yield from _against_each_other(*found)
    yield from _undeclared(contents, found)
    for declaration in found:
        yield from _algorithms(contents, declaration)
        yield from _excludes(contents, declaration)
        yield from _by_layer(contents, declaration)


def _algorithm(inline: dict[str, Any]) -> str:
    method = str(inline.get("quant_method", ""))
    if method == "fp8":
        return "FP8_BLOCK_SCALES" if inline.get("weight_block_size") else "FP8"
    if method == "compressed-tensors":
        return method
    return str(inline.get("quant_algo") or method.upper() or "unnamed")


def _layers(table: dict[str, Any]) -> dict[str, str]:
    layers = table.get("quantized_layers")
    return {name: str(row.get("quant_algo")) for name, row in layers.items()} if isinstance(layers, dict) else {}


def _against_each_other(one: Declaration, two: Declaration) -> Iterator[Problem]:
    for what, first, second in (
        ("algorithm", one.algorithm, two.algorithm),
        ("KV cache", one.kv_cache, two.kv_cache),
        ("number of exclude patterns", len(set(one.excludes)), len(set(two.excludes))),
    ):
        if first != second:
            text = f"{one.file} says {what} {first}, {two.file} {second}: loaders read one or the other, so some will not run it."
            yield Problem(f"configs disagree on {what}", "", text)
    if len(set(one.excludes)) == len(set(two.excludes)) and (only := sorted(set(one.excludes) - set(two.excludes))):
        text = f"{one.file} excludes {only[0]}, {two.file} does not: loaders read one or the other."
        yield Problem("configs disagree on excludes", only[0], text)


def _undeclared(contents: Contents, found: list[Declaration]) -> Iterator[Problem]:
    quantised = next((module for module in contents.modules.values() if module.quantised), None)
    if quantised is not None and not found:
        text = (
            f"{quantised.name} is {quantised.format}, but neither config.json nor hf_quant_config.json says so: loaders take "
            f"the checkpoint for BF16 and drop the scales."
        )
        yield Problem("not declared", quantised.name, text)


def _algorithms(contents: Contents, declaration: Declaration) -> Iterator[Problem]:
    """The algorithm must be what the tensors show."""
    formats = Counter(module.format for module in contents.modules.values() if module.quantised)
    shown = {ALGORITHMS.get(name, name): count for name, count in formats.items()}
    if declaration.algorithm == MIXED:
        return
    if declaration.algorithm not in shown and contents.modules:
        really = ", ".join(f"{count:,} in {name}" for name, count in formats.items()) or "nothing quantised"
        text = f"{declaration.file} says {declaration.algorithm}, the tensors show {really}: loaders build layers that do not fit."
        yield Problem("declared otherwise", "", text)
    for module in contents.modules.values():
        algorithm = ALGORITHMS.get(module.format, module.format)
        if module.quantised and declaration.algorithm in shown and algorithm != declaration.algorithm:
            text = f"{module.name} is {module.format}, but {declaration.file} says {declaration.algorithm} and not {MIXED}."
            yield Problem(f"beside what {declaration.file} says", module.name, text)


def _excludes(contents: Contents, declaration: Declaration) -> Iterator[Problem]:
    """Each pattern must match, nothing quantised must be excluded, and nothing plain be left out."""
    names = sorted(contents.modules)
    excluded: set[str] = set()
    for pattern in declaration.excludes:
        matched = _matched(pattern, names)
        excluded.update(matched)
        if not matched:
            text = f"{declaration.file} excludes {pattern}, which matches no module: what was meant will be built quantised."
            yield Problem("pattern without a module", pattern, text)
    for module in contents.modules.values():
        if module.quantised and module.name in excluded:
            text = f"{module.name} is {module.format}, but {declaration.file} excludes it: loaders build it in BF16 and read codes."
            yield Problem("excluded but quantised", module.name, text)
        elif _should_be_excluded(module, declaration) and module.name not in excluded:
            text = f"{module.name} is {module.format} and no pattern of {declaration.file} excludes it: loaders build it quantised."
            yield Problem("plain but not excluded", module.name, text)


def _should_be_excluded(module: Module, declaration: Declaration) -> bool:
    """Of a layer-by-layer declaration nothing more needs to be excluded than it does not name."""
    return module.place.linear and module.format in PLAIN and declaration.algorithm != MIXED


def _matched(pattern: str, names: list[str]) -> list[str]:
    """Modules of sorted `names` that a pattern means: a name, a prefix, a wildcard, or `re:` and an expression."""
    stem = pattern.removesuffix("*")
    if not pattern.startswith("re:") and not re.search(r"[*?\[]", stem):
        at, found = bisect_left(names, stem), []
        while at < len(names) and names[at].startswith(stem):
            if stem != pattern or names[at] == stem or names[at].startswith(stem + "."):
                found.append(names[at])
            at += 1
        return found or [name for name in names if name.endswith("." + stem)]
    matches = re.compile(pattern[3:] if pattern.startswith("re:") else translate(pattern)).match
    return [name for name in names if matches(name)]


def _by_layer(contents: Contents, declaration: Declaration) -> Iterator[Problem]:
    """Layers that are declared one by one must be stored so."""
    for name, algorithm in declaration.layers.items():
        module = contents.modules.get(name)
        if module is None:
            text = f"{declaration.file} declares {name} as {algorithm}, but no tensor of it is stored."
            yield Problem("declared layer not stored", name, text)
        elif ALGORITHMS.get(module.format) != algorithm:
            text = f"{declaration.file} declares {name} as {algorithm}, but it is {module.format}: loaders stop or misread it."
            yield Problem("declared layer otherwise", name, text)
    if declaration.algorithm == MIXED:
        for module in contents.modules.values():
            if module.quantised and module.name not in declaration.layers:
                text = f"{module.name} is {module.format}, but is not among the layers that {declaration.file} declares."
                yield Problem("layer not declared", module.name, text)
