"""The values of scales: finite, above 0, there for every expert, and large enough for their blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from pipeline.inspect.contents import Module, read_table, table_of
from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Fault, Rule, Subject

if TYPE_CHECKING:
    from pipeline.verify.invariants.scan import Scan

__all__ = ["RULES"]

W4A4 = frozenset({"NVFP4"})
"""Algorithms whose activations have a static scale."""
WEIGHT_ONLY = frozenset({"nvfp4_weight_only"})
SATURATED = 0.001
"""Share of block scales at 448 above which the tensor's scale must be too small: of normal weights a handful are."""
MANY = 8
"""Fewer blocks than this may be there by chance."""
NOT_WEIGHTS = ("input_scale", "input_global_scale", "k_scale", "v_scale")


def _unusable(subject: Subject) -> Iterator[Fault]:
    for name, value in subject.contents.scalars.items():
        if not isfinite(value) or value <= 0:
            yield Fault(name, f"{name} is {value:g}")


def _nan_blocks(subject: Subject) -> Iterator[Fault]:
    for name, scan in _blocks(subject):
        if scan.not_finite:
            yield Fault(name, f"{name} has {scan.not_finite:,} of {scan.elements:,} values that are NaN or infinite")


def _negative_blocks(subject: Subject) -> Iterator[Fault]:
    for name, scan in _blocks(subject):
        if scan.negative:
            yield Fault(name, f"{name} has {scan.negative:,} of {scan.elements:,} values below 0")


def _zero_blocks(subject: Subject) -> Iterator[Fault]:
    for name, scan in _blocks(subject):
        if scan.zero:
            yield Fault(name, f"{name} has {scan.zero:,} of {scan.elements:,} values that are 0")


def _saturated(subject: Subject) -> Iterator[Fault]:
    if _searched(subject):
        return
    for name, scan in _blocks(subject):
        if scan.at_top >= MANY and scan.at_top > SATURATED * scan.elements:
            yield Fault(name, f"{name} has {scan.at_top:,} of {scan.elements:,} block scales at 448, the largest there is")


def _searched(subject: Subject) -> bool:
    """Whether our convert took the block scales of least error: those of the largest blocks end at 448 by choice."""
    recipe = table_of((read_table(subject.contents.folder / "conversion.json", []) or {}).get("recipe"))
    return str(recipe.get("nvfp4_scale_search")).startswith("mse")


def _missing_input_scale(subject: Subject) -> Iterator[Fault]:
    """Some of a class have it, others not."""
    counts = Counter((module.place.kind, _base(module)) for module in subject.contents.modules.values() if _has_input(module))
    for module in subject.contents.modules.values():
        if module.quantised and not _has_input(module) and counts[module.place.kind, _base(module)]:
            yield Fault(f"{module.name}.input_scale", f"{module.name} has no input_scale, other {module.place.kind} have")


def _no_input_scale_at_all(subject: Subject) -> Iterator[Fault]:
    algorithms = {declared.algorithm for declared in subject.declared}
    weight_only = [module for module in subject.contents.modules.values() if module.format in WEIGHT_ONLY]
    some = any(module.format == "nvfp4" for module in subject.contents.modules.values())
    if algorithms & W4A4 and not some:
        for module in weight_only:
            yield Fault(f"{module.name}.input_scale", f"{module.name} has no input_scale, though NVFP4 (W4A4) is declared")


def _rounded_global(subject: Subject) -> Iterator[Fault]:
    """Observers that run in the model's type give numbers that BF16 can hold; by chance one in 65,536 is."""
    values = {n: v for n, v in subject.contents.scalars.items() if n.endswith(("weight_global_scale", "weight_scale_2"))}
    bits = np.array(list(values.values()), np.float32).view(np.uint32) if values else np.empty(0, np.uint32)
    if len(values) >= MANY and not (bits & 0xFFFF).any() and len(set(values.values())) > 1:
        name = next(iter(values))
        yield Fault(name, f"all {len(values):,} tensor-wide scales, {name} first, are BF16 numbers")


def _blocks(subject: Subject) -> Iterator[tuple[str, Scan]]:
    """Scans of scales that are not one number, which other rules look at."""
    for name, scan in subject.scans.items():
        if name not in subject.contents.scalars and not name.endswith(NOT_WEIGHTS):
            yield name, scan


def _has_input(module: Module) -> bool:
    return bool({"input_scale", "input_global_scale"} & module.tensors.keys())


def _base(module: Module) -> str:
    """The format but for its activations."""
    return "nvfp4" if module.format == "nvfp4_weight_only" else module.format


RULES = (
    Rule(
        "unusable-scale", ERROR, _unusable,
        "it divides or multiplies a whole layer, whose outputs become NaN or 0 (a tensor of zeros and an expert that "
        "calibration never reached are the usual causes)",
        "quantise the layer again with a positive amax: 1.0 for a tensor of zeros, the weight's own for an unseen expert",
    ),
    Rule(
        "nan-block-scale", ERROR, _nan_blocks, "every prompt that reaches such a block gives NaN",
        "quantise the layer again, with block scales clamped to [2^-9, 448]",
    ),
    Rule("negative-block-scale", ERROR, _negative_blocks, "the block's weights change sign", "quantise the layer again"),
    Rule(
        "zero-block-scale", WARNING, _zero_blocks, "the block's weights are lost, and kernels that divide by it give NaN",
        "clamp block scales to the least positive number; a block of zeros takes 1",
    ),
    Rule(
        "saturated-block-scale", WARNING, _saturated,
        "the tensor's scale is too small for its blocks, whose largest weights were clipped (an amax of one shard or of one half "
        "of a fused layer is the usual cause)",
        "quantise the layer again with the amax of the whole tensor",
    ),
    Rule(
        "missing-input-scale", ERROR, _missing_input_scale, "loaders fill in 0, and prompts that reach it give NaN",
        "give every expert an input_scale: that of its neighbours, or 1.0",
    ),
    Rule(
        "w4a4-without-input-scale", ERROR, _no_input_scale_at_all,
        "loaders multiply by whatever memory holds, often 0",
        "declare W4A16_NVFP4 in both configs, or write input_scale",
    ),
    Rule(
        "rounded-global-scale", NOTE, _rounded_global,
        "the quantiser's observer ran in BF16, so bytes differ from those of the exact scale, for about 0.01 dB",
        "compute amax in float32",
    ),
)  # fmt: skip
