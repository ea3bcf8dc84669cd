"""The plan of a conversion: what becomes of each parameter, from headers and block scales, before a weight is read.

`convert` executes it and `convert --dry-run` prints it; there is no second one. The work is linear in the number of
tensors. Of an FP8 block weight the scales alone bound its magnitude, |w| <= 448 * scale, and tell of NaN and infinity
before hours have gone by. Weights that runtimes fuse need one tensor-wide scale: where a source that is quantised already
has two, both are quantised anew, with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path

import numpy as np

from pipeline.checkpoint.problems import Problem
from pipeline.checkpoint.reader import DTYPES, read_tensor, uncollected
from pipeline.checkpoint.recipe import Recipe
from pipeline.checkpoint.source import Checkpoint, Entry
from pipeline.checkpoint.writer import TensorPlan
from pipeline.core.errors import ConfigError
from pipeline.formats import Format
from pipeline.layouts import Form

__all__ = ["ConversionPlan", "OutputShard", "Step", "not_finite", "plan_conversion"]

BIAS = "e_score_correction_bias"
TENSOR_SCALES = ("weight_global_scale", "weight_scale_2", "weight_scale")
"""Where a tensor-wide scale is stored; of FP8 it is weight_scale."""


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one parameter."""

    entry: Entry
    target: Format
    form: Form
    """How the target is stored."""
    copies: bool
    """Whether the stored bytes are taken over unchanged."""
    relays: bool
    """Whether codes and scales are taken over into another layout."""
    fused: str | None
    """The parameter that must have the same tensor-wide scale."""
    outputs: tuple[TensorPlan, ...]
    amax_limit: float | None
    """What no magnitude of the weight exceeds, where its scales tell."""

    @property
    def action(self) -> str:
        """As the table says it."""
        same_type = not self.entry.quantised and self.outputs[0][1] == self.entry.main.dtype
        if self.copies or same_type:
            return "copy"
        if self.relays:
            return f"re-lay as {self.form.layout}"
        if self.target.quant_algo is None:
            return f"{'dequantise' if self.entry.quantised else 'cast'} to {self.outputs[0][1]}"
        return f"{'requantise' if self.entry.quantised else 'quantise'} to {self.target.name}"

    @property
    def needs_amax(self) -> bool:
        """Whether its codes depend on the largest magnitude of the whole tensor."""
        return self.target.tensor_scale and not self.copies and not self.relays

    @property
    def num_bytes(self) -> int:
        """What will be written for it."""
        return sum(prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in self.outputs)


@dataclass(frozen=True, slots=True)
class OutputShard:
    """One output file: the parameters whose weights lie in one source file."""

    name: str
    steps: tuple[Step, ...]

    @property
    def plan(self) -> list[TensorPlan]:
        """Its tensors."""
        return [tensor for step in self.steps for tensor in step.outputs]

    @property
    def num_source_bytes(self) -> int:
        """What is read for it."""
        return sum(step.entry.num_bytes for step in self.steps)

    @property
    def num_bytes(self) -> int:
        """What is written, the header aside."""
        return sum(step.num_bytes for step in self.steps)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Every output shard, and why the plan cannot be carried out, if so."""

    source: Checkpoint
    recipe: Recipe
    shards: tuple[OutputShard, ...]
    problems: tuple[Problem, ...]

    @property
    def steps(self) -> list[Step]:
        """Of all shards, in order."""
        return [step for shard in self.shards for step in shard.steps]


@uncollected()
def plan_conversion(source: Checkpoint, recipe: Recipe) -> ConversionPlan:
    """Plan everything; nothing is written."""
    problems: list[Problem] = []
    limits, split = _amax_limits(source, problems), _split_pairs(source)
    by_file: dict[Path, list[Step]] = {file: [] for file in source.shards}
    for entry in source.entries.values():
        try:
            step = _step(recipe, entry, limits.get(entry.name), entry.name in split)
        except ConfigError as error:
            if str(error) not in (problem.text for problem in problems[-1:]):  # a format without a form is told once
                problems.append(Problem(f"{recipe.format_of(entry.place).name} cannot hold it", entry.name, str(error)))
            continue
        by_file[entry.main.file].append(step)
    groups = [tuple(steps) for steps in by_file.values() if steps]
    names = (f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1))
    shards = tuple(OutputShard(name, steps) for name, steps in zip(names, groups, strict=True))
    return ConversionPlan(source, recipe, shards, tuple(problems))


def not_finite(entry: Entry) -> Problem:
    """NaN or infinity was found in the parameter."""
    text = (
        f"{entry.main.file} holds NaN or infinity in {entry.name} or its scales: the file is damaged, or was "
        f"never valid; download it again."
    )
    return Problem("not finite", entry.name, text)


def _step(recipe: Recipe, entry: Entry, limit: float | None, split: bool) -> Step:
    target, module = recipe.format_of(entry.place), entry.place.module
    form = recipe.form_of(target)
    if recipe.keeps(entry) and not split:
        kept = tuple((info.name, info.dtype, info.shape) for info in entry.tensors.values())
        return Step(entry, target, form, True, False, None, kept, limit)
    if entry.name.endswith(BIAS):
        return Step(entry, target, form, False, False, None, ((entry.name, "F32", entry.shape),), limit)
    relays = recipe.relays(entry) and not split
    fused = f"{entry.place.partner}.weight" if entry.place.partner and target.tensor_scale and not relays else None
    outputs = tuple((f"{module}.{o.suffix}", o.dtype, o.shape) for o in form.outputs(module, entry.shape))
    return Step(entry, target, form, False, relays, fused, outputs, limit)


def _split_pairs(source: Checkpoint) -> set[str]:
    """Weights whose fused partner is in another format, or has another tensor-wide scale."""
    paired = (entry for entry in source.entries.values() if entry.place.partner and entry.format.tensor_scale)
    scales = {entry.name: (entry.format.name, _tensor_scale(entry)) for entry in paired}
    return {name for name, scale in scales.items() if scales.get(f"{source.entries[name].place.partner}.weight") != scale}


def _tensor_scale(entry: Entry) -> bytes:
    """As it is stored; nothing where the file was cut off, which its survey has told."""
    leaf = next(leaf for leaf in TENSOR_SCALES if leaf in entry.tensors)
    try:
        return read_tensor(entry.tensors[leaf]).tobytes()
    except ConfigError:
        return b""


def _negative(entry: Entry, count: int) -> Problem:
    """Block scales below 0."""
    name = entry.tensors["weight_scale_inv"].name
    text = (
        f"{entry.main.file} has {count:,} block scales below 0 in {name}, which would turn the signs of their weights: the file "
        f"is damaged, or was never valid; download it again."
    )
    return Problem("negative scale", entry.name, text)


def _amax_limits(source: Checkpoint, problems: list[Problem]) -> dict[str, float]:
    """448 times the largest block scale of each FP8 block weight; each file is mapped once. Bad scales are problems."""
    by_file: dict[Path, list[Entry]] = {}
    for entry in source.entries.values():
        if "weight_scale_inv" in entry.tensors:
            by_file.setdefault(entry.tensors["weight_scale_inv"].file, []).append(entry)
    limits: dict[str, float] = {}
    for file, entries in by_file.items():
        raw = np.asarray(np.memmap(file, np.uint8, "r"))
        for entry in entries:
            info = entry.tensors["weight_scale_inv"]
            if info.stop > raw.size:  # the file was cut off, which its survey has told
                continue
            scales = raw[info.start : info.stop].view("<f4")
            limits[entry.name] = entry.format.limit({"weight_scale_inv": scales})
            if not isfinite(limits[entry.name]):
                problems.append(not_finite(entry))
            if count := np.count_nonzero(scales < 0):
                problems.append(_negative(entry, int(count)))
    return limits
