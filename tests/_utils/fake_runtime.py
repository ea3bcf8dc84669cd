"""TEST DOUBLE of triton_repo/torch/1/runtime.py: a "model" whose next token is a function of the whole prefix.

The prefix is read back through the pages, so a scheduler that mixes pages up gives other tokens. If the prefix has a
newline, the text before the first one is repeated for ever; otherwise the next token is a hash of the prefix. A step takes
`step_seconds` of engine.json, or 0.2 s if one of its texts begins with "slow".
Bytes with a meaning: EOT (0x04) is EOS, 0x01 makes the step raise, 0x02 kills the process.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EOS, RAISE, DIE, NEWLINE = 4, 1, 2, 10
BOS = 256
VOCAB = 258
SLOW = list(b"slow")


class CompiledEngine:
    """Tokens are bytes; 256 is BOS."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.memory = torch.full((info["num_pages"], info["page_size"]), -1, dtype=torch.int64)
        self.batches: list[int] = []

    @classmethod
    def load(cls, folder: Path) -> CompiledEngine:
        return cls(json.loads((Path(folder) / "engine.json").read_text()))

    def step(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        assert tokens.shape == positions.shape and len(pages) == len(tokens) <= self.info["max_batch_size"]
        self.batches.append(len(tokens))
        size, logits, pause = self.info["page_size"], torch.zeros(len(tokens), VOCAB), self.info.get("step_seconds", 0.0)
        for row, (ids, places, table) in enumerate(
            zip(tokens.tolist(), positions.tolist(), pages.tolist(), strict=True)
        ):
            for token, place in zip(ids, places, strict=True):
                assert table[place // size] != 0, "a token would be written to the scratch page"
                self.memory[table[place // size], place % size] = token
            prefix = [int(self.memory[table[place // size], place % size]) for place in range(places[-1] + 1)]
            logits[row, next_token(prefix)] = 10.0
            pause = 0.2 if SLOW in (prefix[:4], prefix[1:5]) else pause
        time.sleep(pause)
        return logits


def next_token(prefix: list[int]) -> int:
    """What the model says after `prefix`."""
    if RAISE in prefix:
        raise RuntimeError("the test double was told to fail")
    if DIE in prefix:
        os._exit(1)
    text = prefix[1:] if prefix[0] == BOS else prefix
    if NEWLINE in text:
        period = text.index(NEWLINE)
        return text[(len(text) - period - 1) % period]
    return 97 + zlib.crc32(bytes(token % 256 for token in text)) % 26


def continuation(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that the model gives after `prompt`, without EOS handling."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]
