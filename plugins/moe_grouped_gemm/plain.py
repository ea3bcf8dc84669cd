"""The experts in plain torch, in the kernels' steps: permute, gate+up, down, gather. CPUs take it, and GPUs without the kernels.

Products are float32, over all rows of one expert at a time; the number of rows is asked of the device, so that this form cannot
be captured in a CUDA graph.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import silu

from plugins.moe_grouped_gemm.reference import Weights, rounded, weight_of

__all__ = ["experts", "finalize", "permute"]


def permute(indices: Tensor, experts: int, first_expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """indices [T, K] -> offsets I32 [E + 1], pairs I32 [T * K] (from `offsets[E]` on -1), slots I32 [T * K] (-1: not ours)"""
    local = indices.flatten().long() - first_expert
    ours = (local >= 0) & (local < experts)
    order = torch.where(ours, local, experts).argsort(stable=True)
    counts = torch.bincount(local[ours], minlength=experts)
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    places = torch.arange(len(order), device=order.device)
    pairs = torch.where(places < offsets[-1], order, -1).int()
    slots = torch.empty_like(pairs).index_copy_(0, order, torch.where(places < offsets[-1], places, -1).int())
    return offsets, pairs, slots


def finalize(rows: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """rows [slots, H] of the pairs, weights F32 [T, K], slots I32 [T * K] -> BF16 [T, H], summed in float32 in order of K"""
    places = slots.view(weights.shape).long()
    out = torch.zeros(len(weights), rows.shape[1], device=rows.device)
    for place, weight in zip(places.t(), weights.t(), strict=True):
        found = rows[place.clamp(min=0)].float() * weight.unsqueeze(1) if len(rows) else out
        out += torch.where(place.unsqueeze(1) >= 0, found, 0)
    return out.bfloat16()


def experts(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Weights, down: Weights, first_expert: int = 0) -> Tensor:
    """As `reference.experts`, in BF16."""
    nvfp4 = len(gate_up) == 3
    offsets, pairs, slots = permute(indices, len(gate_up[0]), first_expert)
    ends = offsets.tolist()
    tokens = pairs[: ends[-1]].long() // max(1, indices.shape[1])
    rows = x.new_empty((len(tokens), x.shape[1]), dtype=torch.bfloat16)
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin < end:
            given = rounded(x[tokens[begin:end]], nvfp4).float()
            gate, up = (given @ weight_of(gate_up, number).float().t()).chunk(2, dim=1)
            rows[begin:end] = rounded(silu(gate) * up, nvfp4).float() @ weight_of(down, number).float().t()
    return finalize(rows, weights, slots)
