"""A user's file of TensorRT-LLM arguments, as the planner sees it: the rules and the models then judge it like a plan.

Old spellings, which published recipes still have and newer engines refuse (`extra="forbid"`), are understood and named; so
are keys that no version knows, with the nearest one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from pipeline.core.errors import ConfigError
from pipeline.planner.setup import Layout, Setup

__all__ = ["LEGACY", "ReadArgs", "read_llm_args"]

Args = dict[str, Any]
Absent = TypeVar("Absent", int, None)

LEGACY = {
    "tp_size": "tensor_parallel_size",
    "ep_size": "moe_expert_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "moe_backend": "moe_config.backend",
    "moe_max_num_tokens": "moe_config.max_num_tokens",
    "moe_load_balancer": "moe_config.load_balancer",
    "cuda_graph_padding_enabled": "cuda_graph_config.enable_padding",
    "cuda_graph_batch_sizes": "cuda_graph_config.batch_sizes",
    "enable_block_reuse": "kv_cache_config.enable_block_reuse",
}
"""Spelling of the command line or of earlier versions -> where the key lives now."""
NEGATED = {"use_cuda_graph": "cuda_graph_config", "enable_overlap_scheduler": "disable_overlap_scheduler"}
"""Switches of earlier versions that are now something else: {} or null, and the opposite."""
WIDEST, LARGEST = 4096, 2**31 - 1
"""Ranks along one axis, and any other count."""
KV_DTYPES = {"fp8": "fp8", "nvfp4": "nvfp4", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class ReadArgs:
    """What a file says."""

    setup: Setup
    renamed: tuple[str, ...]
    """Sentences about keys that must be renamed."""
    unknown: tuple[str, ...]
    """Sentences about keys that the engine refuses."""


def read_llm_args(args: Mapping[str, Any], base: Setup) -> ReadArgs:
    """`args` on the model, machine, formats, version and workload of `base`; what is absent is TensorRT-LLM's default.

    Raises:
        ConfigError: if a value has the wrong type, or is out of all bounds.
    """
    try:
        flat, renamed = _migrated(args)
        return ReadArgs(_setup(flat, base), tuple(renamed), tuple(_unknown(flat)))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"The LLM arguments cannot be read: {error}. Keys and types are those of tensorrt_llm.LLM.") from error


def _migrated(args: Mapping[str, Any]) -> tuple[Args, list[str]]:
    flat: Args = {}
    renamed = []
    entries = {**args, **(args.get("pytorch_backend_config") or {})}
    entries.pop("pytorch_backend_config", None)
    for key, value in entries.items():
        path = LEGACY.get(key, NEGATED.get(key, key))
        if key in NEGATED:
            value = ({} if value else None) if key == "use_cuda_graph" else not value
        if path != key:
            renamed.append(f"{key} is now {path}: newer engines refuse the old name.")
        head, _, name = path.partition(".")
        if name:
            flat[head] = {**(flat.get(head) or {}), name: value}
        else:
            flat[head] = {**(flat.get(head) or {}), **value} if isinstance(value, Mapping) else value
    return flat, renamed


def _unknown(args: Args) -> Iterator[str]:
    """Keys at the top and in the sections whose keys are known."""
    known = _known_keys()
    for key, value in args.items():
        if key not in known["top"]:
            yield _refused(key, known["top"])
        names = known["nested"].get(key)
        if names and isinstance(value, Mapping):
            yield from (f"{key}: {_refused(name, names)}" for name in value if name not in names)


def _refused(key: str, known: list[str]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"{key} is not an argument of TensorRT-LLM, which refuses unknown ones{f'; did you mean {near[0]}?' if near else '.'}"


@cache
def _known_keys() -> dict[str, Any]:
    return dict(json.loads(files("pipeline.planner").joinpath("llm_args_keys.json").read_text(encoding="utf-8")))


def _setup(args: Args, base: Setup) -> Setup:
    kv, moe, spec = (args.get(name) or {} for name in ("kv_cache_config", "moe_config", "speculative_config"))
    tp = _count(args, "tensor_parallel_size", 1, WIDEST)
    adp = bool(args.get("enable_attention_dp", False))
    moe_tp = _count(args, "moe_tensor_parallel_size", tp, WIDEST)
    ep = _count(args, "moe_expert_parallel_size", max(1, tp // moe_tp), WIDEST)
    balancer = moe.get("load_balancer")
    return Setup(
        arch=base.arch, hw=base.hw, formats=base.formats, stored_as=base.stored_as, model=base.model, version=base.version,
        isl=base.isl, osl=base.osl, concurrency=base.concurrency, role=base.role,
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
