"""The engine's graph, not compiled: with other plugins than an engine's, or in float32, on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.engines.torch.export import new_caches
from pipeline.engines.torch.graph import PLAIN, Decoder, Moe, Ops, swiglu
from pipeline.engines.torch.plugged import ops
from pipeline.models.arch import Arch
from plugins.moe_grouped_gemm.reference import weight_of

__all__ = ["Eager", "dequantized", "exact", "without_experts"]

CODES = torch.float8_e4m3fn, torch.uint8
"""Types of what `weight_of` takes first; names sort as it takes them: weight, weight_scale or _inv, weight_scale_2."""


class Eager:
    """Steps like the runtime's engine."""

    def __init__(self, info: dict[str, Any], weights: dict[str, Tensor], table: Ops = PLAIN) -> None:
        dtype = getattr(torch, info["dtype"])
        kinds = {name: table.router_dtype if name.endswith("router.weight") else value.dtype for name, value in weights.items()}
        weights = {name: value.to(kinds[name]) for name, value in weights.items()}
        self.info, self.decoders, self.caches = info, {}, new_caches(info)
        for form in info["forms"]:
            with torch.device("meta"):
                self.decoders[form] = Decoder(Arch(**info["arch"]), form, info["page_size"], dtype, table)
            self.decoders[form].load_state_dict(weights, strict=True, assign=True)

    def step(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        """[B, T], [B, T], [B, P] -> logits [B, V]"""
        form = "expanded" if tokens.shape[1] >= self.info["expanded_from"][pages.shape[1] - 1] else "absorbed"
        inputs = (value.to(self.info["device"]) for value in (tokens, positions, pages))
        return self.decoders[form](*inputs, self.caches)


def without_experts(info: dict[str, Any]) -> Ops:
    """The plugins of an engine, but for the routed experts'."""
    taken = [name for name in info["plugins"]["taken"] if name != "moe_grouped_gemm"]
    return ops(info["plugins"] | {"taken": taken, "experts": None})


def exact(folder: Path) -> Eager:
    """The graph in float32, and its cache, on an engine's weights, an expert at a time: torch's grouped products take BF16."""
    info = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
    weights = {name: value.float() for name, value in dequantized(folder, torch.float32).items()}
    return Eager(info | {"dtype": "float32", "kv_dtype": "float32"}, weights, Ops(experts=one_by_one))


def one_by_one(moe: Moe, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """`Moe.mixed`"""
    out = moe.shared(x)
    for expert in indices.unique().tolist():
        token, place = (indices == expert).nonzero(as_tuple=True)
        y = swiglu(x[token] @ moe.gate_up.weight[expert].t()) @ moe.down.weight[expert].t()
        out.index_add_(0, token, y * weights[token, place, None])
    return out


def dequantized(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """An engine's weights as a graph without plugins has them; experts that are stored in a format of theirs become `dtype`."""
    info = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
    weights, kept = load_file(folder / "weights.safetensors", device=info["device"]), info["plugins"]["experts"]
    for name in [name for name in weights if kept and name.endswith(".weight") and weights[name].dtype in CODES]:
        parts = [weights.pop(part) for part in sorted(other for other in weights if other.startswith(name))]
        first = weight_of(tuple(parts), 0)
        weights[name] = first.new_empty((len(parts[0]), *first.shape), dtype=dtype)
        for expert, plain in enumerate(weights[name]):
            plain.copy_(weight_of(tuple(parts), expert))
    return weights
