"""Choosing the next token: greedy, or temperature, top-k and top-p with one random stream a request.

The draw is an inverse CDF: one uniform number from the request's own generator is looked up in the row's cumulative
probabilities. So a request's tokens depend on its seed and its logits alone, never on its neighbours in the batch.
Tensors of `_draw` are [rows, vocabulary] or, one value a request, [rows, 1].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Sampling", "sample"]


@dataclass(slots=True)
class Sampling:
    """How one request's tokens are chosen. `temperature` 0 or `top_k` 1 is greedy; `top_k` 0 is no limit."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    generator: torch.Generator | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.greedy:
            self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def greedy(self) -> bool:
        """True if no random number is needed."""
        return self.temperature == 0 or self.top_k == 1


def sample(logits: Tensor, samplings: list[Sampling]) -> list[int]:
    """One token a row."""
    tokens = logits.argmax(-1).tolist()
    drawn = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if drawn:
        for row, token in zip(drawn, _draw(logits[drawn], [samplings[row] for row in drawn]), strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, samplings: list[Sampling]) -> list[int]:
    """Sort each row, drop what top-k and top-p exclude, look one uniform number up in the rest."""
    device, (rows, vocab) = logits.device, logits.shape
    temperature = torch.tensor([[s.temperature] for s in samplings], device=device)
    top_k = torch.tensor([[min(s.top_k, vocab) or vocab] for s in samplings], device=device)
    top_p = torch.tensor([[s.top_p] for s in samplings], device=device)
    uniform = torch.tensor([[_uniform(s)] for s in samplings], device=device, dtype=torch.float64)

    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    # Guard: shift by the row's maximum before dividing, or a temperature near 0 makes inf - inf.
    scaled = (ordered - ordered[:, :1]) / temperature
    rank = torch.arange(vocab, device=device)
    prob = scaled.masked_fill(rank >= top_k, float("-inf")).softmax(-1, dtype=torch.float64)
    before = prob.cumsum(-1) - prob
    kept = prob.masked_fill((before >= top_p) & (rank > 0), 0.0)  # the likeliest always stays
    cdf = kept.cumsum(-1)
    pick = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
    last = (kept > 0).sum(-1, keepdim=True) - 1
    return index.gather(-1, torch.minimum(pick, last)).reshape(rows).tolist()


def _uniform(sampling: Sampling) -> float:
    return torch.rand((), generator=sampling.generator, dtype=torch.float64).item()
