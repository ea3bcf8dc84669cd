"""STAND-IN for a GPU: a runner for `triton_repo/tensorrt/1/runtime.py` that interprets the networks instead of running engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint import Checkpoint
from pipeline.engines.tensorrt.interpreter import Interpreter
from pipeline.engines.tensorrt.worker import network

__all__ = ["InterpretedRunner"]


class InterpretedRunner:
    """The caches of all rows, and an interpreter for each form; `info` is engine.json."""

    def __init__(self, info: dict[str, Any], checkpoint: Path, scratch: Path) -> None:
        opened = Checkpoint.open(checkpoint)
        names = ("form", "dtype", "max_batch", "max_tokens", "max_seq_len", "first_layer", "last_layer", "mtp", "moe")
        tables = {form: {name: info["engines"][f"rank0_{form}"][name] for name in names} for form in ("absorbed", "expanded")}
        self._nets = {form: Interpreter(network(opened, "tensorrt_rtx", table, scratch)[0]) for form, table in tables.items()}
        shape = (info["max_batch_size"], 1, info["max_seq_len"], info["latent_dim"])
        self._caches = {f"cache.{number}": np.zeros(shape, np.float32) for number in range(info["num_layers"])}
        self.steps: list[tuple[str, tuple[int, ...]]] = []

    def run(self, form: str, rows: slice, tokens: Tensor, starts: Tensor, wanted: Tensor) -> Tensor:
        """Logits [L, V]; writes the caches in place, as an engine does."""
        assert {tokens.dtype, starts.dtype, wanted.dtype} == {torch.int32}
        self.steps.append((form, tuple(tokens.shape)))
        positions = (starts[:, None] + torch.arange(tokens.shape[1])).to(torch.int32)
        feeds = {name: cache[rows] for name, cache in self._caches.items()} | {
            "tokens": tokens.numpy(), "starts": starts.numpy(), "positions": positions.numpy(), "logit_rows": wanted.numpy(),
            "keys": np.array([int(starts.max()) + tokens.shape[1]]),
        }  # fmt: skip
        outputs = self._nets[form].run(feeds)
        for name, cache in self._caches.items():
            cache[rows] = outputs[name.replace("cache", "present")]
        return torch.from_numpy(outputs["logits"])
