"""Limits of the compiled torch engine: one device, a cache of fixed size, weights dequantised to one type but for experts that
plugins compute as they are stored."""

from __future__ import annotations

from typing import Any

from pipeline.config.schema import TorchEngineConfig
from pipeline.planner.case import Case
from pipeline.planner.choose import Decision
from pipeline.planner.memory import GIB, kv_bytes_per_token
from pipeline.planner.params import CLASSES, main_parts
from pipeline.planner.placement import rank_places

__all__ = ["torch_decisions", "torch_deploy", "torch_memory", "torch_rules", "torch_warnings"]

WIDTH = {"float32": 4, "bfloat16": 2}
KV_NAME = {"float32": "float32", "bfloat16": "bf16"}
KEPT = {"fp8_block": 128, "nvfp4": 256, "w4a16_nvfp4": 256}
"""Formats in which plugins compute routed experts on sm_90, and what their sizes must be multiples of."""


def torch_deploy(case: Case) -> dict[str, Any]:
    """deploy.json of the torch engine: what `engine.torch` says, on one device."""
    engine = _engine(case)
    return {
        "engine": "torch",
        "tp": 1,
        "ep": 1,
        "pp": 1,
        "attention_dp": False,
        "num_devices": 1,
        "instances": 1,
        "gpus_per_node": case.hw.num_devices,
        "nodes": 1,
        "max_batch_size": engine.max_batch_size,
        "max_num_tokens": engine.prefill_chunk,
        "max_seq_len": engine.max_seq_len,
        "kv_cache_dtype": _kv_name(engine),
        "tokens_per_block": engine.page_size,
        "free_gpu_memory_fraction": None,
        "cuda_graph_max_batch_size": None,
        "mtp": 0,
        "moe_backend": None,
        "placement": rank_places(case.hw, 1, 1) if case.hw.sm else [],
    }


def torch_memory(case: Case) -> dict[str, int]:
    """Bytes on the device by component."""
    engine = _engine(case)
    sizes = dict.fromkeys(CLASSES, 0)
    for part in main_parts(case.arch):
        kept = part.cls == "routed_experts" and _keeps_experts(case)
        sizes[part.cls] += part.bytes(case.expert_format) if kept else part.params * WIDTH[engine.dtype]
    tokens = engine.max_batch_size * (engine.max_seq_len + engine.page_size)
    return {**sizes, "kv_cache": tokens * kv_bytes_per_token(case.arch, _kv_name(engine))}


def torch_rules(case: Case) -> list[str]:
    """What cannot work."""
    engine, arch, problems = _engine(case), case.arch, []
    memory, visible = torch_memory(case), int(case.hw.memory_bytes)
    total, cache = sum(memory.values()), memory["kv_cache"]
    if total > visible:
        way_out = "use engine=trtllm on GPUs"
        if total - cache < visible:
            way_out = f"its KV cache takes {cache / GIB:.1f} GiB of it in {_kv_name(engine)}, so lower engine.torch.max_seq_len or "
            way_out += "max_batch_size" + (", or set engine.torch.kv_dtype=fp8" if engine.kv_dtype == "auto" else "")
        problems.append(
            f"{case.config.model.name} takes {total:,} bytes ({total / GIB:.1f} GiB) in {engine.dtype} on one device, "
            f"and hw={case.hw.name} has {visible:,} ({visible / GIB:.1f} GiB): {way_out}."
        )
    if engine.max_seq_len > arch.max_position_embeddings:
        problems.append(
            f"engine.torch.max_seq_len={engine.max_seq_len} exceeds the model's {arch.max_position_embeddings} "
            f"positions: set {arch.max_position_embeddings} or less."
        )
    if (case.config.parallel.tp or 1) > 1 or case.config.parallel.pp > 1:
        problems.append("The torch engine uses one device: set parallel=auto, or engine=trtllm.")
    if engine.device == "cuda" and case.hw.sm is None:
        problems.append(f"engine.torch.device=cuda, but hw={case.hw.name} has no GPU: set engine.torch.device=cpu.")
    return problems


def torch_warnings(case: Case) -> list[str]:
    """What works, but not as the workload says."""
    engine, warnings = _engine(case), [case.precision_note] if case.precision_note else []
    tokens = case.config.workload.isl + case.config.workload.osl
    if tokens > engine.max_seq_len:
        asked = f"Workload {case.config.workload.name} asks for {tokens:,} tokens a request"
        warnings.append(f"{asked}; the engine holds {engine.max_seq_len:,}.")
    if case.concurrency and case.concurrency > engine.max_batch_size:
        warnings.append(f"{case.concurrency} requests at once on {engine.max_batch_size} slots: the rest will queue.")
    if case.config.parallel.attention_dp or (case.config.parallel.ep or 1) > 1:
        warnings.append("parallel.ep and parallel.attention_dp mean nothing on one device.")
    return warnings


def torch_decisions(case: Case) -> tuple[Decision, ...]:
    """Where the numbers come from."""
    engine, found = _engine(case), f"{case.expert_format} is dequantised once, at load"
    if _keeps_experts(case):
        found = f"all but the routed experts, which plugins compute in {case.expert_format}"
    return (
        Decision("max_batch_size", engine.max_batch_size, "as configured", "engine.torch.max_batch_size"),
        Decision("max_seq_len", engine.max_seq_len, "as configured", "engine.torch.max_seq_len"),
        Decision("weights", engine.dtype, found, "engine.torch.dtype"),
        Decision("kv_cache", _kv_name(engine), "as configured", "engine.torch.kv_dtype"),
    )


def _kv_name(engine: TorchEngineConfig) -> str:
    """Type of the cache, as the planner names it."""
    return KV_NAME[engine.dtype] if engine.kv_dtype == "auto" else engine.kv_dtype


def _keeps_experts(case: Case) -> bool:
    """Whether the build will take moe_grouped_gemm, as far as it can be known without the checkpoint."""
    engine, unit = _engine(case), KEPT.get(case.expert_format)
    sizes = case.arch.hidden_size, case.arch.moe_intermediate_size
    asked = engine.device == "cuda" and engine.plugins == "auto" and case.hw.sm == 90
    return asked and unit is not None and not any(size % unit for size in sizes)


def _engine(case: Case) -> TorchEngineConfig:
    assert case.config.engine.torch is not None
    return case.config.engine.torch
