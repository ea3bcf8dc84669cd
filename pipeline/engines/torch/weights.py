"""From a checkpoint, whatever its format, to the weights of `graph.Decoder` in one safetensors file.

Weights are dequantised, except routed experts that plugins compute as they are stored: those keep their codes and scales.

Parameters arrive one at a time. Those that form one weight of the engine (q_a and kv_a_proj_with_mqa, gate and up, the
experts of a layer) wait for each other, so what is held in memory is about one layer. Tensors of the MTP layers are
passed over: this engine does not draft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pipeline.checkpoint import Checkpoint, Entry, ShardWriter
from pipeline.core.errors import StageError
from pipeline.models.arch import Arch

__all__ = ["Part", "parameters", "part_of", "write_weights"]

Array = npt.NDArray[Any]
Index = tuple[int | slice, ...]
NUMPY_DTYPES = {
    "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}  # fmt: skip
KEPT = ("weight", "weight_scale_inv", "weight_scale", "weight_scale_2")
"""What experts are made of that keep their format; NVFP4's scale of activations is not used, they stay BF16."""
SCALE_ROWS = {"weight_scale_inv": 128}
"""Rows of weights that a row of scales is for, if not one."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a parameter goes: a place in one of the engine's weights."""

    weight: str
    index: Index = (...,)  # type: ignore[assignment]


@dataclass(slots=True)
class Pending:
    """A weight of which not all parts have come."""

    values: Array
    left: int
    parts: set[str] = field(default_factory=set)


def parameters(source: Path, experts: str | None) -> Iterator[tuple[str, Array]]:
    """Name and float32 value of every parameter, one at a time; of routed experts the tensors of the format `experts`, if given."""
    entries = Checkpoint.open(source).entries
    for entry in entries.values():
        if experts is None or entry.place.kind != "routed_experts":
            yield entry.name, entry.dequantized()
        else:
            yield from _stored(entry, entries)


def _stored(entry: Entry, entries: Mapping[str, Entry]) -> Iterator[tuple[str, Array]]:
    """The tensors of an expert's weight; gate and up have one scale a tensor in common, which comes with the gate."""
    module, tensors = entry.name.removesuffix(".weight"), dict(entry.load())
    if module.endswith(".up_proj") and (scale := tensors.pop("weight_scale_2", None)) is not None:
        gate = entries[module.replace(".up_proj", ".gate_proj") + ".weight"].load()["weight_scale_2"]
        if float(gate) != float(scale):
            raise StageError(
                f"{module} has weight_scale_2={float(scale):g} and its gate {float(gate):g}, but the kernels take one for both: "
                "convert the checkpoint again, or set engine.torch.plugins=off."
            )
    yield from ((f"{module}.{suffix}", tensors[suffix]) for suffix in KEPT if suffix in tensors)


def part_of(name: str, arch: Arch) -> Part | None:
    """The place of the Hugging Face parameter `name`; None for those of MTP layers."""
    top = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight", "lm_head.weight": "head.weight"}
    if name in top:
        return Part(top[name])
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise StageError(f"The parameter {name} has no place in a DeepSeek-V3 class decoder: this is another model's checkpoint.")
    layer, rest = int(match[1]), match[2]
    if layer >= arch.num_hidden_layers:
        return None
    part = _part_in_layer(rest, arch, arch.is_moe(layer))
    return Part(f"layers.{layer}.{part.weight}", part.index)


def _part_in_layer(rest: str, arch: Arch, moe: bool) -> Part:
    """The same, within a layer."""
    simple = {
        "input_layernorm.weight": "input_norm.weight", "post_attention_layernorm.weight": "post_norm.weight",
        "self_attn.q_a_layernorm.weight": "attn.q_norm.weight", "self_attn.kv_a_layernorm.weight": "attn.kv_norm.weight",
        "self_attn.q_b_proj.weight": "attn.q_b.weight", "self_attn.kv_b_proj.weight": "attn.kv_b.weight",
        "self_attn.o_proj.weight": "attn.o.weight", "mlp.gate.weight": "mlp.router.weight",
        "mlp.gate.e_score_correction_bias": "mlp.router.bias",
    }  # fmt: skip
    if rest in simple:
        return Part(simple[rest])
    if rest == "self_attn.q_a_proj.weight":
        return Part("attn.qkv_a.weight", (slice(0, arch.q_lora_rank),))
    if rest == "self_attn.kv_a_proj_with_mqa.weight":
        return Part("attn.qkv_a.weight", (slice(arch.q_lora_rank, None),))
    if match := re.fullmatch(r"mlp\.(?:experts\.(\d+)\.|(shared_experts)\.)?(gate|up|down)_proj\.(weight\w*)", rest):
        return _mlp_part(match, arch, moe)
    raise StageError(f"The parameter {rest} of a layer has no place in the engine: add it to engines/torch/graph.py.")


def _mlp_part(match: re.Match[str], arch: Arch, moe: bool) -> Part:
    """Gate lies above up; experts are stacked."""
    expert, shared, kind, tensor = match.groups()
    width = arch.intermediate_size
    if moe:
        width = arch.moe_intermediate_size * (arch.n_shared_experts if shared else 1)
    width //= SCALE_ROWS.get(tensor, 1)
    rows = {"gate": (slice(0, width),), "up": (slice(width, None),), "down": (slice(None),)}[kind]
    weight = f"mlp.{'shared.' if shared else ''}{'down' if kind == 'down' else 'gate_up'}.{tensor}"
    if tensor == "weight_scale_2":
        return Part(weight, (slice(int(expert), int(expert) + 1),))
    return Part(weight, (int(expert), *rows) if expert else rows)


def write_weights(
    parameters: Iterable[tuple[str, Array]],
    arch: Arch,
    plan: Mapping[str, tuple[str, tuple[int, ...]]],
    path: Path,
    advance: Callable[[int], None] = lambda amount: None,
) -> None:
    """Write the weights that `plan` lists (name -> safetensors dtype, shape); every one must come out complete."""
    waiting: dict[str, Pending] = {}
    finished = {"inv_freq"}
    with ShardWriter(path, [(name, *kind) for name, kind in plan.items()]) as writer:
        writer.write("inv_freq", np.array(arch.inv_freq(), np.float32))
        for name, value in parameters:
            if (part := part_of(name, arch)) is None:
                continue
            pending = _place(waiting, plan, part, name, value)
            advance(value.size * pending.values.itemsize)
            if pending.left == 0:
                writer.write(part.weight, pending.values)
                finished.add(part.weight)
                del waiting[part.weight]
        _refuse_incomplete(plan, waiting, finished)


def _place(
    waiting: dict[str, Pending], plan: Mapping[str, tuple[str, tuple[int, ...]]], part: Part, name: str, value: Array
) -> Pending:
    """Copy a parameter into its weight."""
    if part.weight not in plan:
        raise StageError(f"The checkpoint has {name}, but config.json describes a model without it: they do not belong together.")
    if part.weight not in waiting:
        dtype, shape = plan[part.weight]
        empty = np.empty(shape, NUMPY_DTYPES[dtype])
        waiting[part.weight] = Pending(empty, empty.size)
    pending = waiting[part.weight]
    target = pending.values[part.index]
    if target.size != value.size or name in pending.parts:
        raise StageError(
            f"{name} has the shape {list(value.shape)} where the engine needs {list(target.shape)}, or came twice: "
            "config.json and the weights do not belong together."
        )
    target[...] = value.reshape(target.shape)
    pending.left -= target.size
    pending.parts.add(name)
    return pending


def _refuse_incomplete(plan: Mapping[str, Any], waiting: Mapping[str, Pending], finished: set[str]) -> None:
    if missing := sorted(set(plan) - finished):
        have = ", ".join(sorted(waiting[missing[0]].parts)) if missing[0] in waiting else "none of its parts"
        raise StageError(
            f"The checkpoint lacks {len(missing)} of the engine's {len(plan)} weights, {missing[0]} among them (found: {have}): "
            "convert it again from a complete checkpoint."
        )
