"""The LLM-API arguments of a deployment, in the spelling of one version line of TensorRT-LLM.

The engine's own models forbid unknown keys, so nothing is emitted that the line's file does not list, and what is
emitted is checked against it here: a mistake ends before a GPU is held, not after. Quantisation is absent on purpose:
the engine reads it from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from pipeline.core.errors import ConfigError, StageError
from pipeline.engines.trtllm.arguments import problems
from pipeline.engines.trtllm.versions import VersionLine

__all__ = ["check", "render", "to_yaml"]

BALANCE = {"enable_balance": True, "timeout_iters": 60, "batching_wait_iters": 0}
"""Of every attention-DP recipe of NVIDIA's (examples/configs/database)."""
KV_DTYPES = {"fp8": "fp8", "nvfp4": "nvfp4"}
TRANSFER_MS = 60_000
"""The default of 1.3."""


def render(role: Mapping[str, Any], line: VersionLine) -> dict[str, Any]:
    """One role of deploy.json (`roles.roles_of`) as arguments of `tensorrt_llm.LLM`.

    Raises:
        ConfigError: the line does not take engine.trtllm.args.
        StageError: it does not take what the plan chose.
    """
    args = {**_limits(role), **_optional(role, line)}
    own = role.get("args") or {}
    _merge(args, own)
    if found := "; ".join(check(args, line)).rstrip("?"):
        refused = f"TensorRT-LLM {line.line} does not take these arguments: {found}."
        raise ConfigError(f"{refused} See engine.trtllm.args.") if own else StageError(refused)
    return args


def _limits(role: Mapping[str, Any]) -> dict[str, Any]:
    """What every instance has."""
    graphs = role["cuda_graph_max_batch_size"]
    return {
        "tensor_parallel_size": role["tp"],
        "moe_expert_parallel_size": role["ep"],
        "pipeline_parallel_size": role["pp"],
        "enable_attention_dp": role["attention_dp"],
        "max_batch_size": role["max_batch_size"],
        "max_num_tokens": role["max_num_tokens"],
        "max_seq_len": role["max_seq_len"],
        "kv_cache_config": {
            "dtype": KV_DTYPES.get(role["kv_cache_dtype"], "auto"),
            "free_gpu_memory_fraction": role["free_gpu_memory_fraction"],
        },
        "moe_config": {"backend": role["moe_backend"]},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": graphs} if graphs else None,
        "stream_interval": role["stream_interval"],
        "trust_remote_code": False,
    }


def _optional(role: Mapping[str, Any], line: VersionLine) -> dict[str, Any]:
    """What differs from the engine's default in some deployments; nested tables are those of `_limits` with more."""
    args: dict[str, Any] = {}
    base = _limits(role)
    if role["attention_dp"] and role.get("balanced", True) and "attention_dp_config" in line.fields:
        args["attention_dp_config"] = dict(BALANCE)
    if role.get("chunked_prefill"):
        args["enable_chunked_prefill"] = True
    if role["mtp"]:
        args["speculative_config"] = {"decoding_type": "MTP", line.mtp_key: role["mtp"]}
    if not role.get("block_reuse", True):
        args["kv_cache_config"] = {**base["kv_cache_config"], "enable_block_reuse": False}
    if not role.get("overlap", True):
        args["disable_overlap_scheduler"] = True
    if slots := role.get("expert_slots"):
        balancer = {"num_slots": slots, "layer_updates_per_iter": role["expert_updates"]}
        args["moe_config"] = {**base["moe_config"], "load_balancer": balancer}
    if role.get("transfer"):
        args["cache_transceiver_config"] = _transceiver(role, line)
    return args


def _transceiver(role: Mapping[str, Any], line: VersionLine) -> dict[str, Any]:
    """A buffer for the longest prompt, and a deadline, where the line has one: a lost notice else hangs for good."""
    known = line.section("CacheTransceiverConfig")
    name = role["transfer"]
    table = {"backend": name if name in known["backend"].words else name.lower(), "max_tokens_in_buffer": role["transfer_tokens"]}
    return table | ({"kv_transfer_timeout_ms": TRANSFER_MS} if "kv_transfer_timeout_ms" in known else {})


def _merge(args: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put the user's own arguments over the plan's; `plan` refuses those that would change what it is for."""
    for key, value in more.items():
        if isinstance(args.get(key), dict) and isinstance(value, Mapping):
            _merge(args[key], value)
        else:
            args[key] = value


def check(args: Mapping[str, Any], line: VersionLine) -> list[str]:
    """What the engine would refuse, or accept and do otherwise, as clauses."""
    return [str(problem) for problem in problems(args, line)] or _between(args)


def _between(args: Mapping[str, Any]) -> list[str]:
    """What concerns several arguments at once; absent ones have their defaults."""
    found = []
    batch, tokens = args.get("max_batch_size") or 2048, args.get("max_num_tokens") or 8192
    graphs = args.get("cuda_graph_config") or {}
    largest = graphs.get("max_batch_size") or max(graphs.get("batch_sizes") or [0])
    ranks, experts = args.get("tensor_parallel_size", 1), args.get("moe_expert_parallel_size") or 1
    if largest > batch:
        found.append(f"cuda_graph_config.max_batch_size {largest} exceeds max_batch_size {batch}")
    if experts > 0 and ranks % experts:
        found.append("moe_expert_parallel_size does not divide tensor_parallel_size")
    if args.get("attention_dp_config") and not args.get("enable_attention_dp"):
        found.append("attention_dp_config has no effect without enable_attention_dp")
    if tokens < batch:
        found.append(f"max_num_tokens {tokens} is below max_batch_size {batch}")
    return found


def to_yaml(args: Mapping[str, Any]) -> str:
    """The arguments as YAML, sorted."""
    return yaml.safe_dump(dict(args), sort_keys=True, default_flow_style=False)
