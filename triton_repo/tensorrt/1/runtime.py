"""Runs native TensorRT engines behind the interface of the compiled torch engine, so that the scheduler is the same.

A sequence has a fixed row of every layer's cache on one rank, which the engines update in place: the scheduler's "page" is such a
row, as long as a sequence may be. Under attention data parallelism each rank has rows of its own, and pages go round the ranks;
under tensor parallelism all ranks have the same rows. All ranks take every step together, since they meet in collectives: a rank
without a chunk of its own computes one for its scratch row.

A decode step always runs all rows, so that it is one CUDA graph; rows that do not decode write where their next tokens will be
written anyway. A prefill step runs one row of each rank, bound at its place in the cache.

    runtime.py           what the scheduler sees: rows, limits, drafts
    runner.py            one step of one rank, over whatever computes a network
    tensorrt_runner.py   engines on a GPU
    ranks.py             a process for each rank

Shape legend: B rows of a rank, T tokens a row, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from ranks import OneRank, RankGroup
from runner import Step
from torch import Tensor

__all__ = ["CompiledEngine", "Ranks"]


class Ranks(Protocol):
    """All ranks of a deployment."""

    def run(self, steps: list[Step]) -> list[tuple[Tensor, ...]]:
        """One step of each rank, together -> the results of each, valid until the next step; see `runner.Runner`."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens [S] of one row, at positions from `start` on."""

    tokens: Tensor
    start: int
    owner: int
    row: int

    def step(self, length: int) -> Step:
        """Padded on the right."""
        padded = torch.zeros(1, length, dtype=torch.int32)
        padded[0, : len(self.tokens)] = self.tokens
        return Step("chunk", {"tokens": padded, "count": len(self.tokens), "start": self.start, "row": self.row})


class CompiledEngine:
    """The engines, and how far each row of the cache is filled. Page 0 is no row."""

    def __init__(self, info: dict[str, Any], ranks: Ranks) -> None:
        self._rows, self._count = info["max_batch_size"], info["ranks"]
        self._owners = info["ranks"] if info["parallel"] == "adp" else 1
        rows = self._owners * self._rows
        self.info = info | {
            "page_size": info["max_seq_len"], "max_batch_size": rows, "num_pages": rows + 1, "drafts": bool(info["mtp"]),
            "prefill_rows": self._owners,
        }  # fmt: skip
        self._ranks = ranks
        self._filled = torch.zeros(self._owners, self._rows, dtype=torch.int32)
        self._verified: dict[int, tuple[int, int]] = {}
        """Page -> the position of the newest token of the last drafted step, and the draft behind it."""

    @classmethod
    def load(cls, folder: Path) -> CompiledEngine:
        """Open an engine folder on the machine that serves it.

        Raises:
            RuntimeError: it lacks the GPUs or the library.
        """
        info = json.loads((Path(folder) / "engine.json").read_text(encoding="utf-8"))
        return cls(info, RankGroup(info, Path(folder)) if info["ranks"] > 1 else OneRank(info, Path(folder)))

    def step(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        """Write the tokens [B, T] at their positions in the rows [B, 1]; logits [B, V] of each row's last token.

        Rows may be padded on the left with position -1: ignored.
        """
        self._check(tokens, positions, pages)
        if tokens.shape[1] == 1 and not self.info["drafts"]:
            return self._decode(tokens[:, 0], positions[:, 0], pages[:, 0])
        return self._prefill([self._chunk(*each) for each in zip(tokens, positions, pages[:, 0].tolist(), strict=True)])

    def speculate(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Decode with the MTP layer: tokens [B, 1] at positions [B, 1] -> the drafts [B] of what follows them, and logits
        [B, 2, V] of what follows each token and of what follows its draft. The next call's positions say what was accepted."""
        self._check(tokens, positions, pages)
        _check_range("Position of a drafted step", positions, 1, self.info["max_seq_len"] - 1)  # its draft is one further
        rows, last = self._rows, self.info["max_seq_len"]
        accepted = torch.zeros(self._owners, rows, 2, dtype=torch.int32)
        counts = torch.ones(self._owners, rows, dtype=torch.int32)
        starts = (self._filled - 1).clamp(0, max(last - 3, 0))
        active = torch.zeros(self._owners, rows, dtype=torch.bool)
        places = [self._place(page) for page in pages[:, 0].tolist()]
        asked = list(zip(places, tokens[:, 0].tolist(), positions[:, 0].tolist(), pages[:, 0].tolist(), strict=True))
        for place, token, position, page in asked:
            before, draft = self._verified.get(page, (None, 0))
            both = before is not None and position == before + 2
            accepted[place] = torch.tensor([draft, token] if both else [token, 0])
            counts[place], starts[place], active[place] = 1 + both, position - 1 - both, True
        results = self._together(
            [Step("drafted", {"accepted": accepted[rank], "counts": counts[rank], "starts": starts[rank], "active": active[rank]})
             for rank in range(self._owners)]
        )  # fmt: skip
        logits = torch.stack([results[rank][0].view(rows, 2, -1)[row] for rank, row in places])
        drafts = torch.stack([results[rank][1][row] for rank, row in places]).cpu()
        for (place, _, position, page), draft in zip(asked, drafts.tolist(), strict=True):
            self._verified[page], self._filled[place] = (position, draft), position + 1
        return drafts, logits

    def _place(self, page: int) -> tuple[int, int]:
        """Rank and row."""
        return (page - 1) % self._owners, (page - 1) // self._owners

    def _together(self, steps: list[Step]) -> list[tuple[Tensor, ...]]:
        """One step of each owner of rows; under tensor parallelism all ranks do the same."""
        return self._ranks.run(steps * (self._count // self._owners))

    def _decode(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        """One token of some rows; the others compute what nobody reads."""
        fed = torch.zeros(self._owners, self._rows, 1, dtype=torch.int32)
        starts = self._filled.clamp(max=self.info["max_seq_len"] - 1)
        places = [self._place(page) for page in pages.tolist()]
        for place, token, position in zip(places, tokens.tolist(), positions.tolist(), strict=True):
            fed[place], starts[place], self._filled[place] = token, position, position + 1
        results = self._together(
            [Step("decode", {"tokens": fed[rank], "starts": starts[rank]}) for rank in range(self._owners)]
        )
        return torch.stack([results[rank][0][row] for rank, row in places])

    def _chunk(self, tokens: Tensor, positions: Tensor, page: int) -> _Chunk:
        real = positions >= 0
        self._verified.pop(page, None)
        return _Chunk(tokens[real].to(torch.int32), int(positions[real][0]), *self._place(page))

    def _prefill(self, chunks: list[_Chunk]) -> Tensor:
        """Logits [B, V]: chunks of different ranks side by side, those of one rank one after the other."""
        found: dict[int, Tensor] = {}
        while len(found) < len(chunks):
            group = self._side_by_side({number: chunk for number, chunk in enumerate(chunks) if number not in found})
            length = max(len(chunk.tokens) for chunk in group.values())
            idle = _Chunk(torch.zeros(1, dtype=torch.int32), 0, 0, self._rows)
            of_ranks = {chunk.owner: chunk for chunk in group.values()}
            results = self._together([of_ranks.get(rank, idle).step(length) for rank in range(self._owners)])
            for number, chunk in group.items():
                found[number] = results[chunk.owner][0].clone()  # the next step writes over it
                self._filled[chunk.owner, chunk.row] = chunk.start + len(chunk.tokens)
        return torch.cat([found[number] for number in range(len(chunks))])

    def _side_by_side(self, waiting: dict[int, _Chunk]) -> dict[int, _Chunk]:
        """Those of different ranks; padded to the longest of them, each must still fit into its row of the cache."""
        chosen: dict[int, _Chunk] = {}
        for number, chunk in waiting.items():
            group = [*chosen.values(), chunk]
            end = max(each.start for each in group) + max(len(each.tokens) for each in group)
            if len({each.owner for each in group}) == len(group) and (not chosen or end <= self.info["max_seq_len"]):
                chosen[number] = chunk
        return chosen

    def _check(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> None:
        """Refuse what the engines would read or write out of bounds."""
        info, (rows, length) = self.info, tokens.shape
        if positions.shape != tokens.shape or pages.shape != (rows, 1):
            shapes = [list(value.shape) for value in (tokens, positions, pages)]
            raise ValueError(f"tokens, positions and pages have the shapes {shapes}; they must be [B,T], [B,T] and [B,1].")
        for name, value, most in (("rows", rows, info["max_batch_size"]), ("tokens a row", length, info["prefill_chunk"])):
            if not 1 <= value <= most:
                raise ValueError(
                    f"A step has {value} {name}; these engines were built for 1 to {most}: build some with other limits."
                )
        _check_range("Token", tokens.masked_fill(positions < 0, 0), 0, info["vocab_size"])
        _check_range("Position", positions, -1, info["max_seq_len"])
        _check_range("Last position", positions[:, -1], 0, info["max_seq_len"])
        _check_range("Page", pages, 1, info["num_pages"])
        if len(set(pages[:, 0].tolist())) < rows:
            raise ValueError("Two rows of a step have the same page: every sequence needs its own.")


def _check_range(name: str, values: Tensor, least: int, end: int) -> None:
    low, high = (int(value) for value in values.aminmax())
    if low < least or high >= end:
        raise ValueError(f"{name} {low if low < least else high} is out of range: it must be at least {least} and below {end}.")
