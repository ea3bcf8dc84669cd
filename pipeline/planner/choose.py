"""What `plan` decides for TensorRT-LLM, each with its reason and where that comes from.

All GPUs of one node that divide the model (a repository holds one instance); attention data parallelism for many requests at
once, tensor parallelism for few; then the batch and token limits of one rank, which depend on each other.
The "recipes" are the configurations that NVIDIA publishes for DeepSeek-R1, in the folder that `RECIPES` names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pipeline.planner.case import Case
from pipeline.planner.memory import RankMemory, memory_of, tokens_per_block
from pipeline.planner.policy import num_gpus
from pipeline.planner.setup import Layout, Setup, divides

__all__ = [
    "FRACTIONS", "Choice", "Decision", "choose", "fraction_decision", "fractions", "gpu_counts", "moe_backend",
    "rank_limits", "size",
]  # fmt: skip

RECIPES = "NVIDIA/TensorRT-LLM examples/configs"

ADP_FROM = {"blackwell": 64, "hopper": 512}
"""Concurrency from which the recipes switch attention DP on: B200 32 off, 64 on; H200 256 off, 1024 on."""
LOW_CONCURRENCY = 4
"""Up to here the recipes spend the whole node on latency."""
TPOT_OF_ADP_MS = 20.0
"""Attention DP was not measured below this time per token without MTP: B200 FP4 ADP8+EP8 23.9 ms at 256 requests."""
ROOM = 64
"""Whole sequences a cache must hold for a layout to count as having room, when no concurrency is asked for."""
CHUNK = 8192
"""Tokens of one step of a chunked prefill: more does not fill the tensor cores better, less reads the weights too often."""
FRACTIONS = (0.8, 0.85, 0.9)
"""Shares of the free memory for the cache, the least that holds the requests wins: 0.8 is what the recipes have, 0.9 the
engine's default."""
LARGEST_BATCH = 1024
"""Largest max_batch_size of a rank in the recipes."""
MARGIN_TOKENS = 256
"""max_seq_len beyond prompt and output: chat template and drafts. The newer recipes' value."""
NO_MTP_FROM = 4096
"""Concurrency from which the recipes draft nothing: the batch already fills the tensor cores."""
MOE_BACKENDS = {
    ("blackwell", "nvfp4", False): "TRTLLM",
    ("blackwell", "nvfp4", True): "CUTLASS",
    ("blackwell", "fp8_block", False): "TRTLLM",
    ("blackwell", "fp8_block", True): "DEEPGEMM",
    ("blackwell", "w4a8_nvfp4_fp8", False): "TRTLLM",
    ("blackwell", "w4a8_nvfp4_fp8", True): "TRTLLM",
}
"""(family, format of the routed experts, attention DP) -> backend of the recipes; CUTLASS for the rest."""
LATENCY_EP = {("blackwell", "nvfp4"): 2, ("hopper", "fp8_block"): 4}
"""EP of NVIDIA's lowest-latency runs on 8 GPUs."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice, for the reader."""

    name: str
    value: Any
    reason: str
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout with the limits of one rank and the memory they take."""

    setup: Setup
    memory: RankMemory
    """Of the rank with the least room (pipeline stages differ)."""
    sequences: int
    """Whole sequences (prompt and output) that one rank's cache holds."""
    decisions: tuple[Decision, ...] = ()

    def value(self, name: str) -> Any:
        """What was decided for `name`."""
        return next(decision.value for decision in self.decisions if decision.name == name)

    @property
    def layout(self) -> Layout:
        """How the instance is spread."""
        return self.setup.layout

    @property
    def capacity(self) -> int:
        """Whole sequences that the instance holds at once."""
        return self.sequences * self.layout.cache_ranks


def choose(case: Case) -> Choice:
    """The first candidate with room, else the largest one: the rules then say what it lacks."""
    prefer, reason, source = _attention_dp(case)
    sized = [size(case, layout) for layout in _candidates(case, prefer)]
    chosen = next((choice for choice in sized if _has_room(case, choice)), None) or max(
        sized, key=lambda choice: (choice.capacity, choice.memory.free)
    )
    if chosen.layout.attention_dp != prefer and chosen.layout.tp > 1:
        reason, source = f"{reason}, but only attention {'DP' if not prefer else 'TP'} leaves room for the cache", ""
    decisions = (
        Decision("layout", str(chosen.layout), _layout_reason(case, chosen), "pipeline/planner/choose.py"),
        Decision("attention_dp", chosen.layout.attention_dp, reason if chosen.layout.tp > 1 else "one GPU", source),
        *chosen.decisions,
    )
    return replace(chosen, decisions=decisions)


def fractions(case: Case) -> tuple[float, ...]:
    """Shares of the free memory that the cache may take."""
    asked = case.trtllm.free_gpu_memory_fraction
    return FRACTIONS if asked is None else (asked,)


def size(case: Case, layout: Layout) -> Choice:
    """Limits of one rank under `layout`, with the least share of memory that holds what is wanted, or the largest."""
    wanted = math.ceil(case.concurrency / layout.cache_ranks) if case.concurrency else 1
    for fraction in fractions(case):
        choice = _sized(case, layout, fraction)
        if choice.sequences >= wanted:
            break
    return choice


def _sized(case: Case, layout: Layout, fraction: float) -> Choice:
    """The largest batch up to the wanted one whose sequences fit the cache."""
    mtp, moe = _mtp(case, layout), moe_backend(case, layout)
    batch = math.ceil(case.concurrency / layout.cache_ranks) if case.concurrency else LARGEST_BATCH
    block = tokens_per_block(case.arch, case.hw.sm or 0)
    prompt = min(case.longest_prompt, CHUNK) if case.config.workload.chunked_prefill else case.longest_prompt
    while True:
        tokens = _round_up(prompt + batch * (1 + mtp.value) + 64, 64)
        setup = _setup(
            case, layout, mtp=mtp.value, moe_backend=moe.value, max_batch_size=batch, max_num_tokens=tokens, fraction=fraction
        )
        memory = min(memory_of(setup), key=lambda rank: rank.kv_tokens)
        sequences = memory.sequences(case.isl + case.osl + mtp.value, block)
        if sequences >= batch or batch == 1:
            break
        batch = _even(max(1, min(sequences, batch - 1)))
    return Choice(
        setup=setup,
        memory=memory,
        sequences=sequences,
        decisions=(mtp, moe, fraction_decision(case, fraction, batch), *rank_limits(case, layout, batch, tokens)),
    )


def fraction_decision(case: Case, fraction: float, batch: int) -> Decision:
    """The cache's share of what is free after loading."""
    reason = f"the least of {', '.join(map(str, FRACTIONS))} with room for {batch} requests a rank"
    if case.trtllm.free_gpu_memory_fraction is not None:
        reason = "asked for: engine.trtllm.free_gpu_memory_fraction"
    elif case.concurrency and fraction == FRACTIONS[-1]:
        reason = f"the largest of {', '.join(map(str, FRACTIONS))}: less holds fewer of the requests"
    return Decision("free_gpu_memory_fraction", fraction, reason, RECIPES)


def gpu_counts(limit: int) -> list[int]:
    """Sizes of an instance worth trying: powers of two up to `limit`."""
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def _candidates(case: Case, prefer_adp: bool) -> list[Layout]:
    """Layouts in order of preference; what the configuration fixes is fixed."""
    asked = case.config.parallel
    counts = [asked.tp] if asked.tp else gpu_counts(max(1, num_gpus(case.config) // asked.pp))[::-1]
    modes = [asked.attention_dp] if asked.attention_dp is not None else [prefer_adp, not prefer_adp]
    layouts = [layout for adp in modes for tp in counts if (layout := _layout(case, tp, adp and tp > 1))]
    adp = bool(asked.attention_dp if asked.attention_dp is not None else prefer_adp)
    impossible = Layout(asked.tp or counts[0], asked.ep or 1, adp)
    return [replace(layout, pp=asked.pp) for layout in layouts or [impossible]]


def _layout(case: Case, tp: int, adp: bool) -> Layout | None:
    """`tp` ranks with the recipes' expert parallelism, or the largest that divides the model; None where none does."""
    asked = case.config.parallel.ep
    if asked:
        layout = Layout(tp, asked, adp)
        return layout if case.config.parallel.tp or divides(case.arch, case.formats, layout) else None
    low = not adp and case.concurrency is not None and case.concurrency <= LOW_CONCURRENCY
    first = LATENCY_EP.get((case.family, case.expert_format), tp) if low else tp
    sizes = [ep for ep in (first, *range(tp, 0, -1)) if tp % ep == 0]
    fitting = (layout for ep in sizes if divides(case.arch, case.formats, layout := Layout(tp, ep, adp)))
    return next(fitting, Layout(tp, tp, adp) if case.config.parallel.tp else None)


def _has_room(case: Case, choice: Choice) -> bool:
    wanted = case.concurrency or ROOM * choice.layout.cache_ranks
    return choice.memory.free > 0 and choice.capacity >= wanted


def _attention_dp(case: Case) -> tuple[bool, str, str]:
    """Whether to prefer attention DP, why, and after whom."""
    asked = case.config.parallel.attention_dp
    if asked is not None:
        return asked, "asked for", "parallel.attention_dp"
    tpot = case.config.slo.tpot_ms
    if tpot is not None and tpot < TPOT_OF_ADP_MS:
        reason = f"slo.tpot_ms={tpot:g} is below {TPOT_OF_ADP_MS:g}: attention TP answers faster"
        return False, reason, "InferenceX, B200 FP4 ADP8+EP8: 23.9 ms at 256 requests, TP8+EP8: 16.4 ms at 64"
    start = ADP_FROM.get(case.family, ADP_FROM["blackwell"])
    if case.concurrency is None:
        return True, "throughput: each rank caches its own requests; under TP all ranks cache the same", RECIPES
    if case.concurrency >= start:
        return True, f"{_requests(case)}; the recipes use it from {start}", RECIPES
    return False, f"{_requests(case)}; the recipes use attention DP from {start}", RECIPES


def _mtp(case: Case, layout: Layout) -> Decision:
    """Draft tokens a step."""
    if case.trtllm.mtp is not None:
        return Decision("mtp", case.trtllm.mtp, "asked for", "engine.trtllm.mtp")
    if not case.arch.num_nextn_predict_layers:
        return Decision("mtp", 0, "the model has no MTP layer", "config.json")
    if not layout.attention_dp and layout.tp > 1 and case.concurrency is not None:
        return Decision("mtp", 3, "few requests: 3 drafts gave the most tokens a second on B200", f"{RECIPES}; blog 1")
    if case.concurrency is None or case.concurrency >= NO_MTP_FROM:
        return Decision("mtp", 0, "as many requests as fit: the batch fills the tensor cores without drafts", RECIPES)
    return Decision("mtp", 1, f"attention DP below {NO_MTP_FROM} requests", RECIPES)


def moe_backend(case: Case, layout: Layout) -> Decision:
    """Backend of the recipes, unless one is asked for."""
    asked = case.trtllm.moe_backend
    if asked != "auto":
        return Decision("moe_backend", asked, "asked for", "engine.trtllm.moe_backend")
    backend = MOE_BACKENDS.get((case.family, case.expert_format, layout.attention_dp), "CUTLASS")
    mode = "with" if layout.attention_dp else "without"
    reason = f"{case.expert_format} experts on SM{case.hw.sm} {mode} attention DP"
    return Decision("moe_backend", backend, reason, RECIPES)


def _setup(case: Case, layout: Layout, **limits: Any) -> Setup:
    return Setup(
        arch=case.arch,
        hw=case.hw,
        formats=case.formats,
        layout=layout,
        stored_as=case.config.quant.layout,
        model=case.config.model.name,
        version=case.trtllm.version,
        kv_format=case.kv_format,
        max_seq_len=min(case.longest + MARGIN_TOKENS, case.arch.max_position_embeddings),
        chunked_prefill=bool(case.config.workload.chunked_prefill),
        **case.engine_limits,
        isl=case.isl,
        osl=case.osl,
        concurrency=case.concurrency,
        given=case.given,
        ttft_ms=case.config.slo.ttft_ms,
        **limits,
    )


def _layout_reason(case: Case, choice: Choice) -> str:
    """Why this many GPUs."""
    asked = case.config.parallel
    if asked.tp:
        return "asked for: parallel.tp"
    if case.concurrency and case.concurrency <= LOW_CONCURRENCY and not choice.layout.attention_dp:
        return f"{_requests(case)}: for latency, all GPUs of the node that divide the model"
    idle = num_gpus(case.config) - choice.layout.world_size
    more = f"; {idle} stay idle: the model divides no further" if idle else ""
    return f"all GPUs of the node, whose caches add up{more}"


def rank_limits(case: Case, layout: Layout, batch: int, tokens: int) -> tuple[Decision, ...]:
    """The numbers of one rank, with their reasons."""
    ranks = layout.cache_ranks
    if case.concurrency:
        batch_reason = f"{_requests(case)} over {ranks} cache{'s' if ranks > 1 else ''}"
    else:
        batch_reason = f"what the cache holds, {LARGEST_BATCH} at most"
    prompt = f"{CHUNK} tokens of a prompt" if case.config.workload.chunked_prefill else "one whole prompt"
    if asked := case.trtllm.args.get("stream_interval"):
        stream = Decision("stream_interval", asked, "asked for", "engine.trtllm.args")
    elif case.concurrency and case.concurrency <= LOW_CONCURRENCY:
        stream = Decision("stream_interval", 1, "few requests: every token is sent at once")
    else:
        stream = Decision("stream_interval", 10, "ten tokens a message: detokenising and sending cost less", RECIPES)
    graphs = Decision("cuda_graph_max_batch_size", batch, "no graph above max_batch_size", "TensorRT-LLM issue 10688")
    if not case.trtllm.cuda_graphs:
        graphs = Decision("cuda_graph_max_batch_size", 0, "asked for: no CUDA graphs", "engine.trtllm.cuda_graphs")
    return (
        Decision("max_batch_size", batch, f"per rank: {batch_reason}", "TensorRT-LLM counts per rank under ADP"),
        Decision("max_num_tokens", tokens, f"per rank: {prompt} beside a full batch, rounded up to 64", RECIPES),
        stream,
        graphs,
    )


def _requests(case: Case) -> str:
    return "1 request at a time" if case.concurrency == 1 else f"{case.concurrency} requests at once"


def _even(batch: int) -> int:
    """A multiple of 8 from 8 on: CUDA graphs are captured at such sizes."""
    return batch // 8 * 8 if batch > 8 else batch


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
