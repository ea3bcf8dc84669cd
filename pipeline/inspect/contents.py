"""A checkpoint folder as modules, however odd it is: nothing is refused here but a folder without weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.layout import Place, classify
from pipeline.checkpoint.problems import Problem
from pipeline.checkpoint.reader import TensorInfo
from pipeline.checkpoint.source import read_stored
from pipeline.core.errors import ConfigError
from pipeline.inspect.recognise import PLAIN, UNKNOWN, recognise

__all__ = ["SCALARS", "Contents", "Module"]

SCALARS = frozenset({"weight_scale_2", "weight_scale", "input_scale", "weight_global_scale", "input_global_scale"})

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
        config = _table(folder / "config.json", problems) or {}
        quantisation = _table(folder / "hf_quant_config.json", problems)
        if not config:
            text = f"{folder} has no config.json: loaders cannot tell the architecture, and layers after the last not MTP."
            problems.append(Problem("no config", "", text))
        stored = read_stored(folder, problems.append)
        modules = _modules(stored.tensors, int(config.get("num_hidden_layers") or NO_LAYERS))
        return cls(folder, config, quantisation, stored.shards, stored.tensors, stored.lost, modules, tuple(problems))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

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
                if info.dtype == "F32" and prod(info.shape) == 1:
                    by_file.setdefault(info.file, []).append(info)
        values: dict[str, float] = {}
        for file, infos in by_file.items():
            raw = np.asarray(np.memmap(file, np.uint8, "r"))
            there = (info for info in infos if info.stop <= raw.size)
            values |= {info.name: float(raw[info.start : info.stop].view("<f4")[0]) for info in there}
        return values


def _modules(tensors: dict[str, TensorInfo], num_hidden_layers: int) -> dict[str, Module]:
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        grouped.setdefault(module, {})[leaf] = info
    return {name: Module(classify(name, num_hidden_layers), *recognise(found), found) for name, found in grouped.items()}


def _table(file: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """A JSON table; None where there is no such file, or no table in it."""
    if not file.is_file():
        return None
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(Problem("unreadable config", "", f"{file} cannot be read as JSON ({error}): loaders stop at it."))
        return None
    return table if isinstance(table, dict) else None
