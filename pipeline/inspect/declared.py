"""What the configs of a checkpoint say of its quantisation.

There are two places: `quantization_config` in config.json, and ModelOpt's hf_quant_config.json. Loaders read one or the
other, and build layers by it before they see a tensor.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from pipeline.formats import get_format
from pipeline.inspect.contents import Contents, Module, table_of
from pipeline.inspect.recognise import CT, may_be
from pipeline.layouts import stored_as
from pipeline.layouts.compressed_tensors import COMPRESSED_TENSORS, scheme_of

__all__ = ["MIXED", "Declaration", "declarations", "matched"]

MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one file says."""

    file: str
    algorithm: str
    excludes: tuple[str, ...]
    kv_cache: str | None
    layers: dict[str, str]
    """Module -> algorithm, where it is said layer by layer; of compressed-tensors' groups, where tensors contradict them."""
    lists_excludes: bool = True
    """Whether its loaders quantise every linear layer that it does not exclude, lm_head and router too."""


def declarations(contents: Contents) -> list[Declaration]:
    """Of config.json and hf_quant_config.json, those that there are."""
    found = []
    inline = contents.config.get("quantization_config")
    if isinstance(inline, dict):
        excludes = inline.get("ignore") or inline.get("modules_to_not_convert") or inline.get("exclude_modules") or _dynamic(inline)
        kv_cache = "FP8" if inline.get("kv_cache_scheme") else inline.get("kv_cache_quant_algo")
        layers = _layers(inline) or _contradicted(contents, inline)
        listed = inline.get("quant_method") in ("modelopt", "compressed-tensors")
        found.append(Declaration("config.json", _algorithm(inline), _names(excludes), _word(kv_cache), layers, listed))
    own = table_of(contents.quantisation).get("quantization")
    if isinstance(own, dict):
        excludes, kv_cache = _names(own.get("exclude_modules")), _word(own.get("kv_cache_quant_algo"))
        found.append(Declaration("hf_quant_config.json", str(own.get("quant_algo")), excludes, kv_cache, _layers(own)))
    return found


def matched(pattern: str, names: list[str]) -> list[str]:
    """Modules of sorted `names` that a pattern means: a name, a prefix, a wildcard, or `re:` and an expression."""
    stem = pattern.removesuffix("*")
    if not pattern.startswith("re:") and not re.search(r"[*?\[]", stem):
        at, found = bisect_left(names, stem), []
        while at < len(names) and names[at].startswith(stem):
            if stem != pattern or names[at] == stem or names[at].startswith(stem + "."):
                found.append(names[at])
            at += 1
        return found or [name for name in names if name.endswith("." + stem)]
    try:
        matches = re.compile(pattern[3:] if pattern.startswith("re:") else translate(pattern)).match
    except re.error:
        return []
    return [name for name in names if matches(name)]


def _algorithm(inline: dict[str, Any]) -> str:
    method = str(inline.get("quant_method", ""))
    if method == "fp8":
        return "FP8_BLOCK_SCALES" if inline.get("weight_block_size") else "FP8"
    if method == "compressed-tensors":
        return method
    return str(inline.get("quant_algo") or method.upper() or "unnamed")


def _layers(table: dict[str, Any]) -> dict[str, str]:
    return {name: str(table_of(row).get("quant_algo")) for name, row in table_of(table.get("quantized_layers")).items()}


def _dynamic(inline: dict[str, Any]) -> list[str]:
    """GPTQModel's rules for layers; one that begins with `-:` leaves out what its expression matches."""
    return [f"re:{rule.removeprefix('-:')}" for rule in table_of(inline.get("dynamic")) if rule.startswith("-:")]


def _names(value: Any) -> tuple[str, ...]:
    """A list of patterns; whatever else stands there is none."""
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def _word(value: Any) -> str | None:
    return str(value) if value else None


def _contradicted(contents: Contents, inline: dict[str, Any]) -> dict[str, str]:
    """What compressed-tensors' config groups say of quantised modules that are stored otherwise, or that none targets."""
    if inline.get("quant_method") != CT:
        return {}
    groups = [table_of(group) for group in table_of(inline.get("config_groups")).values()]
    targets = {target: group for group in groups for target in _names(group.get("targets"))}
    names = sorted(name for name, module in contents.modules.items() if module.quantised)
    said: dict[str, dict[str, Any]] = {}
    for target in sorted(targets, key=lambda target: (target == "Linear", target.startswith("re:"), target)):
        for name in names if target == "Linear" else matched(target, names):
            said.setdefault(name, targets[target])
    schemes = {id(group): scheme_of(group) for group in groups}
    found = {name: schemes[id(said[name])] if name in said else "no scheme" for name in names}
    contradicted = {name: _contradiction(contents.modules[name], item) for name, item in found.items() if item}
    return {name: text for name, text in contradicted.items() if text}


def _contradiction(module: Module, item: str) -> str:
    """The scheme in words where the module is not stored so: in another format, or without the scales of its activations."""
    if not may_be(module.format, item):
        return f"{CT} {item}"
    wanted = [field.name for field in stored_as(COMPRESSED_TENSORS, get_format(item)).fields]
    missing = [name for name in wanted if name not in module.tensors]
    return f"{CT} {item} with {', '.join(missing)}" if missing else ""
