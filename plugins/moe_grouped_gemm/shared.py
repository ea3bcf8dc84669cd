"""The shared expert, a BF16 feed-forward that every token visits, in a graph on a stream of its own beside the routed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

__all__ = ["beside", "expert"]


def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x BF16 [T, H], gate_up BF16 [2S, H] (gate first), down BF16 [H, S] -> BF16 [T, H]"""
    return _into(_space(x, gate_up), x, gate_up, down)


def beside(x: Tensor, gate_up: Tensor, down: Tensor) -> Callable[[], Tensor]:
    """Starts `expert` on the device's side stream; what it returns makes the current stream wait, and gives the result.

    Only while a graph is captured: launches that are not, on two streams in turn, make all later kernels begin late
    (`timing.one_stream`). All space belongs to the current stream, and is kept until that has waited: no other kernel gets it.
    """
    with torch.cuda.device(x.device):
        capturing = torch.cuda.is_current_stream_capturing()
    now, space = torch.cuda.current_stream(x.device), _space(x, gate_up)
    side = _side(x.device) if capturing else now
    side.wait_stream(now)
    with torch.cuda.stream(side):
        out = _into(space, x, gate_up, down)

    def joined(kept: tuple[Tensor, ...] = space) -> Tensor:
        now.wait_stream(side)
        return out

    return joined


def _space(x: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
    """For gate and up, their product, and the result."""
    tokens, hidden = x.shape
    return tuple(x.new_empty(tokens, width) for width in (len(gate_up), len(gate_up) // 2, hidden))


def _into(space: tuple[Tensor, ...], x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both, inner, out = space
    gate, up = torch.mm(x, gate_up.t(), out=both).chunk(2, dim=1)
    torch.mul(silu(gate, inplace=True), up, out=inner)
    return torch.mm(inner, down.t(), out=out)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
