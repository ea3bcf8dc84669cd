"""One instance as it would be started: what memory, rules and speed are asked about. All limits are those of one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.schema import HwConfig
from pipeline.models.arch import Arch
from pipeline.planner.params import block_of

__all__ = ["MLA_SMS", "Layout", "Setup", "attention_divides", "divides"]

MLA_SMS = (90, 100, 103)
"""SMs on which TensorRT-LLM runs DeepSeek's attention (SM120: "Deepseek should be supported by fmha")."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one instance is spread over ranks."""

    tp: int
    """Ranks of one pipeline stage."""
    ep: int
    attention_dp: bool
    pp: int = 1

    @property
    def moe_tp(self) -> int:
        """Ranks that share each expert."""
        return max(1, self.tp // self.ep)

    @property
    def world_size(self) -> int:
        """GPUs of the instance."""
        return self.tp * self.pp

    @property
    def cache_ranks(self) -> int:
        """Ranks of one stage whose KV caches hold different requests."""
        return self.tp if self.attention_dp else 1

    def __str__(self) -> str:
        """As TensorRT-LLM's users write it: ADP8+EP8, TP8+EP2, TP4, TP8+EP8+PP2."""
        parts = [f"{'ADP' if self.attention_dp else 'TP'}{self.tp}"]
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += [f"PP{self.pp}"] if self.pp > 1 else []
        return "+".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Model, machine, formats, layout, the arguments of TensorRT-LLM and what will be asked of it.

    Defaults are TensorRT-LLM's own, so that a file of its arguments can be read as it is meant.
    """

    arch: Arch
    hw: HwConfig
    formats: Mapping[str, str]
    """Weight format by module class (`params.CLASSES`); what is not named is BF16."""
    layout: Layout
    stored_as: str = "modelopt"
    """On-disk layout of the checkpoint (quant.layout)."""
    model: str = "the model"
    version: str = "1.2"
    kv_format: str = "fp8"
    mtp: int = 0
    """Draft tokens a step."""
    moe_backend: str = "CUTLASS"
    moe_max_num_tokens: int | None = None
    """Tokens of one MoE chunk; None: the backend's default."""
    expert_slots: int | None = None
    """Places for experts when a load balancer repeats some (EPLB); None: one an expert."""
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    graph_batch: int | None = None
    """Largest batch with a CUDA graph; None: max_batch_size, 0: no graphs."""
    graph_sizes: tuple[int, ...] = ()
    """The batches with a graph, where they are listed one by one."""
    graph_padding: bool = True
    piecewise: bool = False
    """Piecewise CUDA graphs of the prefill."""
    fraction: float = 0.8
    """Share of what is free after loading that the KV cache takes."""
    chunked_prefill: bool = False
    block_reuse: bool = True
    tokens_per_block: int | None = None
    attention_backend: str = "TRTLLM"
    overlap: bool = True
    """Overlap scheduler."""
    relaxed_acceptance: bool = False
    balanced: bool = True
    """attention_dp_config.enable_balance."""
    role: str = "both"
    """prefill, decode, or both."""
    transfer: str | None = None
    """How the cache goes from prefill to decode: UCX, NIXL, ...; None: the engine's default."""
    isl: int = 1024
    osl: int = 1024
    concurrency: int | None = None
    """Requests in flight over the whole instance."""
    ttft_ms: float | None = None
    """Limit of the time to the first token, which forbids queues."""
    given: frozenset[str] = frozenset()
    """Settings that the user fixed, by name."""

    def told(self, setting: str, value: object, plain: str) -> str:
        """A setting for a sentence: by its name where the user fixed it, else described."""
        return f"{setting}={value}" if setting in self.given else plain

    @property
    def line(self) -> tuple[int, int]:
        """Version line as numbers: (1, 2); (0, 0) where it is none."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def captured(self) -> int:
        """Largest batch with a CUDA graph."""
        return self.max_batch_size if self.graph_batch is None else min(self.graph_batch, self.max_batch_size)

    @property
    def expert_format(self) -> str:
        """Weight format of the routed experts, which decides the MoE kernels."""
        return self.formats.get("routed_experts", "bf16")

    @property
    def blackwell(self) -> bool:
        """Whether this is a data-centre Blackwell (SM100, SM103)."""
        return self.hw.sm in (100, 103)

    @property
    def supported(self) -> bool:
        """Whether TensorRT-LLM has MLA kernels for this chip."""
        return self.hw.sm in MLA_SMS


def divides(arch: Arch, formats: Mapping[str, str], layout: Layout) -> bool:
    """Whether heads, experts and scale blocks divide evenly."""
    if layout.tp % layout.ep or arch.n_routed_experts % layout.ep:
        return False
    experts = arch.moe_intermediate_size % (layout.moe_tp * block_of(formats.get("routed_experts", "bf16"))) == 0
    return experts and (layout.attention_dp or attention_divides(arch, formats, layout.tp))


def attention_divides(arch: Arch, formats: Mapping[str, str], tp: int) -> bool:
    """Whether `tp` ranks can share the heads and the scale blocks of attention."""
    heads = arch.num_attention_heads
    widths = {"attention": heads * arch.qk_head_dim, "o_proj": heads * arch.v_head_dim}
    whole = all(width % (tp * block_of(formats.get(cls, "bf16"))) == 0 for cls, width in widths.items())
    return heads % tp == 0 and (tp == 1 or whole)
