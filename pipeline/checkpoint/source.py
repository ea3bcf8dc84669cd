"""A checkpoint folder as a list of weights, each with its scales, wherever they lie.

DeepSeek's published shards do split a weight from its scale, so pairs are made over the whole folder. Which format
a weight is in follows from its type and the scales beside it, never from a config file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.digest import digest
from pipeline.checkpoint.layout import SCALE_SUFFIXES, Place, parameters, place_of
from pipeline.checkpoint.reader import TensorInfo, read_header, read_tensor
from pipeline.core.errors import ConfigError
from pipeline.formats import Format, get_format
from pipeline.formats.numerics import Array, Float32
from pipeline.models.arch import Arch

__all__ = ["Checkpoint", "Entry", "INDEX", "dequantized", "digest", "pair", "read_json"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PLAIN = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter: its weight and scales, by what follows the module's name."""

    name: str
    place: Place
    format: Format
    shape: tuple[int, ...]
    """Of the weight that is meant, not of its packed bytes."""
    tensors: dict[str, TensorInfo]

    @property
    def main(self) -> TensorInfo:
        """The tensor that carries the parameter's own name."""
        return next(info for info in self.tensors.values() if info.name == self.name)

    @property
    def quantised(self) -> bool:
        """Whether the weight needs scales to be read."""
        return self.format.quant_algo is not None

    @property
    def num_bytes(self) -> int:
        """Bytes stored, scales included."""
        return sum(info.num_bytes for info in self.tensors.values())

    def load(self) -> dict[str, Array]:
        """Views of the stored tensors."""
        return {suffix: read_tensor(info) for suffix, info in self.tensors.items()}

    def dequantized(self) -> Float32:
        """The weight in float32."""
        return self.format.dequantize(self._by_role())

    def amax(self) -> float:
        """Largest magnitude of the weight, rounded to BF16."""
        return self.format.amax(self._by_role())

    def _by_role(self) -> dict[str, Array]:
        """As formats name them: a parameter such as `e_score_correction_bias` is a plain weight to them."""
        stored = self.load()
        return stored if "weight" in stored else {"weight": next(iter(stored.values()))}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint; `entries` go by parameter name, in shard order."""

    folder: Path
    config: dict[str, Any]
    arch: Arch
    shards: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    entries: dict[str, Entry]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the configuration and every header, and refuse what does not fit together."""
        arch = Arch.from_dir(folder)
        config = read_json(folder / "config.json")
        shards, tensors = _tensors(folder)
        entries = {entry.name: entry for entry in pair(tensors, arch)}
        _check_complete(folder, arch, entries)
        return cls(folder, config, arch, shards, tensors, entries)


def dequantized(folder: Path) -> Iterator[tuple[str, Float32]]:
    """Name and float32 value of every parameter, whatever format it is stored in; one at a time in memory."""
    for entry in Checkpoint.open(folder).entries.values():
        yield entry.name, entry.dequantized()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON table, or an error that names the file."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file} must hold a JSON table, but holds {type(table).__name__}.")
    return table


def _tensors(folder: Path) -> tuple[tuple[Path, ...], dict[str, TensorInfo]]:
    """Shards and tensors, from the index or the single file."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ConfigError(f"{folder} has neither {INDEX} nor {SINGLE}: point at a Hugging Face checkpoint.")
        return (folder / SINGLE,), read_header(folder / SINGLE)
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{folder / INDEX} has no weight_map from tensor names to files: download it again.")
    shards = tuple(folder / name for name in sorted(set(weight_map.values())))
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        _merge(tensors, read_header(shard), weight_map, shard)
    if missing := weight_map.keys() - tensors.keys():
        name = min(missing)
        raise ConfigError(f"{folder / INDEX} places {name} in {weight_map[name]}, which does not hold it.")
    return shards, tensors


def _merge(tensors: dict[str, TensorInfo], header: dict[str, TensorInfo], weight_map: dict[str, str], shard: Path) -> None:
    """Add one shard's tensors, each of which the index must place there."""
    for name, info in header.items():
        if weight_map.get(name) != shard.name:
            where = weight_map.get(name, "nowhere")
            raise ConfigError(f"{shard} holds {name}, which {INDEX} places {where}: index and shard disagree.")
        tensors[name] = info


def pair(tensors: dict[str, TensorInfo], arch: Arch) -> Iterator[Entry]:
    """Join each weight with its scales; every tensor must end up in one entry."""
    scales = {name for name in tensors if name.rpartition(".")[2] in SCALE_SUFFIXES}
    used: set[str] = set()
    for name, info in tensors.items():
        if name in scales:
            continue
        module, _, leaf = name.rpartition(".")
        found = {leaf: info}
        if leaf == "weight":
            found |= {s: tensors[f"{module}.{s}"] for s in SCALE_SUFFIXES if f"{module}.{s}" in tensors}
        used.update(tensor.name for tensor in found.values())
        yield _entry(name, place_of(module, arch), found)
    if orphans := scales - used:
        name = min(orphans)
        raise ConfigError(f"{tensors[name].file} holds the scale {name}, but no shard holds its weight.")


def _entry(name: str, place: Place, tensors: dict[str, TensorInfo]) -> Entry:
    """Recognise the format from the stored types."""
    main = tensors[name.rpartition(".")[2]]
    scales = tuple(sorted(tensors.keys() - {name.rpartition(".")[2]}))
    known = {
        ("F8_E4M3", ("weight_scale_inv",)): "fp8_block",
        ("F8_E4M3", ("input_scale", "weight_scale")): "fp8",
        ("U8", ("input_scale", "weight_scale", "weight_scale_2")): "nvfp4",
    }
    kind = "bf16" if main.dtype in _PLAIN and not scales else known.get((main.dtype, scales))
    if kind is None:
        beside = f"beside {', '.join(scales)}" if scales else "without a scale"
        raise ConfigError(
            f"{main.file} stores {name} as {main.dtype} {beside}, which is no layout known here: fp8_block needs "
            f"F8_E4M3 and weight_scale_inv, fp8 F8_E4M3, weight_scale and input_scale, nvfp4 U8 and all three scales."
        )
    shape = main.shape if kind != "nvfp4" else (*main.shape[:-1], main.shape[-1] * 2)
    entry = Entry(name, place, get_format(kind), shape, tensors)
    _check_scales(entry)
    return entry


def _check_scales(entry: Entry) -> None:
    """The scales must have the shapes that the weight's implies."""
    if len(entry.tensors) == 1:
        return
    for output in entry.format.outputs(entry.place.module, entry.shape):
        info = entry.tensors[output.suffix]
        if (info.dtype, info.shape) != (output.dtype, output.shape):
            raise ConfigError(
                f"{info.file} stores {info.name} as {info.dtype}{list(info.shape)}, but {entry.format.name} weights "
                f"of shape {list(entry.shape)} need {output.dtype}{list(output.shape)}."
            )


def _check_complete(folder: Path, arch: Arch, entries: dict[str, Entry]) -> None:
    """Every parameter of the architecture must be there, with its shape."""
    for name, shape in parameters(arch):
        if name not in entries:
            raise ConfigError(
                f"{folder} lacks {name}, which its config.json implies ({arch.num_hidden_layers} layers and "
                f"{arch.num_nextn_predict_layers} MTP layers): download the missing shard, or correct config.json."
            )
        if entries[name].shape != shape:
            raise ConfigError(f"{folder} holds {name} as {list(entries[name].shape)}; config.json means {list(shape)}.")
