"""The reference model with the source's weights and with the converted ones, on the same held-out text.

Weights are dequantised and activations stay float32, so this measures what the weights lost, whatever the runtime.
The two models are never in memory together. `sensitivity` keeps the source's and lends it the converted weights of
one layer, or one class, at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from pipeline.checkpoint.source import Checkpoint
from pipeline.models.deepseek_v3 import DeepseekV3, build

__all__ = ["LogitsError", "Reference", "Sensitivity", "compare_logits", "load", "sensitivity"]


@dataclass(frozen=True, slots=True)
class LogitsError:
    """Means over all predicted tokens; rounded, so that reports are equal byte for byte."""

    tokens: int
    kl: float
    """Mean KL(source || converted), in nats."""
    top1: float
    """Share of positions with the same most likely token."""
    ppl_source: float
    ppl_converted: float

    @property
    def ppl_ratio(self) -> float:
        """Above 1: the converted model is worse."""
        return round(self.ppl_converted / self.ppl_source, 6)


class Reference:
    """The source's predictions on the windows, with which any number of converted models are compared."""

    def __init__(self, source: Checkpoint, windows: list[list[int]], advance: Callable[[int], None]) -> None:
        self._ids = [torch.tensor([window]) for window in windows]
        with _one_thread(), torch.inference_mode():
            self._before = list(_run(load(source), self._ids, advance))

    def compare(self, model: DeepseekV3, advance: Callable[[int], None]) -> LogitsError:
        """Means over all predicted tokens: every position but the last predicts its successor."""
        sums = torch.zeros(4, dtype=torch.float64)
        with _one_thread(), torch.inference_mode():
            for window, before, after in zip(self._ids, self._before, _run(model, self._ids, advance), strict=True):
                sums += _compare(window[0, 1:], before, after)
        tokens = sum(window.shape[1] - 1 for window in self._ids)
        kl, top1, nll_source, nll_converted = (sums / tokens).tolist()
        ppl_source, ppl_converted = round(exp(nll_source), 4), round(exp(nll_converted), 4)
        return LogitsError(tokens, round(max(kl, 0.0), 6), round(top1, 4), ppl_source, ppl_converted)


def compare_logits(
    source: Checkpoint, converted: Checkpoint, windows: list[list[int]], advance: Callable[[int], None]
) -> LogitsError:
    """Run both models over the windows."""
    reference = Reference(source, windows, advance)
    return reference.compare(load(converted), advance)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What one group of weights does to the predictions when it alone is converted."""

    group: str
    tensors: int
    kl: float
    """Mean KL(source || source with this group converted), in nats."""
    top1: float


def sensitivity(
    source: Checkpoint,
    converted: Checkpoint,
    windows: list[list[int]],
    groups: Mapping[str, Sequence[str]],
    advance: Callable[[int], None],
) -> list[Sensitivity]:
    """One run for each group of parameters (by name), the most harmful first; one more for the source."""
    reference, model, found = Reference(source, windows, advance), load(source), []
    for group, names in groups.items():
        _lend(model, converted, names)
        harm = reference.compare(model, advance)
        found.append(Sensitivity(group, len(names), harm.kl, harm.top1))
        _lend(model, source, names)
    return sorted(found, key=lambda item: (-item.kl, item.group))


def _lend(model: DeepseekV3, checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Overwrite parameters in place; nothing is kept of what was there."""
    state = model.state_dict()
    for name in names:
        state[name].copy_(torch.from_numpy(checkpoint.entries[name].dequantized()))


def load(checkpoint: Checkpoint) -> DeepseekV3:
    """The reference model in float32, whatever format the weights are stored in."""
    state = {name: torch.from_numpy(entry.dequantized()) for name, entry in checkpoint.entries.items()}
    return build(checkpoint.arch, state, torch.float32)


def _run(model: DeepseekV3, ids: list[Tensor], advance: Callable[[int], None]) -> Iterator[Tensor]:
    """Log-probabilities [T - 1, V] of each window."""
    for window in ids:
        yield torch.log_softmax(model(window)[0, :-1].float(), dim=-1)
        advance(window.shape[1])


def _compare(targets: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Sums over the window: KL, equal top tokens, negative log-likelihood before and after."""
    kl = (before.double().exp() * (before.double() - after.double())).sum()
    top1 = (before.argmax(-1) == after.argmax(-1)).sum()
    nll = [-side.gather(1, targets[:, None]).double().sum() for side in (before, after)]
    return torch.stack([kl, top1.double(), *nll])


@contextmanager
def _one_thread() -> Iterator[None]:
    """The order of float32 sums depends on the number of threads, so it is fixed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
