"""Steps of a whole model over its networks: forms, segments, ranks and caches put together, whatever runs one network.

A backend runs the same network on all ranks at once (`interpreter.run_ranks` in numpy). Rows of different ranks are different
sequences under attention data parallelism, and the same ones under tensor parallelism.

Shape legend: R ranks, B rows of a rank, S tokens a row, M rows of the cache, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.core.errors import StageError
from pipeline.engines.tensorrt.network.spec import Form, Spec
from pipeline.formats.numerics import Array

__all__ = ["Session"]

Backend = Callable[[Sequence[str], Sequence[Mapping[str, Array]]], list[dict[str, Array]]]
"""Names of one network on each rank, and the inputs of each -> the outputs of each."""


class Session:
    """Sequences in fixed rows: row b of every cache belongs to sequence b."""

    def __init__(self, specs: Mapping[str, Spec], run: Backend, rows: int) -> None:
        self._specs, self._run = specs, run
        first = next(iter(specs.values()))
        self.ranks, self._arch = first.ranks, first.arch
        layers = {number for spec in specs.values() for number in spec.layers}
        shape = (rows, 1, first.max_seq_len, self._arch.latent_dim)
        self._caches = [{f"cache.{number}": np.zeros(shape, np.float32) for number in layers} for _ in range(self.ranks)]

    def step(self, form: Form, tokens: Array, starts: Array) -> tuple[Array, Array]:
        """Tokens [R, B, S] from positions starts [R, B] on -> logits [R, B, S, V], states [R, B, S, H] (empty without MTP)."""
        return self._through(self._segments(form, draft=False), tokens, starts, None)

    def draft(self, form: Form, tokens: Array, hidden: Array, starts: Array) -> Array:
        """The MTP layer: tokens [R, B, S] and the hidden states of those before them -> logits [R, B, S, V]."""
        return self._through(self._segments(form, draft=True), tokens, starts, hidden)[0]

    def _segments(self, form: Form, *, draft: bool) -> list[list[str]]:
        """Names of each segment's networks, rank by rank, in the order of layers."""
        chosen = {name: spec for name, spec in self._specs.items() if spec.form == form and spec.is_draft == draft}
        firsts = sorted({spec.first_layer for spec in chosen.values()})
        segments = [[name for name, spec in chosen.items() if spec.first_layer == first] for first in firsts]
        if not segments or any(len(names) != self.ranks for names in segments):
            raise StageError(f"There is no network of the {form} form{' of the MTP layer' if draft else ''} for every rank.")
        return [sorted(names, key=lambda name: chosen[name].rank) for names in segments]

    def _through(self, segments: list[list[str]], tokens: Array, starts: Array, hidden: Array | None) -> tuple[Array, Array]:
        ranks, rows, count = tokens.shape
        states: list[Any] = list(hidden) if hidden is not None else [None] * ranks
        for names in segments:
            feeds = [self._feeds(self._specs[name], tokens[rank], starts[rank], states[rank]) for rank, name in enumerate(names)]
            outputs = self._run(names, feeds)
            for rank, output in enumerate(outputs):
                states[rank] = output.get("states")
                self._caches[rank] |= {k.replace("present", "cache"): v for k, v in output.items() if k.startswith("present.")}
        logits = np.stack([output["logits"].reshape(rows, count, -1) for output in outputs])
        return logits, np.stack(states) if states[0] is not None else np.empty((ranks, rows, count, 0), np.float32)

    def _feeds(self, spec: Spec, tokens: Array, starts: Array, hidden: Array | None) -> dict[str, Array]:
        """Inputs of one network; those that it does not have are ignored."""
        rows, count = tokens.shape
        feeds = {name: cache[:rows] for name, cache in self._caches[spec.rank].items()}
        feeds |= {
            "tokens": tokens.astype(np.int32), "starts": starts.astype(np.int32),
            "positions": (starts[:, None] + np.arange(count)).astype(np.int32),
            "logit_rows": np.arange(rows * count, dtype=np.int32), "keys": np.array([starts.max() + count], np.int64),
        }  # fmt: skip
        return feeds if hidden is None else feeds | {"hidden": hidden}
