"""The question a plan answers: a model, a machine, formats, and what will be asked of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.schema import Config, HwConfig, SloConfig, TrtllmEngineConfig
from pipeline.engines.trtllm.versions import known_lines, version_line
from pipeline.models.arch import Arch
from pipeline.planner.placement import wired
from pipeline.planner.policy import precision_of
from pipeline.planner.workload import Demand, demand_of

__all__ = ["Case", "case_of"]

FAMILIES = {90: "hopper", 100: "blackwell", 103: "blackwell"}
"""SM -> the family whose kernels NVIDIA's DeepSeek recipes are written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Inputs of every choice and rule. `isl` and `osl` may have been cut (see `case_of`)."""

    config: Config
    arch: Arch
    recipe: str
    """Name of the formats; quant.name, unless the policy puts accuracy first."""
    formats: dict[str, str]
    kv_format: str
    precision_note: str
    """Why these are not the recipe's."""
    isl: int
    osl: int
    concurrency: int | None
    demand: Demand
    """The workload as requests; its means are `isl` and `osl`."""
    cut: str = ""
    """Why the lengths are not the workload's own."""

    @property
    def hw(self) -> HwConfig:
        """The machine."""
        return self.config.hw

    @property
    def limits(self) -> SloConfig:
        """`slo.*`; its tokens a second are those of `workload.requests_per_second`, too."""
        slo, rate = self.config.slo, self.config.workload.requests_per_second
        wanted = max(slo.tokens_per_second or 0.0, (rate or 0.0) * self.osl)
        return replace(slo, tokens_per_second=wanted or None)

    @property
    def asked(self) -> str:
        """The limits and totals, as they were given."""
        names = ("tpot_ms", "ttft_ms", "tokens_per_gpu", "tokens_per_second")
        given = {f"slo.{name}": getattr(self.config.slo, name) for name in names}
        given |= {f"workload.{name}": getattr(self.config.workload, name) for name in ("concurrency", "requests_per_second")}
        return ", ".join(f"{name}={value:g}" for name, value in given.items() if value is not None)

    @property
    def given(self) -> frozenset[str]:
        """Settings of layout and load that the user fixed: reasons name these, and only describe the others."""
        config, open_values = self.config, (None, "auto")
        asked = {f"parallel.{name}": getattr(config.parallel, name) for name in ("tp", "ep", "attention_dp")}
        asked |= {"parallel.pp": None if config.parallel.pp == 1 else config.parallel.pp}
        asked |= {"workload.concurrency": config.workload.concurrency}
        asked |= {f"engine.trtllm.{name}": getattr(self.trtllm, name) for name in ("mtp", "moe_backend")}
        return frozenset(name for name, value in asked.items() if value not in open_values)

    @property
    def has_total(self) -> bool:
        """Whether it is said what all instances together must do, so that the nodes for it can be counted."""
        return bool(self.concurrency or self.limits.tokens_per_second)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt; the mean one where its lengths were changed."""
        return max(self.isl, self.demand.longest_prompt if self.demand.isl == self.isl else 0)

    @property
    def longest(self) -> int:
        """Prompt and answer of the longest request."""
        return max(self.isl + self.osl, self.demand.longest if self.demand.isl == self.isl else 0)

    @property
    def family(self) -> str:
        """hopper, blackwell or none."""
        return FAMILIES.get(self.hw.sm or 0, "none")

    @property
    def trtllm(self) -> TrtllmEngineConfig:
        """The section of TensorRT-LLM; only to be asked for where it is the engine."""
        assert self.config.engine.trtllm is not None
        return self.config.engine.trtllm

    @property
    def balanced(self) -> bool:
        """Whether attention-DP ranks are balanced: as asked for, where this version line can."""
        lines = known_lines()
        return self.trtllm.attention_dp_balance and (
            not any(self.trtllm.version.startswith(line) for line in lines)
            or "attention_dp_config" in version_line(self.trtllm.version).fields
        )

    @property
    def engine_limits(self) -> dict[str, Any]:
        """What engine.trtllm fixes of every setup."""
        asked = self.trtllm
        return {
            "balanced": self.balanced,
            "block_reuse": asked.block_reuse,
            "expert_slots": asked.expert_slots,
            "graph_batch": None if asked.cuda_graphs else 0,
            "transfer": asked.transfer if asked.serving == "disaggregated" else None,
        }

    @property
    def expert_format(self) -> str:
        """Weight format of the routed experts, which decides the MoE kernels."""
        return self.formats["routed_experts"]


def case_of(config: Config, arch: Arch) -> Case:
    """The case of a configuration, on the machine as it is wired. Lengths that an embedded model, a stand-in, cannot have are
    cut."""
    config = replace(config, hw=wired(config.hw))
    precision = precision_of(config, arch)
    demand = demand_of(config.workload, config.slo.tpot_ms)
    case = Case(
        config=config,
        arch=arch,
        recipe=precision.recipe,
        formats=precision.formats,
        kv_format=precision.kv_format,
        precision_note=precision.note,
        isl=demand.isl,
        osl=demand.osl,
        concurrency=demand.concurrency,
        demand=demand,
    )
    embedded = (config.model.checkpoint or "").startswith("embedded:")
    limit = arch.max_position_embeddings
    return _cut(case, limit) if embedded and demand.longest > limit else case


def _cut(case: Case, limit: int) -> Case:
    """Shrink prompt and output alike to `limit` tokens."""
    isl = min(limit - 1, max(1, case.isl * limit // (case.isl + case.osl)))
    asked = f"{case.isl} + {case.osl} tokens"
    reason = f"{case.config.model.name} has {limit} positions, workload {case.config.workload.name} asks for {asked}"
    short = Demand(isl, limit - isl, isl, limit, case.concurrency, ())
    return replace(case, isl=isl, osl=limit - isl, demand=short, cut=f"{reason}: planned for {isl} + {limit - isl}")
