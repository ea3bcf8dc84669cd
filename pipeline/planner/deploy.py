"""deploy.json: what the plan decides about the instances of TensorRT-LLM, for engine, package and launchers."""

from __future__ import annotations

from typing import Any

from pipeline.config.schema import TrtllmEngineConfig
from pipeline.planner.case import Case
from pipeline.planner.choose import Choice
from pipeline.planner.memory import tokens_per_block
from pipeline.planner.placement import rank_places
from pipeline.planner.search.split import SplitChoice
from pipeline.planner.setup import Setup

__all__ = ["deploy_of", "instance_row"]


def deploy_of(case: Case, choice: Choice, split: SplitChoice | None) -> dict[str, Any]:
    """Of `choice`, or of a split, whose decode side `choice` then is: `roles` has a row for each side."""
    stream = choice.value("stream_interval")
    deploy = {
        "engine": "trtllm",
        "serving": case.trtllm.serving,
        "hardware": case.hw.title,
        "sm": case.hw.sm,
        "expert_format": case.expert_format,
        "isl": case.isl,
        "gpus_per_node": case.hw.num_devices,
        "tokens_per_block": tokens_per_block(case.arch, case.hw.sm or 0),
        "args": case.trtllm.args,
        **instance_row(case.trtllm, choice.setup, stream, case.longest_prompt),
    }
    return deploy | (_sides(case, split, stream) if split else _alike(case, choice))


def _alike(case: Case, choice: Choice) -> dict[str, Any]:
    """Instances that are all the same, and where each rank of theirs is."""
    instances = next((item.value for item in choice.decisions if item.name == "instances"), 1)
    places = rank_places(case.hw, choice.layout.world_size, instances)
    return {"instances": instances, "nodes": 1 + max(place["node"] for place in places), "placement": places}


def _sides(case: Case, split: SplitChoice, stream: int) -> dict[str, Any]:
    """Prefill and decode; launchers place the ranks, which are of several sizes."""
    rows = [
        {"role": role, "count": count, **instance_row(case.trtllm, setup, stream, case.longest_prompt)}
        for role, count, setup in zip(("context", "generation"), split.counts, split.setups, strict=True)
    ]
    return {"instances": sum(split.counts), "nodes": split.split.nodes, "roles": rows}


def instance_row(asked: TrtllmEngineConfig, setup: Setup, stream: int, prompt: int) -> dict[str, Any]:
    """What one instance is started with; `stream` is stream_interval, `prompt` the tokens of the longest prompt."""
    layout = setup.layout
    return {
        "tp": layout.tp,
        "ep": layout.ep,
        "pp": layout.pp,
        "attention_dp": layout.attention_dp,
        "num_devices": layout.world_size,
        "max_batch_size": setup.max_batch_size,
        "max_num_tokens": setup.max_num_tokens,
        "max_seq_len": setup.max_seq_len,
        "kv_cache_dtype": setup.kv_format,
        "free_gpu_memory_fraction": setup.fraction,
        "cuda_graph_max_batch_size": setup.captured,
        "stream_interval": stream,
        "chunked_prefill": setup.chunked_prefill,
        "block_reuse": setup.block_reuse,
        "balanced": setup.balanced,
        "overlap": setup.overlap,
        "mtp": setup.mtp,
        "moe_backend": setup.moe_backend,
        "expert_slots": setup.expert_slots,
        "expert_updates": asked.expert_updates,
        "transfer": setup.transfer,
        "transfer_tokens": prompt if setup.transfer else None,
    }
