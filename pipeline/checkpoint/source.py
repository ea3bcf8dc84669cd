"""A checkpoint folder as a list of weights, each with its scales, wherever they lie.

DeepSeek's published shards do split a weight from its scale, so pairs are made over the whole folder. Which format
a weight is in, and in which tool's layout, follows from its tensors' names, types and shapes, never from a config file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.digest import digest
from pipeline.checkpoint.layout import Place, parameters, place_of
from pipeline.checkpoint.problems import Problem, Report, refuse, refuse_all
from pipeline.checkpoint.reader import TensorInfo, read_header, read_tensor, uncollected
from pipeline.core.errors import ConfigError
from pipeline.formats import FORMATS, Format
from pipeline.formats.numerics import Array, Float32
from pipeline.layouts import MAIN_LEAVES, PLAIN, SCALE_LEAVES, Form, forms_like
from pipeline.models.arch import Arch

__all__ = ["INDEX", "Checkpoint", "Entry", "Stored", "dequantized", "digest", "pair", "read_json", "read_stored"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PLAIN = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter: its weight and scales, by what follows the module's name."""

    name: str
    """As if it were not quantised: `X.weight`, whatever its codes are called."""
    place: Place
    form: Form
    """How it is stored: its format, and whose layout."""
    shape: tuple[int, ...]
    """Of the weight that is meant, not of its packed bytes."""
    tensors: dict[str, TensorInfo]
    """The codes first."""

    @property
    def format(self) -> Format:
        """Of the weight."""
        return self.form.item

    @property
    def main(self) -> TensorInfo:
        """The tensor that carries the weight or its codes."""
        return next(iter(self.tensors.values()))

    @property
    def quantised(self) -> bool:
        """Whether the weight needs scales to be read."""
        return self.format.quant_algo is not None

    @property
    def num_bytes(self) -> int:
        """Bytes stored, scales included."""
        return sum(info.num_bytes for info in self.tensors.values())

    def stored(self) -> dict[str, Array]:
        """Views of the tensors as they are stored."""
        return {suffix: read_tensor(info) for suffix, info in self.tensors.items()}

    def load(self) -> dict[str, Array]:
        """The format's own tensors, those of `Format.outputs`, whoever wrote the checkpoint: views where nothing needs work.

        Two differences: `input_scale` is missing where the layout has none, `weight_zero_point` is there where codes
        have one. A parameter that is no weight goes by its own name.
        """
        return self.form.load(self.stored(), self.shape)

    def dequantized(self) -> Float32:
        """The weight in float32."""
        return self.format.dequantize(self._by_role())

    def amax(self) -> float:
        """Largest magnitude of the weight, rounded to BF16."""
        return self.format.amax(self._by_role())

    def _by_role(self) -> dict[str, Array]:
        """As formats name them: a parameter such as `e_score_correction_bias` is a plain weight to them."""
        tensors = self.load()
        return tensors if "weight" in tensors else {"weight": next(iter(tensors.values()))}


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
        """Read the configuration and every header, and refuse what does not fit together, all of it at once."""
        checkpoint, problems = cls.survey(folder)
        refuse_all(problems)
        return checkpoint

    @classmethod
    @uncollected()
    def survey(cls, folder: Path) -> tuple[Checkpoint, list[Problem]]:
        """What can be understood of the folder, and everything that does not fit together."""
        arch = Arch.from_dir(folder)
        config = read_json(folder / "config.json")
        problems: list[Problem] = []
        stored = read_stored(folder, problems.append)
        entries = {entry.name: entry for entry in pair(stored.tensors, arch, problems.append, stored.lost)}
        known = stored.lost | {f"{name.rpartition('.')[0]}.weight" for name in stored.lost}
        known |= {problem.tensor for problem in problems}
        problems += _incomplete(folder, arch, entries, known)
        return cls(folder, config, arch, stored.shards, stored.tensors, entries), problems


@dataclass(frozen=True, slots=True)
class Stored:
    """What the shards of a folder hold."""

    shards: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    lost: frozenset[str]
    """Tensors that the index places in files which cannot be read."""


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


def read_stored(folder: Path, report: Report) -> Stored:
    """Every header of the folder, by its index where it has one."""
    weight_map = _weight_map(folder, report)
    names = set(weight_map.values()) if weight_map is not None else {file.name for file in folder.glob("*.safetensors")}
    shards = tuple(folder / name for name in sorted(names))
    tensors: dict[str, TensorInfo] = {}
    strays: list[TensorInfo] = []
    unread: set[str] = set()
    for shard in shards:
        try:
            header = read_header(shard, report)
        except ConfigError as error:
            report(Problem("unreadable file", "", str(error)))
            unread.add(shard.name)
            continue
        file = shard.name
        for name, info in header.items():
            at_home = name not in tensors if weight_map is None else weight_map.get(name) == file
            if at_home:
                tensors[name] = info
            else:
                strays.append(info)
    placed = weight_map or {}
    _report_strays(strays, tensors, placed, report)
    lost = frozenset(name for name, file in placed.items() if file in unread)
    for name in sorted(placed.keys() - tensors.keys() - lost):
        text = f"{folder / INDEX} places {name} in {placed[name]}, which does not hold it."
        report(Problem("index without tensor", name, text))
    return Stored(shards, tensors, lost)


def _weight_map(folder: Path, report: Report) -> dict[str, str] | None:
    """The index; None without one, which is right only for a single file."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f"{folder / INDEX} has no weight_map from tensor names to files: download it again.")
        return weight_map
    if (folder / SINGLE).is_file():
        return dict.fromkeys(read_header(folder / SINGLE, lambda problem: None), SINGLE)
    text = f"{folder} has neither {INDEX} nor {SINGLE}: point at a Hugging Face checkpoint."
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(text)
    report(Problem("no index", "", text))
    return None


def _report_strays(
    strays: list[TensorInfo], tensors: dict[str, TensorInfo], weight_map: dict[str, str], report: Report
) -> None:
    """Tensors that lie in another file than the index says, or in a second one."""
    for info in strays:
        if info.name in tensors:
            files = f"{tensors[info.name].file.name} and {info.file.name}"
            text = f"{info.file.parent} stores {info.name} in both {files}: loaders take either, remove one of them."
            report(Problem("name in two shards", info.name, text))
        else:
            where = weight_map.get(info.name, "nowhere")
            text = f"{info.file} holds {info.name}, which {INDEX} places {where}: index and shard disagree."
            report(Problem("tensor without index", info.name, text))


def pair(
    tensors: dict[str, TensorInfo], arch: Arch, report: Report = refuse, lost: frozenset[str] = frozenset()
) -> Iterator[Entry]:
    """Join each weight with its scales; every tensor must end up in one entry. Weights with `lost` scales are left out."""
    scales: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in SCALE_LEAVES:
            scales.setdefault(module, {})[leaf] = info
    halved = {name.rpartition(".")[0] for name in lost if name.rpartition(".")[2] in SCALE_LEAVES.union(MAIN_LEAVES)}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in SCALE_LEAVES:
            continue
        found = {leaf: info} | (scales.pop(module, {}) if leaf in MAIN_LEAVES else {})
        if leaf in MAIN_LEAVES and module in halved:
            continue
        entry = _entry(f"{module}.weight" if leaf in MAIN_LEAVES else name, place_of(module, arch), found)
        if isinstance(entry, Entry):
            yield entry
        else:
            report(entry)
    for module, left in scales.items():
        for name in sorted(info.name for info in left.values() if module not in halved):
            text = f"{tensors[name].file} holds the scale {name}, but no shard holds its weight."
            report(Problem("orphan scale", name, text))


def _entry(name: str, place: Place, tensors: dict[str, TensorInfo]) -> Entry | Problem:
    """Recognise the form from what is stored; where it could be several, it is the first that fits."""
    main = next(iter(tensors.values()))
    plain = main.dtype in _PLAIN and len(tensors) == 1
    forms = [PLAIN] if plain else forms_like(main.dtype, tensors)
    entries = [Entry(name, place, form, form.shape_of(main.shape), tensors) for form in forms]
    faults = [_scale_fault(entry) for entry in entries]
    for entry, fault in zip(entries, faults, strict=True):
        if fault is None:
            return entry
    return faults[0] if faults and faults[0] else _unknown_layout(main, sorted(tensors.keys() - set(MAIN_LEAVES)))


def _unknown_layout(main: TensorInfo, scales: list[str]) -> Problem:
    beside = f"beside {', '.join(scales)}" if scales else "without a scale"
    text = (
        f"{main.file} stores {main.name} as {main.dtype} {beside}, which is no layout known here: fp8_block needs "
        f"F8_E4M3 and weight_scale_inv, fp8 F8_E4M3, weight_scale and input_scale, nvfp4 U8 and all three scales; "
        f"the others are {', '.join(name for name in FORMATS if name not in ('fp8_block', 'fp8', 'nvfp4'))}."
    )
    return Problem("missing scale" if main.dtype == "F8_E4M3" else "unknown layout", main.name, text)


def _scale_fault(entry: Entry) -> Problem | None:
    """The tensors must have the shapes that the weight's implies."""
    if len(entry.tensors) == 1:
        return None
    try:
        wanted = entry.form.misfit(entry.place.module, entry.tensors, entry.shape)
    except ConfigError as error:
        return Problem("shape", entry.name, str(error))
    if wanted is None:
        return None
    info = entry.tensors[wanted.suffix]
    text = (
        f"{info.file} stores {info.name} as {info.dtype}{list(info.shape)}, but {entry.format.name} weights "
        f"of shape {list(entry.shape)} need {wanted.dtype}{list(wanted.shape)}."
    )
    return Problem("shape of a scale", entry.name, text)


def _incomplete(folder: Path, arch: Arch, entries: dict[str, Entry], known: set[str] | frozenset[str]) -> Iterator[Problem]:
    """Every parameter of the architecture must be there, with its shape; those of `known` problems are not told again."""
    for name, shape in parameters(arch):
        if name in entries and entries[name].shape != shape:
            stored = list(entries[name].shape)
            text = f"{folder} holds {name} as {stored}; config.json means {list(shape)}."
            yield Problem("shape", name, text)
        elif name not in entries and name not in known:
            text = (
                f"{folder} lacks {name}, which its config.json implies ({arch.num_hidden_layers} layers and "
                f"{arch.num_nextn_predict_layers} MTP layers): download the missing shard, or correct config.json."
            )
            yield Problem("missing parameter", name, text)
