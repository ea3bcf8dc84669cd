"""Switch one optimisation off at a time: its predicted gain beside the published one.

The gain is throughput with the optimisation over throughput without, at the case's concurrency: a user's tokens a second
rise by as much wherever memory does not bound the batch. Published figures stand for the setting they were measured in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.planner.perf.calibration import Calibration
from pipeline.planner.perf.case import PerfCase
from pipeline.planner.perf.predict import predict_many

__all__ = ["ABLATIONS", "Ablation", "AblationRow", "ablate"]

BLOG1 = "TensorRT-LLM tech blog 1, Pushing Latency Boundaries (B200, batch 1)"
BLOG3 = "TensorRT-LLM tech blog 3, Optimizing DeepSeek-R1 Throughput on Blackwell (8 B200, 1K/2K)"


@dataclass(frozen=True, slots=True)
class Ablation:
    """One optimisation and how a case does without it."""

    name: str
    title: str
    published: str
    source: str
    without: Callable[[PerfCase], PerfCase]
    """Returns an equal case where the optimisation is not in use."""


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One line of the table."""

    name: str
    title: str
    gain: float | None
    """Throughput with it over without, less 1; None where the case does not use it."""
    published: str
    source: str


def _switch(name: str) -> Callable[[PerfCase], PerfCase]:
    return lambda case: replace(case, without=case.without | {name})


def _attention_tp(case: PerfCase) -> PerfCase:
    """The same ranks with attention split by heads: the latent cache is then repeated on every rank."""
    return replace(case, attention_dp=False, kv_tokens=None, max_batch_size=None)


ABLATIONS = (
    Ablation("adp", "attention data parallelism", "+400 %, peak throughput", BLOG3, _attention_tp),
    Ablation("ep", "expert parallelism", "+142 %", BLOG3, lambda case: replace(case, ep=1)),
    Ablation("absorption", "weight absorption in decoding", "not quantified", BLOG3, _switch("absorption")),
    Ablation("fp8_kv", "FP8 KV cache and attention", "+6 % at equal concurrency, half the cache", BLOG3,
             lambda case: replace(case, kv_format="bf16", kv_tokens=None)),
    Ablation("fp4_allgather", "dispatch in FP4", "+4 %", BLOG3, _switch("fp4_allgather")),
    Ablation("topk_fusion", "fused top-k of the router", "+7.4 %, 252 us to 15 us", BLOG3, _switch("topk_fusion")),
    Ablation("router_gemm", "router GEMM with mixed types", "+4 %", BLOG3, _switch("router_gemm")),
    Ablation("multi_stream", "shared beside routed experts", "+5.3 % with other streams; batch 1: 67 to 73 tokens/s",
             f"{BLOG3}; {BLOG1}", _switch("multi_stream")),
    Ablation("cuda_graph", "CUDA graphs", "+22 %", BLOG3, _switch("cuda_graph")),
    Ablation("overlap", "overlap scheduler", "+4 %", BLOG3, _switch("overlap")),
    Ablation("mtp", "multi-token prediction", "batch 1, 3 drafts: 111 to 253 tokens/s", BLOG1,
             lambda case: replace(case, mtp=0, acceptance=None)),
)  # fmt: skip
"""The ladder of the literature, in its order."""


def ablate(case: PerfCase, calibration: Calibration | None = None) -> list[AblationRow]:
    """A row for every optimisation; `gain` is None for those that the case does not use."""
    others = [item.without(case) for item in ABLATIONS]
    predicted = predict_many([case, *others], calibration).tokens_per_gpu
    return [
        AblationRow(item.name, item.title, None if other == case else float(predicted[0] / value) - 1, item.published, item.source)
        for item, other, value in zip(ABLATIONS, others, predicted[1:], strict=True)
    ]
