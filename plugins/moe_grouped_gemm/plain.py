"""The experts in plain torch, in the kernels' steps: permute, gate+up, down, gather. CPUs take it, and GPUs without the kernels.

Products are float32, over all rows of one expert at a time; the number of rows is asked of the device, so that this form cannot
be captured in a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from plugins.moe_grouped_gemm.reference import fp8_weight, nvfp4_weight, through_fp8

__all__ = ["finalize", "fp8_block", "nvfp4", "permute"]

Product = Callable[[int, Tensor], Tensor]


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


def fp8_block(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    first_expert: int,
) -> Tensor:
    """As `reference.moe_fp8_block`, in BF16."""

    def expert(number: int, rows: Tensor) -> Tensor:
        gate, up = (through_fp8(rows).float() @ fp8_weight(gate_up[number], gate_up_scale[number]).float().t()).chunk(2, dim=1)
        return through_fp8(silu(gate) * up).float() @ fp8_weight(down[number], down_scale[number]).float().t()

    return _grouped(x, indices, weights, expert, len(gate_up), first_expert)


def nvfp4(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    first_expert: int,
) -> Tensor:
    """As `reference.moe_w4a16_nvfp4`, in BF16."""

    def expert(number: int, rows: Tensor) -> Tensor:
        first = nvfp4_weight(gate_up[number], gate_up_scale[number], gate_up_scale_2[number])
        gate, up = (rows.float() @ first.float().t()).chunk(2, dim=1)
        second = nvfp4_weight(down[number], down_scale[number], down_scale_2[number])
        return (silu(gate) * up).bfloat16().float() @ second.float().t()

    return _grouped(x, indices, weights, expert, len(gate_up), first_expert)


def _grouped(x: Tensor, indices: Tensor, weights: Tensor, expert: Product, experts: int, first_expert: int) -> Tensor:
    offsets, pairs, slots = permute(indices, experts, first_expert)
    ends = offsets.tolist()
    tokens = pairs[: ends[-1]].long() // max(1, indices.shape[1])
    rows = x.new_empty((len(tokens), x.shape[1]), dtype=torch.bfloat16)
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin < end:
            rows[begin:end] = expert(number, x[tokens[begin:end]]).bfloat16()
    return finalize(rows, weights, slots)
