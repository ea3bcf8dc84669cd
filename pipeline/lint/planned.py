"""The planner's rules over somebody's LLM arguments: what needs a machine, a model and a workload (hw= and model=)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.lint.args import Args
from pipeline.lint.base import ERROR, NOTE, WARNING, Finding, Level, Place
from pipeline.models.arch import Arch
from pipeline.planner import rules
from pipeline.planner.case import case_of
from pipeline.planner.llm_args_file import read_llm_args
from pipeline.planner.setup import Layout, Setup

__all__ = ["SAID_BY_FILE", "findings", "level_of", "setup_of"]

SAID_BY_FILE = (
    "version", "release", "relaxed_adp", "graph_list", "graphs_above", "many_graphs", "mtp_accuracy", "relaxed", "moe_of_line",
    "wideep", "moe_balancer", "deepep_fp4", "expert_tp", "decode_tokens", "fraction", "stored_as", "transfer",
)  # fmt: skip
"""Rules that need neither machine nor model, and stand in `pipeline/lint/args` as well."""
TOLD = (
    "measured", "weight_only", "mixed", "mtp_format", "queue", "nodes", "deepgemm_mtp", "kv_bf16", "balance", "beside", "uneven",
    "shared_experts", "graphs_below", "moe_unknown", "block_size", "idle", "room", "sequence",
)  # fmt: skip
"""What runs all the same, if not at its best: published recipes do some of it on purpose."""
KEYS = {
    "moe_kernels": "moe_config.backend", "moe_unknown": "moe_config.backend", "mtp_format": "moe_config.backend",
    "deepgemm_mtp": "kv_cache_config.free_gpu_memory_fraction", "deepgemm_tp": "moe_config.backend", "mtp": "speculative_config",
    "mtp_crash": "speculative_config", "block_reuse": "kv_cache_config.enable_block_reuse",
    "chunked_prefill": "enable_chunked_prefill", "block_size": "kv_cache_config.tokens_per_block",
    "graphs_below": "cuda_graph_config.max_batch_size", "kv_nvfp4": "kv_cache_config.dtype", "kv_bf16": "kv_cache_config.dtype",
    "positions": "max_seq_len", "max_seq_len": "max_seq_len", "sequence": "max_seq_len", "prompt": "max_num_tokens",
    "beside": "max_num_tokens", "gpus": "tensor_parallel_size", "expert_ep": "moe_expert_parallel_size",
    "expert_blocks": "moe_expert_parallel_size", "heads": "tensor_parallel_size", "attention_blocks": "tensor_parallel_size",
    "stages": "pipeline_parallel_size", "prefill_stages": "pipeline_parallel_size", "nodes": "tensor_parallel_size",
    "idle": "enable_attention_dp", "uneven": "enable_attention_dp", "balance": "enable_attention_dp",
}  # fmt: skip
"""Rule -> the argument that it is about."""
SPELLINGS = {
    "parallel.tp": "tensor_parallel_size", "parallel.ep": "moe_expert_parallel_size", "parallel.pp": "pipeline_parallel_size",
    "parallel.attention_dp": "enable_attention_dp", "workload.chunked_prefill": "enable_chunked_prefill",
    "engine.trtllm.free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction", "quant.kv_dtype": "kv_cache_config.dtype",
    "engine.trtllm.moe_backend": "moe_config.backend", "engine.trtllm.mtp": "speculative_config.max_draft_len",
}  # fmt: skip
"""Setting of a plan -> argument of the file, for sentences."""


def setup_of(config: Config, version: str, role: str = "both") -> Setup:
    """The machine, model, formats and workload of `config`; the layout is a placeholder that the arguments replace."""
    case = case_of(config, Arch.from_hf(config.model.hf))
    return Setup(
        arch=case.arch, hw=case.hw, formats=case.formats, layout=Layout(1, 1, False), stored_as="modelopt",
        model=config.model.name, version=version, kv_format=case.kv_format, isl=case.isl, osl=case.osl,
        concurrency=case.concurrency, ttft_ms=config.slo.ttft_ms, role=role,
    )  # fmt: skip


def findings(args: Args) -> Iterator[Finding]:
    """Every planner's rule that these arguments do not keep, on the target's machine; nothing without one."""
    if args.target.config is None:
        return
    base = setup_of(args.target.config, args.target.version or args.line.line, args.role)
    try:
        setup = read_llm_args(args.values, base).setup
    except ConfigError as error:
        yield Finding("plan/not-read", WARNING, Place(args.document.file), str(error), "correct the value", "pipeline/planner")
        return
    for found in rules.check(setup):
        if found.rule not in SAID_BY_FILE:
            yield _finding(found, args)


def _finding(found: rules.Finding, args: Args) -> Finding:
    place = args.at(KEYS[found.rule]) if found.rule in KEYS else Place(args.document.file)
    text = re.sub("|".join(map(re.escape, SPELLINGS)), lambda name: SPELLINGS[name.group()], found.text).rstrip(".")
    reason, _, fix = text.rpartition(": ")
    level = level_of(found.rule, found.level)
    return Finding(f"plan/{found.rule}", level, place, reason or text, fix if reason else "change it, or expect it", found.source)


def level_of(rule: str, level: str) -> Level:
    """Of a planner's rule, here."""
    return NOTE if rule in TOLD else ERROR if level == rules.REFUSE else WARNING
