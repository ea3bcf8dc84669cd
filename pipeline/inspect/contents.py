"""A checkpoint folder as modules, however odd it is: nothing is refused here but a folder without weights."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.layout import Place, classify
from pipeline.checkpoint.problems import Problem
from pipeline.checkpoint.reader import TensorInfo, read_header
from pipeline.checkpoint.source import INDEX, Stored, read_stored
from pipeline.core.errors import ConfigError
from pipeline.inspect.recognise import PLAIN, UNKNOWN, recognise

__all__ = ["SCALARS", "Contents", "Module", "read_table", "table_of", "whole"]

SCALARS = frozenset(
    {"weight_scale_2", "weight_scale", "input_scale", "weight_global_scale", "input_global_scale", "k_scale", "v_scale"}
)

NO_LAYERS = 10**9
"""Stands for the number of layers where config.json does not tell it: no layer counts as MTP then."""


@dataclass(frozen=True, slots=True)
class Module:
    """What one module stores."""

    place: Place
    format: str
    shape: tuple[int, ...]
    """Of the weight that is meant; empty where it cannot be told."""
    tensors: dict[str, TensorInfo]
    """By what follows the module's name."""

    @property
    def name(self) -> str:
        """Of the module."""
        return self.place.module

    @property
    def quantised(self) -> bool:
        """Whether the weight needs scales to be read."""
        return self.format not in PLAIN and self.format != UNKNOWN

    @property
    def matrix(self) -> bool:
        """Whether its weight is one."""
        return len(self.shape) == 2

    @property
    def num_bytes(self) -> int:
        """On disk, scales included."""
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """Elements, scales aside."""
        others = (leaf for leaf in ("bias", "e_score_correction_bias") if leaf in self.tensors)
        return (prod(self.shape) if self.shape else 0) + sum(prod(self.tensors[leaf].shape) for leaf in others)


@dataclass(frozen=True)
class Contents:
    """Everything that headers and configs tell."""

    folder: Path
    config: dict[str, Any]
    quantisation: dict[str, Any] | None
    """hf_quant_config.json."""
    shards: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    lost: frozenset[str]
    modules: dict[str, Module]
    problems: tuple[Problem, ...]
    """What was wrong with the files themselves."""

    @classmethod
    def open(cls, folder: Path) -> Contents:
        """Read configs and headers."""
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: name a Hugging Face checkpoint folder.")
        problems: list[Problem] = []
        config = read_table(folder / "config.json", problems) or {}
        if not config and not problems:
            text = f"{folder} has no config.json with settings: loaders cannot tell the architecture, nor which layers are MTP."
            problems.append(Problem("no config", "", text))
        quantisation = read_table(folder / "hf_quant_config.json", problems)
        stored = _stored(folder, problems)
        modules = _modules(stored.tensors, whole(config, "num_hidden_layers") or NO_LAYERS)
        return cls(folder, config, quantisation, stored.shards, stored.tensors, stored.lost, modules, tuple(problems))

    @classmethod
    def without_weights(cls, folder: Path, reason: str) -> Contents:
        """Of a folder in which `open` found no weights."""
        problem = Problem("no weights", "", reason)
        return cls(folder, read_table(folder / "config.json", []) or {}, None, (), {}, frozenset(), {}, (problem,))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def num_layers(self) -> int:
        """Of the main model; 0 where config.json does not tell."""
        return whole(self.config, "num_hidden_layers")

    @property
    def num_mtp_layers(self) -> int:
        """Those that config.json announces."""
        return whole(self.config, "num_nextn_predict_layers")

    @cached_property
    def mtp_layers(self) -> list[int]:
        """Layers that are stored after the last one of config.json."""
        return sorted({m.place.layer for m in self.modules.values() if m.place.kind == "mtp" and m.place.layer is not None})

    @cached_property
    def scalars(self) -> dict[str, float]:
        """Tensor-wide scales, by tensor; each file is mapped once."""
        by_file: dict[Path, list[TensorInfo]] = {}
        for module in self.modules.values():
            for leaf in sorted(SCALARS & module.tensors.keys()):
                info = module.tensors[leaf]
                if info.dtype == "F32" and prod(info.shape) == 1 and len(info.shape) <= 1:
                    by_file.setdefault(info.file, []).append(info)
        values: dict[str, float] = {}
        for file, infos in by_file.items():
            raw = np.asarray(np.memmap(file, np.uint8, "r"))
            there = (info for info in infos if info.stop <= raw.size)
            values |= {info.name: float(raw[info.start : info.stop].view("<f4")[0]) for info in there}
        return values


def whole(table: dict[str, Any], key: str) -> int:
    """A count of a config; 0 where it is absent or no count."""
    value = table.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def table_of(value: Any) -> dict[str, Any]:
    """A table of a config; an empty one where it is absent or none."""
    return value if isinstance(value, dict) else {}


def _stored(folder: Path, problems: list[Problem]) -> Stored:
    """By the index; where that cannot be read, everything that lies there."""
    try:
        return _with_unlisted(read_stored(folder, problems.append), problems)
    except ConfigError as error:
        files = tuple(sorted(folder.glob("*.safetensors")))
        if not (folder / INDEX).is_file() or not files:
            raise
        problems.append(Problem("unreadable index", "", str(error)))
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        try:
            tensors |= read_header(file, problems.append)
        except ConfigError as error:
            problems.append(Problem("unreadable file", "", str(error)))
    return Stored(files, tensors, frozenset())


def _with_unlisted(stored: Stored, problems: list[Problem]) -> Stored:
    """What the shards hold and the index forgets is looked at as well, or each scale of it would look lost."""
    unlisted = {problem.tensor for problem in problems if problem.kind == "tensor without index"}
    if not unlisted:
        return stored
    tensors = dict(stored.tensors)
    for file in stored.shards:
        with suppress(ConfigError):
            tensors |= {name: info for name, info in read_header(file, lambda problem: None).items() if name in unlisted}
    return replace(stored, tensors=tensors)


def _modules(tensors: dict[str, TensorInfo], num_hidden_layers: int) -> dict[str, Module]:
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        grouped.setdefault(module, {})[leaf] = info
    return {name: Module(classify(name, num_hidden_layers), *recognise(found), found) for name, found in grouped.items()}


def read_table(file: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """A JSON table; None where there is no such file, or no table in it."""
    if not file.is_file():
        return None
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(Problem("unreadable config", "", f"{file} cannot be read as JSON ({error}): loaders stop at it."))
        return None
    if not isinstance(table, dict):
        text = f"{file} holds no JSON table, but {type(table).__name__}: loaders stop at it."
        problems.append(Problem("unreadable config", "", text))
        return None
    return table
