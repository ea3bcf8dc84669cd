"""What is predicted: one engine instance on one kind of GPU under a closed loop of `concurrency` requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.config.schema import HwConfig
from pipeline.core.errors import ConfigError
from pipeline.models.arch import Arch

__all__ = ["ENGINE", "Machine", "PerfCase", "checkpoint_formats"]

ENGINE = "1.2.0rc6"
"""TensorRT-LLM line of predictions that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of GPU: bytes and FLOP a second, dense; links in one direction."""

    name: str
    sm: int
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    """By operand type: bf16, fp8 and, where the chip has it, fp4."""
    nvlink: float
    nvlink_domain: int
    scale_out: float = 50e9
    """Of one GPU's way out of its NVLink domain, one direction."""
    memory_bytes: float
    """As software sees it."""

    @classmethod
    def of(cls, hw: HwConfig) -> Machine:
        """The machine of a `conf/hw` file. ConfigError for one without tensor cores or links."""
        if hw.sm is None or not (hw.flops_bf16 and hw.flops_fp8 and hw.nvlink_bandwidth):
            raise ConfigError(
                f"hw={hw.name} has no sm, flops_bf16, flops_fp8 or nvlink_bandwidth, without which no speed can be predicted; "
                f"set them in conf/hw/{hw.name}.yaml or plan for a GPU."
            )
        flops = {"bf16": float(hw.flops_bf16), "fp8": float(hw.flops_fp8)}
        if hw.flops_fp4:
            flops["fp4"] = float(hw.flops_fp4)
        return cls(
            name=hw.name, sm=hw.sm, bandwidth=hw.memory_bandwidth, flops=flops, nvlink=hw.nvlink_bandwidth,
            nvlink_domain=hw.nvlink_domain, scale_out=hw.network_bandwidth, memory_bytes=hw.memory_bytes,
        )  # fmt: skip


def checkpoint_formats(precision: str) -> dict[str, str]:
    """Formats by module class of the published checkpoints: `fp8` is DeepSeek's, `fp4` NVIDIA's DeepSeek-R1-0528-NVFP4-v2,
    `fp4_v1` the first NVFP4 one, whose attention is BF16 throughout."""
    linear = ("attention", "o_proj", "dense_mlp", "shared_experts", "routed_experts", "mtp")
    tables = {
        "bf16": dict.fromkeys(linear, "bf16"),
        "fp8": dict.fromkeys(linear, "fp8_block"),
        "fp4": dict.fromkeys(linear, "nvfp4") | {"attention": "bf16", "mtp": "bf16"},
    }
    tables["fp4_v1"] = tables["fp4"] | {"o_proj": "bf16"}
    if precision not in tables:
        raise ConfigError(f"precision={precision!r} is not one of {', '.join(tables)}; give `formats` by module class instead.")
    return tables[precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfCase:
    """One instance of tp GPUs, and what it is asked. Lengths are means of what is sent, not upper bounds."""

    machine: Machine
    arch: Arch
    formats: Mapping[str, str] = field(hash=False)
    """Weight format by module class (`checkpoint_formats`, or `Case.formats` of the planner)."""
    kv_format: str = "fp8"
    tp: int
    """GPUs of the instance."""
    ep: int = 1
    """Ranks over which whole experts are spread; each expert is split over tp / ep."""
    attention_dp: bool = False
    concurrency: float
    """Requests in flight at the instance, over all its ranks."""
    isl: float
    osl: float
    mtp: int = 0
    """Draft tokens a step."""
    acceptance: float | None = None
    """Mean tokens a step with MTP, 1 to 1 + mtp; None: what was measured on average."""
    engine: str = ENGINE
    """Version of TensorRT-LLM; its line (1.2.0rc6.post2 -> 1.2.0rc6) picks the calibration."""
    moe_backend: str | None = None
    """TRTLLM, CUTLASS, DEEPGEMM, WIDEEP; None: what the engine line's recipes use."""
    max_batch_size: int | None = None
    """Per attention-DP rank, as TensorRT-LLM counts."""
    max_num_tokens: int = 8192
    piecewise_graphs: bool = False
    """Steps with context run in piecewise CUDA graphs (torch_compile_config)."""
    kv_tokens: float | None = None
    """Tokens that one rank's KV cache holds; None: an estimate from the weights."""
    runner: str = "inferencex"
    """Whose client measured; it changes what the first token costs (`inferencex`, `direct`)."""
    without: frozenset[str] = frozenset()
    """Optimisations that are switched off (`ABLATIONS`)."""

    @property
    def backend(self) -> str:
        """The MoE backend; where none is named, the recipes' choice."""
        if self.moe_backend:
            return self.moe_backend
        if self.machine.sm < 100 or (self.attention_dp and self.precision == "fp4"):
            return "CUTLASS"
        return "DEEPGEMM" if self.attention_dp else "TRTLLM"

    @property
    def alltoall(self) -> bool:
        """Whether tokens travel only to their experts' ranks: between nodes, and over NVLink on Blackwell since 1.2. Else
        every rank gathers them all."""
        old = self.engine.startswith(("1.0", "1.1", "2025", "0."))
        return self.leaves_domain or (self.machine.sm >= 100 and not old)

    @property
    def leaves_domain(self) -> bool:
        """Whether its ranks reach each other over the network."""
        return self.tp > self.machine.nvlink_domain

    @property
    def precision(self) -> str:
        """fp4, fp8 or bf16: the operand type of the routed experts."""
        fmt = self.formats["routed_experts"]
        return "fp4" if fmt in ("nvfp4", "mxfp4", "w4a16_nvfp4") else "fp8" if "fp8" in fmt or "w4a8" in fmt else "bf16"

    @property
    def layout(self) -> str:
        """As TensorRT-LLM's users write it: ADP8+EP8, TP8+EP2, TP4."""
        name = f"{'ADP' if self.attention_dp else 'TP'}{self.tp}"
        return name if self.ep == 1 else f"{name}+EP{self.ep}"
