"""The weights of a network, from a checkpoint in any format, mapped from disk.

A matrix of one module is a view of the checkpoint's file. Experts lie apart there and must be one block in the engine, so
they are copied into scratch files, which are mapped too: their pages belong to the page cache, not to this process.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.checkpoint import Checkpoint, Entry
from pipeline.core.errors import StageError
from pipeline.engines.tensorrt.network.linear import NATIVE, Named, Stored, repack_int4
from pipeline.engines.tensorrt.network.payload import LARGEST
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.formats.numerics import BF16, Array, Float32

__all__ = ["Weights", "cut", "travel_scale"]


class Weights:
    """Weights by the name of their module."""

    def __init__(self, checkpoint: Checkpoint, scratch: Path, dtype: str, *, values: bool = True) -> None:
        """Without `values` stacks of experts are zeros that take no space: for networks whose weights are inputs."""
        self._entries = checkpoint.entries
        self._scratch = Path(tempfile.mkdtemp(prefix="weights-", dir=scratch))
        self._values = values
        self._plain_dtype = np.dtype(np.float32) if dtype == "float32" else BF16
        self.used: Counter[str] = Counter()
        """Elements in each format, as the engine has them."""
        self.dequantized: Counter[str] = Counter()
        """Elements that were stored in a format which the engine does not have, by that format."""

    def vector(self, module: str, leaf: str = "weight") -> Named:
        """A parameter that is never quantised: norms, the router, the embedding."""
        entry = self._entries[f"{module}.{leaf}"]
        return Named(entry.name, next(iter(entry.load().values())))

    def matrix(self, module: str) -> Stored:
        """The weight [N, K] of a linear layer."""
        return self._counted(self._native(self._entries[f"{module}.weight"]))

    def heads(self, module: str, head_dim: int, spec: Spec) -> Stored:
        """The rows of this rank's heads."""
        return self._counted(self._part(self._entries[f"{module}.weight"], 0, spec.heads * head_dim, spec))

    def columns(self, module: str, spec: Spec) -> Stored:
        """Of the output projection, the columns of this rank's heads."""
        return self._counted(self._part(self._entries[f"{module}.weight"], 1, spec.heads * spec.arch.v_head_dim, spec))

    def dequantized_heads(self, module: str, head_dim: int, spec: Spec) -> Named:
        """kv_b_proj [heads of this rank, head_dim, L] in BF16: both of its factors are folded into attention."""
        entry = self._entries[f"{module}.weight"]
        values = self._plain(entry, entry.dequantized()).tensors["weight"].reshape(-1, head_dim, entry.shape[1])
        mine = values[spec.rank * spec.heads : (spec.rank + 1) * spec.heads] if spec.parallel == "tp" else values
        self.used["bf16"] += mine.size
        return Named(entry.name, mine)

    def format_of_experts(self, prefix: str, numbers: Sequence[int]) -> str:
        """As the engine holds them."""
        stored = self._as_stored(self._entries[f"{prefix}.experts.{numbers[0]}.gate_proj.weight"])
        return stored.format if stored else "bf16"

    def gate_up(self, prefix: str, numbers: Sequence[int]) -> Stored:
        """Each expert's gate above its up, [E, 2 I, H]."""
        names = (f"{prefix}.experts.{number}.{kind}_proj.weight" for number in numbers for kind in ("gate", "up"))
        halves = self._counted(self._stack(f"{prefix}.experts.gate_up_proj", [self._native(self._entries[name]) for name in names]))
        leaves = {leaf: value.reshape(len(numbers), -1, value.shape[2]) for leaf, value in halves.tensors.items()}
        return Stored(halves.name, halves.format, leaves, leaves["weight"].shape)

    def experts(self, prefix: str, numbers: Sequence[int], kinds: Sequence[str] = ("gate", "up", "down")) -> Iterator[Stored]:
        """Gate, up and down of the experts `numbers`, each one stack."""
        for kind in kinds:
            parts = [self._native(self._entries[f"{prefix}.experts.{number}.{kind}_proj.weight"]) for number in numbers]
            yield self._counted(self._stack(f"{prefix}.experts.{kind}_proj", parts))

    def layer_experts(self, prefix: str, numbers: Sequence[int]) -> Iterator[Stored]:
        """The same as TensorRT's own layer takes them: FP8 as it is stored, all else in BF16."""
        for kind in ("gate", "up", "down"):
            entries = [self._entries[f"{prefix}.experts.{number}.{kind}_proj.weight"] for number in numbers]
            kept = all(entry.format.name == "fp8" for entry in entries)
            parts = [self._native(entry) if kept else self._plain(entry, entry.dequantized()) for entry in entries]
            yield self._counted(self._stack(f"{prefix}.experts.{kind}_proj", parts))

    def travel_scale(self, prefix: str) -> Named:
        """See the function."""
        return Named(f"{prefix}.gather_scale", np.array(travel_scale(self._entries, prefix), np.float32))

    def _native(self, entry: Entry) -> Stored:
        """As it is stored where the engine can hold that, else in BF16."""
        return self._as_stored(entry) or self._plain(entry, entry.dequantized())

    def _part(self, entry: Entry, axis: int, size: int, spec: Spec) -> Stored:
        """This rank's `size` rows (axis 0) or columns: as they are stored where blocks end there, too, else in BF16."""
        if size == entry.shape[axis]:
            return self._native(entry)
        start, stop = spec.rank * size, (spec.rank + 1) * size
        if stored := self._as_stored(entry):
            leaves = cut(stored.tensors, entry.shape, axis, start, stop)
            if leaves is not None:
                shape = (size, entry.shape[1]) if axis == 0 else (entry.shape[0], size)
                return Stored(stored.name, stored.format, leaves, shape)
        values = entry.dequantized()
        return self._plain(entry, values[start:stop] if axis == 0 else values[:, start:stop])

    def _as_stored(self, entry: Entry) -> Stored | None:
        """None where the engine cannot hold that."""
        name, tensors = entry.format.name, entry.load()
        if name not in NATIVE or not _fits(name, tensors, entry.shape):
            return None
        if name == "int4_awq":
            tensors = tensors | {"weight": repack_int4(tensors["weight"])}
        return Stored(entry.place.module, name, tensors, entry.shape)

    def _plain(self, entry: Entry, values: Float32) -> Stored:
        if entry.quantised:
            self.dequantized[entry.format.name] += values.size
        return Stored(entry.place.module, "bf16", {"weight": values.astype(self._plain_dtype)}, values.shape)

    def _counted(self, stored: Stored) -> Stored:
        self.used[stored.format] += int(np.prod(stored.shape))
        return stored

    def _stack(self, name: str, parts: Sequence[Stored]) -> Stored:
        """One block of all of them."""
        if len({part.format for part in parts}) > 1:
            found = ", ".join(sorted({part.format for part in parts}))
            raise StageError(
                f"The experts of {name} are stored as {found}, but one layer's must be alike: convert them to one format."
            )
        leaves = {leaf: self._block(f"{name}.{leaf}", [part.tensors[leaf] for part in parts]) for leaf in parts[0].tensors}
        return Stored(name, parts[0].format, leaves, (len(parts), *parts[0].shape))

    def _block(self, name: str, parts: Sequence[Array]) -> Array:
        """[len(parts), …]; large ones are mapped."""
        shape = (len(parts), *parts[0].shape)
        if parts[0].nbytes * len(parts) < 1 << 16:
            return np.stack(parts)
        block = np.memmap(str(self._scratch / name), np.uint8, "w+", shape=(parts[0].nbytes * len(parts),))
        typed = block.view(parts[0].dtype).reshape(shape)
        for target, part in zip(typed, parts, strict=True) if self._values else ():
            target[...] = part
        return typed


def cut(tensors: Mapping[str, Array], shape: Sequence[int], axis: int, start: int, stop: int) -> dict[str, Array] | None:
    """The tensors of a quantised weight [N, K] for its rows (axis 0) or columns start:stop; None where those split a block."""
    found = {}
    for leaf, value in tensors.items():
        along = {0: None, 1: 1 if leaf == "pre_quant_scale" else 0}.get(value.ndim, axis)
        if along != axis:  # one for the whole weight, or for its other axis
            found[leaf] = value
            continue
        block, rest = divmod(shape[axis], value.shape[axis if value.ndim == 2 else 0])
        if rest or start % block or stop % block:
            return None
        place = slice(start // block, stop // block)
        found[leaf] = value[:, place] if value.ndim == 2 and axis == 1 else value[place]
    return found


def _fits(name: str, tensors: dict[str, Array], shape: tuple[int, ...]) -> bool:
    """Whether TensorRT takes this very weight."""
    if name == "fp8_block":
        return shape[1] % 128 == 0
    zeros = tensors.get("weight_zero_point")
    return zeros is None or not zeros.any()


def travel_scale(entries: Mapping[str, Entry], prefix: str) -> float:
    """The scale of the whole tensor for hidden states in NVFP4 before the experts of `prefix`; see `network/payload.py`."""
    experts = [entry for name, entry in entries.items() if re.match(rf"{re.escape(prefix)}\.experts\.\d+\.(gate|up)_proj", name)]
    if all(entry.format.name == "nvfp4" for entry in experts):
        return max(float(entry.load()["input_scale"].reshape(())) for entry in experts)
    norm = entries[f"{prefix.removesuffix('.mlp')}.post_attention_layernorm.weight"].dequantized()
    return float(np.abs(norm).max()) * len(norm) ** 0.5 / LARGEST
