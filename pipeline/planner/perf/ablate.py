"""Switch one optimisation off at a time: its predicted gain beside the published one.

The gain is throughput with the optimisation over throughput without, at the case's concurrency: a user's tokens a second
rise by as much wherever memory does not bound the batch. Published figures stand for the load that they were measured at, so
the gain at that load, on the same machine, is predicted too; and for the engine of spring 2025 (`BASELINE`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeline.planner.perf.calibration import Calibration
from pipeline.planner.perf.case import PerfCase
from pipeline.planner.perf.predict import predict_many

__all__ = ["ABLATIONS", "BASELINE", "Ablation", "AblationRow", "ablate"]

BASELINE = (
    "Published gains are over the engine of spring 2025, which the blogs improved step by step: its fused top-k saved 58 x 237 us "
    "and was worth 7.4 %, so its step took about 190 ms. Its experts split over all ranks (EP 1) ran narrow products and an "
    "all-reduce of every token; no public point with attention DP measures that, nor a step without CUDA graphs."
)
"""What the published gains are gains over."""
BLOG1 = "TensorRT-LLM tech blog 1, Pushing Latency Boundaries (B200, batch 1)"
RANKS = 8
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
    latency: bool = False
    """Whether the published load is a single request with drafts, else 3,072 requests over 8 attention-DP ranks."""


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One line of the table."""

    name: str
    title: str
    gain: float | None
    """Throughput with it over without, less 1; None where the case does not use it."""
    gain_at_published: float | None
    """The same at the load of the published figure, on the case's machine; None where its instances cannot have 8 ranks."""
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
             lambda case: replace(case, mtp=0, acceptance=None), latency=True),
)  # fmt: skip
"""The ladder of the literature, in its order."""


def ablate(case: PerfCase, calibration: Calibration | None = None) -> list[AblationRow]:
    """A row for every optimisation; `gain` is None for those that the case does not use."""
    here = _gains(case, ABLATIONS, calibration)
    loads = {latency: [item for item in ABLATIONS if item.latency == latency] for latency in (False, True)}
    there = {}
    for latency, items in loads.items():
        there |= _gains(_published(case, latency), items, calibration) if case.machine.nvlink_domain >= RANKS else {}
    return [
        AblationRow(item.name, item.title, here[item.name], there.get(item.name), item.published, item.source) for item in ABLATIONS
    ]


def _gains(case: PerfCase, items: Sequence[Ablation], calibration: Calibration | None) -> dict[str, float | None]:
    others = [item.without(case) for item in items]
    predicted = predict_many([case, *others], calibration).tokens_per_gpu
    return {
        item.name: None if other == case else float(predicted[0] / value) - 1
        for item, other, value in zip(items, others, predicted[1:], strict=True)
    }


def _published(case: PerfCase, latency: bool) -> PerfCase:
    """The load of blog 1 or of blog 3, with the case's machine and formats."""
    drafts, load = (3, {"concurrency": 1}) if latency else (0, {"concurrency": 3072, "max_num_tokens": 1536})
    return replace(
        case, tp=RANKS, ep=2 if latency else RANKS, attention_dp=not latency, isl=1024, osl=2048, mtp=drafts, acceptance=None,
        moe_backend=None, max_batch_size=None, kv_tokens=None, **load,
    )  # fmt: skip
