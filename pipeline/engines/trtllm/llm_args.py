"""The LLM-API arguments of a deployment, in the spelling of one version line of TensorRT-LLM.

The engine's own models forbid unknown keys, so nothing is emitted that the line's file does not list, and what is
emitted is checked against it here: a mistake ends before a GPU is held, not after. Quantisation is absent on purpose:
the engine reads it from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from pipeline.core.errors import StageError
from pipeline.engines.trtllm.arguments import problems
from pipeline.engines.trtllm.versions import VersionLine

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
    if refused := check(args, line):
        raise StageError(f"TensorRT-LLM {line.line} does not take these arguments: {'; '.join(refused)}.")
    return args


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
