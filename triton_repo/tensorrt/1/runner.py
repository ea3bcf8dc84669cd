"""One step of one rank: which networks run, on which rows, and what the MTP layer needs to draft. Whatever computes a network
(`tensorrt_runner.py` on a GPU) subclasses `Runner`.

The MTP layer reads the hidden state of a position and the token after it. So it lags one position behind the model: a chunk of the
prompt is followed by the MTP layer's chunk, one position earlier, and the last hidden state waits (`_carry`) for the next token.

Shape legend: B rows, S tokens a row, L rows of logits asked for, V vocabulary, H hidden.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Runner", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank is to do: a method of `Runner`, and its arguments."""

    kind: str
    arguments: dict[str, Any]


class Runner:
    """The networks of one rank, and what stays between steps. Under attention data parallelism its last row, which no sequence
    has, is for chunks of other ranks' rows."""

    def __init__(self, info: dict[str, Any], device: str) -> None:
        self.info, self.device = info, device
        self.rows: int = info["max_batch_size"]
        self.cache_rows = self.rows + int(info["ranks"] > 1)
        self.drafts = bool(info["mtp"])
        self.dropped = torch.zeros(1, dtype=torch.int32, device=device)
        """Tokens that missed experts for lack of room, since the start; `compute` adds to it."""
        self._told = 0
        self.limited = any("dropped" in engine.get("outputs", {}) for engine in info["engines"].values())
        if self.drafts:
            dtype = getattr(torch, info["dtype"])
            self._carry = torch.zeros(self.cache_rows, 2, info["hidden_size"], dtype=dtype, device=device)

    def compute(self, form: str, rows: slice, tokens: Tensor, starts: Tensor, wanted: Tensor, hidden: Tensor | None = None
                ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """INT32 tokens [B, S] of the cache's `rows`, at positions from starts [B] on -> logits [L, V] of the tokens `wanted` [L],
        and hidden states [B, S, H] where there is an MTP layer. With `hidden` [B, S, H]: that layer."""
        raise NotImplementedError

    def run(self, step: Step) -> tuple[Tensor, ...]:
        """A step."""
        results: tuple[Tensor, ...] = getattr(self, step.kind)(**step.arguments)
        if self.limited:
            self._tell_dropped(int(self.dropped))
        return results

    def _tell_dropped(self, count: int) -> None:
        """In the log, each time that they have doubled."""
        if count >= max(2 * self._told, 1):
            self._told = count
            print(
                f"{count} times a token has missed an expert, for which it found no room: build with a higher "
                "engine.tensorrt.moe_capacity or exchange_share.", file=sys.stderr, flush=True,
            )  # fmt: skip

    def chunk(self, tokens: Tensor, count: int, start: int, row: int) -> tuple[Tensor]:
        """Tokens [1, S] of one row, at positions from `start` on, of which `count` are real -> logits [1, V] of the last of those.
        What padding writes into the cache is written again before it can be seen."""
        tokens, rows = tokens.to(self.device), slice(row, row + 1)
        form = "expanded" if tokens.shape[1] >= self.info["expanded_from"] else "absorbed"
        last = self._int32(count - 1)
        logits, states = self.compute(form, rows, tokens, self._int32(start), last)
        if states is not None:
            if start:
                hidden = torch.cat([self._carry[rows, :1], states[:, :-1]], 1)
            else:  # the first token of a prompt has no state before it; the one after the last is not known yet
                hidden, tokens = states, torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
            self.compute(form, rows, tokens, self._int32(max(start - 1, 0)), last, hidden)
            self._carry[rows, 0] = states[:, count - 1]
        return (logits,)

    def decode(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor]:
        """A token [B, 1] of every row, at its position [B] -> logits [B, V]."""
        return (self._decoded(tokens.to(self.device), starts.to(self.device)),)

    def _decoded(self, tokens: Tensor, starts: Tensor) -> Tensor:
        return self.compute("absorbed", slice(0, self.rows), tokens, starts, self._numbers(self.rows))[0]

    def drafted(self, accepted: Tensor, counts: Tensor, starts: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Draft a token of every row, and verify it in one step.

        `accepted` [B, 2]: the one or two (`counts` [B]) newest tokens, which follow the positions `starts` [B]; only the states of
        `active` [B] rows are kept. Logits [2 B, V] of each row's newest token and of its draft; the drafts INT32 [B].
        """
        logits, drafts, states = self._drafted(*(value.to(self.device) for value in (accepted, counts, starts)))
        kept = active.to(self.device)[:, None, None]
        self._carry[: self.rows] = torch.where(kept, states, self._carry[: self.rows])
        return logits, drafts

    def _drafted(self, accepted: Tensor, counts: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with the states; it changes nothing that it reads, so that it may be repeated."""
        rows, first = slice(0, self.rows), 2 * self._numbers(self.rows)
        guesses, _ = self.compute("absorbed", rows, accepted, starts, first + counts - 1, self._carry[rows])
        drafts = guesses.argmax(-1).to(torch.int32)
        newest = accepted.gather(1, (counts[:, None] - 1).long())
        both = torch.cat([newest, drafts[:, None]], 1)
        logits, states = self.compute("absorbed", rows, both, starts + counts, self._numbers(2 * self.rows))
        assert states is not None
        return logits, drafts, states

    def _numbers(self, count: int) -> Tensor:
        """0 to count - 1, made on the device, as a CUDA graph demands."""
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def _int32(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.device)
