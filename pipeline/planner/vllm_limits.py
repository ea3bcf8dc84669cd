"""Limits of vLLM. Weights are split over its ranks as over TensorRT-LLM's; how much cache is left vLLM finds when it starts.

No speed is predicted: it was calibrated on another engine. What is decided is what makes vLLM start and not run out of memory:
the layout, the sequences and tokens of a step, the length, and a cache that holds the requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.config.engines import VllmEngineConfig
from pipeline.engines.vllm.loading import refusal
from pipeline.planner.case import Case
from pipeline.planner.choose import ADP_FROM, MARGIN_TOKENS, Decision, gpu_counts
from pipeline.planner.memory import GIB, RankMemory, memory_of
from pipeline.planner.params import LINEAR_CLASSES
from pipeline.planner.placement import rank_places
from pipeline.planner.setup import Layout, Setup, divides

__all__ = ["VllmCase"]

RESERVE = 8 * GIB
"""Assumed for activations, CUDA graphs and NCCL of a rank; vLLM measures its own before it sizes the cache."""
BLOCK = 64
"""Tokens of a cache block: FlashMLA takes 64 only, FlashInfer's MLA 32 or 64; vLLM itself makes it 128 for CUTLASS MLA."""
LARGEST_BATCH = 1024
"""Sequences of one rank: vLLM's own default on GPUs of this size."""
FP8_CACHE_ON_HOPPER = (0, 12)
"""From here on FlashMLA's FP8 kernels for dense MLA are taken for granted."""
OLDEST = (0, 10)
"""Release from which all arguments that are written exist."""


@dataclass(frozen=True)
class VllmCase:
    """A case with what vLLM makes of it."""

    case: Case

    @property
    def engine(self) -> VllmEngineConfig:
        """`engine.vllm`."""
        assert self.case.config.engine.vllm is not None
        return self.case.config.engine.vllm

    @property
    def version(self) -> tuple[int, ...]:
        """Of vLLM: (0, 27)."""
        return tuple(int(part) for part in self.engine.version.split(".")[:2])

    @property
    def formats(self) -> list[str]:
        """Weight formats of the linear layers."""
        mtp = {"mtp"} if self.engine.mtp == 0 else set()
        return sorted({fmt for cls, fmt in self.case.formats.items() if cls in LINEAR_CLASSES and cls not in mtp})

    @cached_property
    def layout(self) -> Layout:
        """As asked for, else all GPUs of the node that divide the model; data parallelism for many requests."""
        asked, case = self.case.config.parallel, self.case
        adp = asked.attention_dp if asked.attention_dp is not None else self._many
        counts = [asked.tp] if asked.tp else gpu_counts(max(1, case.hw.num_devices // asked.pp))[::-1]
        layouts = [Layout(tp, asked.ep or tp, adp and tp > 1, asked.pp) for tp in counts]
        return next((layout for layout in layouts if divides(case.arch, case.formats, layout)), layouts[0])

    @property
    def _many(self) -> bool:
        return self.case.concurrency is None or self.case.concurrency >= ADP_FROM.get(self.case.family, ADP_FROM["blackwell"])

    @cached_property
    def memory(self) -> RankMemory:
        """Of the rank with the most weights."""
        case = self.case
        setup = Setup(
            arch=case.arch, hw=case.hw, formats=case.formats, layout=self.layout, kv_format=case.kv_format, mtp=self.engine.mtp,
        )  # fmt: skip
        return max(memory_of(setup), key=lambda rank: sum(rank.weights.values()))

    @property
    def length(self) -> int:
        """max_model_len."""
        return min(self.case.longest + MARGIN_TOKENS, self.case.arch.max_position_embeddings)

    @property
    def cache(self) -> int:
        """Bytes that are left for the cache of a rank; negative where it does not start."""
        budget = int(self.memory.visible * self.engine.gpu_memory_utilization)
        return budget - sum(self.memory.weights.values()) - RESERVE

    @property
    def sequences(self) -> int:
        """Whole requests that the cache of a rank holds."""
        tokens = math.ceil((self.case.isl + self.case.osl + self.engine.mtp) / BLOCK) * BLOCK
        return max(0, self.cache) // (tokens * max(1, self.memory.kv_bytes_per_token))

    @property
    def batch(self) -> int:
        """max_num_seqs: the requests of a rank, as far as the cache holds them."""
        ranks, wanted = self.layout.cache_ranks, self.case.concurrency
        return max(1, min(math.ceil(wanted / ranks) if wanted else LARGEST_BATCH, self.sequences))

    def problems(self) -> list[str]:
        """What cannot work, each with the way out."""
        case, layout = self.case, self.layout
        if case.hw.sm is None:
            return [f"engine=vllm needs GPUs, hw={case.hw.name} has none: use engine=torch."]
        found = [refusal(case.config.quant.layout, self.formats)]
        if self.version < OLDEST:
            found.append(f"engine.vllm.version={self.engine.version} lacks arguments that are written: choose 0.10 or later.")
        if layout.world_size > case.hw.num_devices:
            found.append(
                f"{layout} takes {layout.world_size} GPUs and Triton's vLLM backend serves from one node, which has "
                f"{case.hw.num_devices}: set parallel.tp={case.hw.num_devices} or less."
            )
        if layout.ep not in (1, layout.tp):
            found.append(f"parallel.ep={layout.ep}: vLLM spreads experts over all {layout.tp} ranks or none: set {layout.tp} or 1.")
        if not divides(case.arch, case.formats, layout):
            found.append(f"{layout} does not divide the model's heads, experts or scale blocks: set parallel.tp to a divisor.")
        if case.kv_format == "nvfp4":
            found.append("vLLM has no NVFP4 cache for MLA: set quant.kv_dtype=fp8.")
        if self.engine.mtp and not case.arch.num_nextn_predict_layers:
            found.append(f"engine.vllm.mtp={self.engine.mtp}, but {case.config.model.name} has no MTP layer: set it to 0.")
        if self.sequences < 1:
            found.append(self._too_large())
        return [problem for problem in found if problem]

    def _too_large(self) -> str:
        share, weights = self.engine.gpu_memory_utilization, sum(self.memory.weights.values()) / GIB
        return (
            f"{self.layout} holds {weights:.1f} GiB of weights a rank, and with {RESERVE / GIB:.0f} GiB for activations and graphs "
            f"{self.memory.visible * share / GIB:.1f} GiB (engine.vllm.gpu_memory_utilization={share:g}) leave no room for one "
            f"request of {self.case.isl + self.case.osl:,} tokens: use more GPUs, a smaller format or a larger share."
        )

    def deploy(self) -> dict[str, Any]:
        """deploy.json."""
        case, layout = self.case, self.layout
        instances = max(1, case.hw.num_devices // layout.world_size) if not case.config.parallel.tp else 1
        return {
            "engine": "vllm",
            "hardware": case.hw.title,
            "sm": case.hw.sm,
            "expert_format": case.expert_format,
            "weight_formats": self.formats,
            "isl": case.isl,
            "tp": layout.tp,
            "ep": layout.ep,
            "pp": layout.pp,
            "attention_dp": layout.attention_dp,
            "num_devices": layout.world_size,
            "instances": instances,
            "gpus_per_node": case.hw.num_devices,
            "nodes": 1,
            "max_batch_size": self.batch,
            "max_num_tokens": max(self.engine.max_num_batched_tokens, self.batch),
            "max_seq_len": self.length,
            "kv_cache_dtype": case.kv_format,
            "tokens_per_block": BLOCK,
            "gpu_memory_utilization": self.engine.gpu_memory_utilization,
            "free_gpu_memory_fraction": None,
            "cuda_graph_max_batch_size": None,
            "mtp": self.engine.mtp,
            "moe_backend": None,
            "placement": rank_places(case.hw, layout.world_size, instances),
        }

    def decisions(self) -> tuple[Decision, ...]:
        """Where the numbers come from."""
        case, layout = self.case, self.layout
        mode = "data parallelism: each GPU caches its own requests" if layout.attention_dp else "tensor parallelism answers faster"
        asked = f"{case.concurrency:,} requests" if case.concurrency else "as many requests as fit"
        recipes = "docs.vllm.ai recipes, DeepSeek-V3 (R1) usage guide"
        return (
            Decision("layout", str(layout), "all GPUs of the node that divide the model", "pipeline/planner/vllm_limits.py"),
            Decision("attention_dp", layout.attention_dp, f"{asked}: {mode}", recipes),
            Decision("max_num_seqs", self.batch, f"{self.sequences:,} requests fit into the cache of a rank", "engine.vllm"),
            Decision("max_model_len", self.length, f"longest request and {MARGIN_TOKENS} tokens of template", "workload"),
            Decision("reserve", f"{RESERVE / GIB:.0f} GiB", "for activations and CUDA graphs", "assumed; vLLM measures its own"),
        )

    def notes(self) -> list[str]:
        """What works, but not as one might think."""
        notes = ["No speed is predicted for vLLM: the model is calibrated on TensorRT-LLM."]
        if "nvfp4" in self.formats and self.case.hw.flops_fp4 is None:
            notes.append(f"{self.case.hw.title} has no FP4 tensor cores: vLLM multiplies NVFP4 weights in BF16 (Marlin).")
        if self.case.kv_format == "fp8" and self.case.hw.sm == 90 and self.version < FP8_CACHE_ON_HOPPER:
            notes.append(
                f"vLLM 0.8 refused an FP8 cache for MLA on Hopper (vllm issue 18888), and whether {self.engine.version} takes it "
                "is not known here: set quant.kv_dtype=bf16 if it does not."
            )
        wanted = math.ceil((self.case.concurrency or 0) / self.layout.cache_ranks)
        if wanted > self.sequences:
            notes.append(f"{self.case.concurrency:,} requests at once do not fit the cache: the rest waits, or is preempted.")
        return notes
