"""Candidates with their predicted speed, as arrays; a `Point` is one of them in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.config.schema import SloConfig
from pipeline.planner.perf import Machine, PerfCase, Prediction, Predictions, predict_many
from pipeline.planner.search.space import Candidate
from pipeline.planner.setup import Setup

__all__ = ["Point", "Scored", "perf_case", "score"]

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration and what it is predicted to do."""

    candidate: Candidate
    prediction: Prediction
    tokens_per_gpu: float
    """Output tokens a second over all GPUs that are paid for, idle ones too."""

    @property
    def setup(self) -> Setup:
        """Of one instance."""
        return self.candidate.setup

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second over all instances."""
        return self.tokens_per_gpu * self.candidate.paid

    @property
    def label(self) -> str:
        """2 x ADP4+EP4, 1 draft."""
        times = f"{self.candidate.replicas} x " if self.candidate.replicas > 1 else ""
        drafts = f", MTP {self.setup.mtp}" if self.setup.mtp else ""
        return f"{times}{self.setup.layout}{drafts}"


@dataclass(frozen=True, slots=True)
class Scored:
    """Arrays over `candidates`."""

    candidates: Sequence[Candidate]
    predictions: Predictions
    tokens_per_gpu: Floats

    @property
    def tokens_per_second(self) -> Floats:
        """Output tokens a second over all instances."""
        return self.tokens_per_gpu * np.array([item.paid for item in self.candidates])

    def __len__(self) -> int:
        return len(self.candidates)

    def point(self, index: int) -> Point:
        """One of them in full."""
        return Point(self.candidates[index], self.predictions[index], float(self.tokens_per_gpu[index]))

    def meets(self, slo: SloConfig) -> Mask:
        """Which are predicted to keep every limit."""
        kept = np.ones(len(self), bool)
        if slo.tpot_ms is not None:
            kept &= self.predictions.tpot_ms <= slo.tpot_ms
        if slo.ttft_ms is not None:
            kept &= self.predictions.ttft_ms <= slo.ttft_ms
        if slo.tokens_per_gpu is not None:
            kept &= self.tokens_per_gpu >= slo.tokens_per_gpu
        if slo.tokens_per_second is not None:
            kept &= self.tokens_per_second >= slo.tokens_per_second
        return kept

    def moved(self, candidates: Sequence[Candidate | None]) -> Scored:
        """The same instances, with the same load each, in other numbers; those that became None are dropped."""
        at = np.array([index for index, item in enumerate(candidates) if item], dtype=np.int64)
        return _shared([item for item in candidates if item], self.predictions.take(at))


def score(candidates: Sequence[Candidate]) -> Scored:
    """Predict all of them."""
    machine = Machine.of(candidates[0].setup.hw)
    return _shared(candidates, predict_many([perf_case(item, machine) for item in candidates]))


def _shared(candidates: Sequence[Candidate], predictions: Predictions) -> Scored:
    """Over all GPUs that are paid for."""
    share = np.array([item.gpus / item.paid for item in candidates])
    return Scored(candidates, predictions, predictions.tokens_per_gpu * share)


def perf_case(item: Candidate, machine: Machine) -> PerfCase:
    """What the speed model is asked about one instance of a candidate."""
    setup = item.setup
    return PerfCase(
        machine=machine, arch=setup.arch, formats=setup.formats, kv_format=setup.kv_format, tp=setup.layout.tp,
        ep=setup.layout.ep, attention_dp=setup.layout.attention_dp, concurrency=item.in_instance, isl=setup.isl, osl=setup.osl,
        mtp=setup.mtp, engine=setup.version, moe_backend=setup.moe_backend, max_batch_size=setup.max_batch_size,
        max_num_tokens=setup.max_num_tokens, piecewise_graphs=setup.piecewise, kv_tokens=item.kv_tokens,
        without=_without(item),
    )  # fmt: skip


def _without(item: Candidate) -> frozenset[str]:
    """Optimisations that its engine runs without: a CUDA graph of its batch, the overlap scheduler."""
    setup = item.setup
    graphs = setup.captured * setup.layout.cache_ranks >= min(item.in_instance, setup.max_batch_size * setup.layout.cache_ranks)
    return frozenset(name for name, used in (("cuda_graph", graphs), ("overlap", setup.overlap)) if not used)
