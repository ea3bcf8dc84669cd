"""One instance as it would be started: what memory, rules and speed are asked about. All limits are those of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.schema import HwConfig
from pipeline.models.arch import Arch

__all__ = ["Layout", "Setup"]


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
        return self.tp // self.ep

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
    """Model, machine, formats, layout and the arguments of TensorRT-LLM that memory depends on."""

    arch: Arch
    hw: HwConfig
    formats: Mapping[str, str]
    """Weight format by module class (`params.CLASSES`); what is not named is BF16."""
    layout: Layout
    version: str = "1.2"
    kv_format: str = "fp8"
    mtp: int = 0
    """Draft tokens a step."""
    moe_backend: str = "CUTLASS"
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    graph_batch: int | None = None
    """Largest batch with a CUDA graph; None: max_batch_size, 0: no graphs."""
    piecewise: bool = False
    """Piecewise CUDA graphs of the prefill."""
    moe_max_num_tokens: int | None = None
    """Tokens of one MoE chunk; None: the backend's default."""
    fraction: float = 0.8
    """Share of what is free after loading that the KV cache takes."""

    @property
    def line(self) -> tuple[int, int]:
        """Version line as numbers: (1, 2)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def captured(self) -> int:
        """Largest batch with a CUDA graph."""
        return self.max_batch_size if self.graph_batch is None else self.graph_batch
