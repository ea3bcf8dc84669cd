"""A user's file of TensorRT-LLM arguments, as the planner sees it: the rules and the models then judge it like a plan.

Other spellings, which published recipes still have and the engine refuses (`extra="forbid"`), are understood and named; so
are keys that no version knows, with the nearest one (pipeline/engines/trtllm/migrate.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.migrate import migrate
from pipeline.engines.trtllm.versions import VersionLine, known_lines, version_line
from pipeline.planner.setup import Layout, Setup

__all__ = ["ReadArgs", "read_llm_args"]

Args = dict[str, Any]
Absent = TypeVar("Absent", int, None)

WIDEST, LARGEST = 4096, 2**31 - 1
"""Ranks along one axis, and any other count."""
KV_DTYPES = {"fp8": "fp8", "nvfp4": "nvfp4", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class ReadArgs:
    """What a file says."""

    setup: Setup
    renamed: tuple[str, ...]
    """Clauses about keys that must be renamed."""
    unknown: tuple[str, ...]
    """Clauses about what the engine refuses."""


def read_llm_args(args: Mapping[str, Any], base: Setup) -> ReadArgs:
    """`args` on the model, machine, formats, version and workload of `base`; what is absent is TensorRT-LLM's default.

    Raises:
        ConfigError: if a value has the wrong type, or is out of all bounds.
    """
    try:
        read = migrate(args, _line(base.version))
        if wrong := [str(item) for item in read.lost if item.kind == "type" or (item.kind == "value" and _is_number(item.value))]:
            raise ValueError("; ".join(wrong))
        return ReadArgs(_setup(read.args, base), tuple(map(str, read.changes)), tuple(map(str, read.lost)))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"The LLM arguments cannot be read: {error}. Keys and types are those of tensorrt_llm.LLM.") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _line(version: str) -> VersionLine:
    """That of `version`; the newest where it is not known, which is a finding of its own."""
    try:
        return version_line(version)
    except ConfigError:
        return version_line(known_lines()[-1])


def _setup(args: Args, base: Setup) -> Setup:
    kv, moe, spec = (args.get(name) or {} for name in ("kv_cache_config", "moe_config", "speculative_config"))
    tp = _count(args, "tensor_parallel_size", 1, WIDEST)
    adp = bool(args.get("enable_attention_dp", False))
    moe_tp = _count(args, "moe_tensor_parallel_size", tp, WIDEST)
    ep = _count(args, "moe_expert_parallel_size", max(1, tp // moe_tp), WIDEST)
    balancer = moe.get("load_balancer")
    return Setup(
        arch=base.arch, hw=base.hw, formats=base.formats, stored_as=base.stored_as, model=base.model, version=base.version,
        isl=base.isl, osl=base.osl, concurrency=base.concurrency, role=base.role, given=base.given,
        layout=Layout(tp, ep, adp and tp > 1, _count(args, "pipeline_parallel_size", 1, WIDEST)),
        kv_format=KV_DTYPES.get(str(kv.get("dtype")), base.kv_format),
        mtp=_count(spec, "max_draft_len", 0) or _count(spec, "num_nextn_predict_layers", 0),
        moe_backend=str(moe.get("backend") or _default_backend(base)),
        moe_max_num_tokens=_count(moe, "max_num_tokens", None),
        expert_slots=_count(balancer, "num_slots", None) if isinstance(balancer, Mapping) else None,
        max_batch_size=_count(args, "max_batch_size", 2048),
        max_num_tokens=_count(args, "max_num_tokens", 8192),
        max_seq_len=_count(args, "max_seq_len", None),
        **_graphs(args),
        fraction=_share(kv, "free_gpu_memory_fraction", 0.9),
        chunked_prefill=bool(args.get("enable_chunked_prefill", False)),
        block_reuse=bool(kv.get("enable_block_reuse", True)),
        tokens_per_block=_count(kv, "tokens_per_block", None),
        attention_backend=str(args.get("attn_backend", "TRTLLM")),
        overlap=not args.get("disable_overlap_scheduler", False),
        relaxed_acceptance=bool(spec.get("use_relaxed_acceptance_for_thinking", False)),
        balanced=bool((args.get("attention_dp_config") or {}).get("enable_balance", False)),
        transfer=(args.get("cache_transceiver_config") or {}).get("backend"),
    )  # fmt: skip


def _graphs(args: Args) -> Args:
    """Absent: on, up to 128; null: off."""
    config = args.get("cuda_graph_config", {"max_batch_size": min(128, _count(args, "max_batch_size", 128))})
    piecewise = args.get("prefill_cuda_graph_backend") == "piecewise"
    piecewise |= bool((args.get("torch_compile_config") or {}).get("enable_piecewise_cuda_graph"))
    if config is None:
        return {"graph_batch": 0, "piecewise": piecewise}
    sizes = tuple(_count({"batch_sizes": size}, "batch_sizes", 1) for size in config.get("batch_sizes") or ())
    largest = _count(config, "max_batch_size", max(sizes, default=128))
    return {
        "graph_batch": largest, "graph_sizes": sizes, "graph_padding": bool(config.get("enable_padding", False)),
        "piecewise": piecewise,
    }  # fmt: skip


def _count(section: Mapping[str, Any], name: str, absent: Absent, most: int = LARGEST) -> int | Absent:
    """A whole number from 1 to `most`; None, 0 and -1 are how TensorRT-LLM spells an absent one.

    Raises:
        ValueError: on anything else.
    """
    value = section.get(name)
    if value is None or value in (0, -1):
        return absent
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if not 1 <= number <= most:
        raise ValueError(f"{name}={value!r} is not a whole number from 1 to {most:,}")
    return number


def _share(section: Mapping[str, Any], name: str, absent: float) -> float:
    """Above 0, up to 1; ValueError if not."""
    value = float(section.get(name, absent))
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value} is not above 0 and up to 1")
    return value


def _default_backend(base: Setup) -> str:
    """AUTO from 1.2 on; CUTLASS before."""
    return "AUTO" if base.line >= (1, 2) else "CUTLASS"
