"""The routing that every router kernel must reproduce, in float32 torch.

score    = sigmoid(logit)                              what an expert's output is weighted by
choice   = score + bias                                what experts are chosen by; the bias balances load
group    = sum of the two best choices in each group   keep the `topk_group` best groups, the rest is -inf
experts  = the `top_k` best remaining choices
weights  = their scores, divided by their sum when `norm_topk_prob`, times `scale`

Ties go to the lowest index, among groups and among experts, so that the result is one definite answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["route"]


def top(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis, best first, ties by lowest index."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def mask_groups(choice: Tensor, n_group: int, topk_group: int) -> Tensor:
    """[N, E] -> [N, E], with -inf outside each token's `topk_group` best groups."""
    grouped = choice.unflatten(-1, (n_group, -1))
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, top(group_scores, topk_group), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def route(
    logits: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    scale: float,
    norm_topk_prob: bool = True,
) -> tuple[Tensor, Tensor]:
    """Router logits [N, E] and bias [E] -> weights [N, top_k] in float32 and indices [N, top_k]."""
    scores = logits.float().sigmoid()
    indices = top(mask_groups(scores + bias.float(), n_group, topk_group), top_k)
    weights = scores.gather(-1, indices)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, indices
