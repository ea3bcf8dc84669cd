"""The two places where a checkpoint says how it is quantised, both generated from the tensors that were written.

`config.json` has `quantization_config`, `hf_quant_config.json` is ModelOpt's own file; loaders read one or the other,
so they must agree. A checkpoint whose linear layers are all in DeepSeek's FP8 blocks, or all in BF16, has no second
file, which is how TensorRT-LLM expects it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.checkpoint.source import Entry
from pipeline.formats import Format

__all__ = ["exclude_patterns", "quantization_tables"]

# Loaders recognise the layout by the producer's name; the version is that whose layout is written.
PRODUCER = {"name": "modelopt", "version": "0.47.0+r1.pipeline"}
FP8_BLOCK_CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}
AWQ_FIELDS = {"has_zero_point": False, "pre_quant_scale": True}
CODINGS = {"fp8": (8, True), "nvfp4": (4, True), "w4a16_nvfp4": (4, False)}
"""Formats for which ModelOpt writes config_groups -> bits, and whether activations are coded too."""
Table = dict[str, Any]


def quantization_tables(entries: Iterable[Entry], kv_cache: str) -> tuple[Table | None, Table | None]:
    """`quantization_config` of config.json and the content of hf_quant_config.json; None where there is none."""
    matrices = [entry for entry in entries if entry.name.endswith(".weight") and len(entry.shape) == 2]
    quantised = {entry.place.module: entry.format for entry in matrices if entry.quantised}
    formats = sorted({item.name for item in quantised.values()})
    excluded = exclude_patterns({entry.place.module for entry in matrices if not entry.quantised}, quantised.keys())
    if not formats:
        return None, None
    if formats == ["fp8_block"] and all(entry.quantised for entry in matrices if entry.place.linear):
        return dict(FP8_BLOCK_CONFIG), None
    truth = _quantization(quantised, excluded)
    modelopt = truth | {"kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None}
    return _inline(formats, truth, kv_cache), {"producer": PRODUCER, "quantization": modelopt}


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


def _any_begins(ordered: list[str], prefix: str) -> bool:
    at = bisect_left(ordered, prefix)
    return at < len(ordered) and ordered[at].startswith(prefix)


def _quantization(quantised: Mapping[str, Format], excluded: list[str]) -> Table:
    """Algorithm and modules, as both files spell them."""
    layers = {module: _algo(item) for module, item in sorted(quantised.items())}
    first = next(iter(layers.values()))
    if all(layer == first for layer in layers.values()):
        return first | {"exclude_modules": excluded}
    return {"quant_algo": "MIXED_PRECISION", "exclude_modules": excluded, "quantized_layers": layers}


def _algo(item: Format) -> Table:
    table: Table = {"quant_algo": item.quant_algo} | ({"group_size": item.group_size} if item.group_size else {})
    return table | (AWQ_FIELDS if str(item.quant_algo).endswith("_AWQ") else {})


def _inline(formats: list[str], truth: Table, kv_cache: str) -> Table:
    """The form of config.json: `ignore` for `exclude_modules`, and how weights and activations are coded."""
    if formats == ["fp8_block"]:
        return FP8_BLOCK_CONFIG | {"modules_to_not_convert": truth["exclude_modules"]}
    table = {name: value for name, value in truth.items() if name != "exclude_modules"}
    table |= {"quant_method": "modelopt", "producer": PRODUCER, "ignore": truth["exclude_modules"]}
    if kv_cache == "fp8":
        table["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if len(formats) == 1 and formats[0] in CODINGS:
        table["config_groups"] = {"group_0": _config_group(*CODINGS[formats[0]], truth.get("group_size"))}
    return table


def _config_group(bits: int, activations: bool, group_size: int | None) -> Table:
    coding: Table = {"dynamic": False, "num_bits": bits, "type": "float"}
    coding |= {"group_size": group_size} if group_size else {}
    return ({"input_activations": coding} if activations else {}) | {"weights": coding, "targets": ["Linear"]}
