"""The LLM-API arguments of a deployment, in the spelling of one version line of TensorRT-LLM.

The engine's own models forbid unknown keys, so nothing is emitted that the line's file does not list, and what is
emitted is checked against it here: a mistake ends before a GPU is held, not after. Quantisation is absent on purpose:
the engine reads it from the checkpoint.
"""

from __future__ import annotations

from typing import Any

import yaml

from pipeline.core.errors import StageError
from pipeline.engines.trtllm.versions import Fields, VersionLine

__all__ = ["check", "render", "to_yaml"]

BALANCE = {"enable_balance": True, "timeout_iters": 60, "batching_wait_iters": 0}
"""Of every attention-DP recipe of NVIDIA's (examples/configs/database)."""


def render(deploy: dict[str, Any], line: VersionLine) -> dict[str, Any]:
    """deploy.json as arguments of `tensorrt_llm.LLM`; StageError if the line does not take them."""
    args: dict[str, Any] = {
        "tensor_parallel_size": deploy["tp"],
        "moe_expert_parallel_size": deploy["ep"],
        "pipeline_parallel_size": deploy["pp"],
        "enable_attention_dp": deploy["attention_dp"],
        "max_batch_size": deploy["max_batch_size"],
        "max_num_tokens": deploy["max_num_tokens"],
        "max_seq_len": deploy["max_seq_len"],
        "kv_cache_config": {
            "dtype": "fp8" if deploy["kv_cache_dtype"] == "fp8" else "auto",
            "free_gpu_memory_fraction": deploy["free_gpu_memory_fraction"],
        },
        "moe_config": {"backend": deploy["moe_backend"]},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": deploy["cuda_graph_max_batch_size"]},
        "stream_interval": deploy["stream_interval"],
        "trust_remote_code": False,
    }
    if deploy["attention_dp"] and "attention_dp_config" in line.fields:
        args["attention_dp_config"] = dict(BALANCE)
    if deploy.get("chunked_prefill"):
        args["enable_chunked_prefill"] = True
    if deploy["mtp"]:
        args["speculative_config"] = {"decoding_type": "MTP", line.mtp_key: deploy["mtp"]}
    if problems := check(args, line):
        raise StageError(f"TensorRT-LLM {line.line} does not take these arguments: {'; '.join(problems)}.")
    return args


def check(args: dict[str, Any], line: VersionLine) -> list[str]:
    """What the engine would refuse, or accept and do otherwise."""
    problems = _check_fields(args, line.fields, "")
    if problems:
        return problems
    graph, batch = args["cuda_graph_config"]["max_batch_size"], args["max_batch_size"]
    if graph > batch:
        problems.append(f"cuda_graph_config.max_batch_size {graph} exceeds max_batch_size {batch}")
    if args["tensor_parallel_size"] % args["moe_expert_parallel_size"]:
        problems.append("moe_expert_parallel_size does not divide tensor_parallel_size")
    if "attention_dp_config" in args and not args["enable_attention_dp"]:
        problems.append("attention_dp_config has no effect without enable_attention_dp")
    if args["max_num_tokens"] < batch:
        problems.append(f"max_num_tokens {args['max_num_tokens']} is below max_batch_size {batch}")
    return problems


def to_yaml(args: dict[str, Any]) -> str:
    """The arguments as YAML, sorted."""
    return yaml.safe_dump(args, sort_keys=True, default_flow_style=False)


def _check_fields(args: dict[str, Any], fields: Fields, prefix: str) -> list[str]:
    problems = []
    for key, value in args.items():
        name, allowed = f"{prefix}{key}", fields.get(key)
        if allowed is None:
            problems.append(f"{name} is not an argument of it")
        elif isinstance(allowed, dict):
            problems += _check_fields(value, allowed, f"{name}.")
        elif not _accepts(allowed, value):
            problems.append(f"{name}={value} must be {_wanted(allowed)}")
    return problems


def _wanted(allowed: str | list[Any]) -> str:
    if isinstance(allowed, list):
        return f"one of {', '.join(map(str, allowed))}"
    kinds = {"int": "a whole number above 0", "count": "a whole number", "bool": "true or false"}
    return kinds.get(allowed, "between 0 and 1")


def _accepts(allowed: str | list[Any], value: Any) -> bool:
    if isinstance(allowed, list):
        return value in allowed
    if allowed == "bool":
        return isinstance(value, bool)
    if allowed in ("int", "count"):
        return isinstance(value, int) and not isinstance(value, bool) and value >= (1 if allowed == "int" else 0)
    return isinstance(value, float) and 0 < value < 1
