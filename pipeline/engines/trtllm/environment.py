"""Environment variables of the serving process, each with its reason. Rows, not code: a new one is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.engines.trtllm.versions import VersionLine

__all__ = ["environment"]


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable and when it is set."""

    name: str
    value: str
    when: Callable[[dict[str, Any]], bool]
    reason: str
    source: str


def _hopper_fp8(deploy: dict[str, Any]) -> bool:
    return deploy["sm"] == 90 and deploy["expert_format"] == "fp8_block"


VARIABLES = (
    Variable(
        "TRTLLM_ENABLE_PDL",
        "1",
        lambda deploy: deploy["sm"] >= 90,
        "kernels start while the one before them ends: 173 instead of 168 tokens a second at batch 1",
        "NVIDIA/TensorRT-LLM tech_blog/blog1",
    ),
    Variable(
        "TRTLLM_DG_JIT_USE_NVCC",
        "1",
        _hopper_fp8,
        "DeepGEMM's kernels are compiled by nvcc, as in NVIDIA's H200 runs",
        "NVIDIA/TensorRT-LLM Best_perf_practice_on_DeepSeek-R1",
    ),
    Variable(
        "PYTORCH_ALLOC_CONF",
        "max_split_size_mb:8192",
        lambda deploy: deploy["sm"] == 90 and deploy["isl"] >= 8192,
        "long prompts fragmented the allocator on H200 until memory ran out",
        "NVIDIA/TensorRT-LLM deployment guide for DeepSeek-R1",
    ),
)


def environment(deploy: dict[str, Any], line: VersionLine) -> list[dict[str, str]]:
    """What to set beyond what the line does by itself."""
    return [
        {"name": variable.name, "value": variable.value, "reason": variable.reason, "source": variable.source}
        for variable in VARIABLES
        if variable.when(deploy) and line.environment_defaults.get(variable.name) != variable.value
    ]
