"""The planner's rules over somebody's LLM arguments or checkpoint: what needs a machine, a model and a workload (hw=, model=)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.inspect.contents import Contents
from pipeline.inspect.recognise import CT
from pipeline.lint.args import Args
from pipeline.lint.base import ERROR, NOTE, WARNING, Finding, Level, Place
from pipeline.lint.target import Target
from pipeline.models.arch import Arch
from pipeline.planner import rules
from pipeline.planner.case import case_of
from pipeline.planner.llm_args_file import read_llm_args
from pipeline.planner.params import STORAGE
from pipeline.planner.rules import precision
from pipeline.planner.rules.base import broken
from pipeline.planner.setup import Layout, Setup

__all__ = ["SAID_BY_FILE", "findings", "findings_of_checkpoint", "formats_of", "level_of", "setup_of"]

SAID_BY_FILE = (
    "version", "release", "relaxed_adp", "graph_list", "graphs_above", "many_graphs", "mtp_accuracy", "relaxed", "moe_of_line",
    "wideep", "moe_balancer", "deepep_fp4", "expert_tp", "decode_tokens", "fraction", "transfer",
)  # fmt: skip
"""Rules that need neither machine nor model, and stand in `pipeline/lint/args` as well."""
TOLD = (
    "measured", "weight_only", "mixed", "mtp_format", "queue", "nodes", "deepgemm_mtp", "kv_bf16", "balance", "beside", "uneven",
    "shared_experts", "graphs_below", "moe_unknown", "block_size", "idle", "room", "sequence",
)  # fmt: skip
"""What runs all the same, if not at its best: published recipes do some of it on purpose."""
OF_LOAD = ("length", "max_seq_len", "prompt", "beside", "room", "queue", "idle", "uneven", "graphs_below")
"""Rules about the requests that are to be served, judged where workload= or workload.KEY= says which."""
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
FORMATS = {
    "fp8_per_channel": "fp8_channel", "nvfp4_weight_only": "w4a16_nvfp4", "awq": "int4_awq", "gptq": "int4_awq",
    f"{CT} nvfp4": "nvfp4", f"{CT} mxfp4": "mxfp4", f"{CT} int4": "int4_awq", f"{CT} fp8_block": "fp8_block",
}  # fmt: skip
"""What tensors are called -> the planner's name of the format."""
LAYOUTS = {"awq": "autoawq", "gptq": "gptq"}
OF_CHECKPOINT = ("sm", "format", "stored_as", "experts", "experts_only", "weight_only", "mixed")
"""Rules that a checkpoint alone can break."""
SPELLINGS = {
    "parallel.tp": "tensor_parallel_size", "parallel.ep": "moe_expert_parallel_size", "parallel.pp": "pipeline_parallel_size",
    "parallel.attention_dp": "enable_attention_dp", "workload.chunked_prefill": "enable_chunked_prefill",
    "engine.trtllm.free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction", "quant.kv_dtype": "kv_cache_config.dtype",
    "engine.trtllm.moe_backend": "moe_config.backend", "engine.trtllm.mtp": "speculative_config.max_draft_len",
    "engine.trtllm.expert_slots": "moe_config.load_balancer.num_slots",
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


def formats_of(contents: Contents) -> dict[str, str]:
    """Class of linear layers -> the format of most of them; those that the planner does not know are left out."""
    counts: dict[str, Counter[str]] = {}
    for module in contents.modules.values():
        if module.place.linear:
            counts.setdefault(module.place.kind, Counter())[FORMATS.get(module.format, module.format)] += 1
    usual = {kind: count.most_common(1)[0][0] for kind, count in counts.items()}
    return {kind: name for kind, name in usual.items() if name in STORAGE}


def findings_of_checkpoint(contents: Contents, target: Target) -> Iterator[Finding]:
    """What the target's machine cannot run of a checkpoint's formats."""
    formats = formats_of(contents)
    if target.config is None or target.config.engine.trtllm is None or not formats:
        return
    found = Counter(module.format for module in contents.modules.values() if module.quantised).most_common(1)
    name = found[0][0] if found else ""
    stored_as = "compressed_tensors" if name.startswith(CT) else LAYOUTS.get(name, "modelopt")
    base = setup_of(target.config, target.version or target.config.engine.trtllm.version)
    asked = replace(base, formats=formats, stored_as=stored_as, model=str(contents.folder))
    for item in broken([rule for rule in precision.RULES if rule.id in OF_CHECKPOINT], asked):
        yield _finding(item, Place(contents.folder))


def findings(args: Args, formats: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Every planner's rule that these arguments do not keep, on the target's machine; nothing without one.

    `formats` are those of the checkpoint that they are for, where it is at hand; else those of quant=.
    """
    if args.target.config is None:
        return
    base = setup_of(args.target.config, args.target.version or args.line.line, args.role)
    base = replace(base, formats=formats) if formats else base
    values = args.values
    if args.tp_elsewhere:  # a command line would give a node's GPUs
        values = {**values, "tensor_parallel_size": max(1, args.target.config.hw.num_devices // args.pp)}
    try:
        setup = read_llm_args(values, base).setup
    except ConfigError as error:
        yield Finding("plan/not-read", WARNING, Place(args.document.file), str(error), "correct the value", "pipeline/planner")
        return
    for found in rules.check(setup):
        if found.rule not in SAID_BY_FILE and (args.target.load or found.rule not in OF_LOAD):
            yield _finding(found, args.at(KEYS[found.rule]) if found.rule in KEYS else Place(args.document.file))


def _finding(found: rules.Finding, place: Place) -> Finding:
    text = re.sub("|".join(map(re.escape, SPELLINGS)), lambda name: SPELLINGS[name.group()], found.text).rstrip(".")
    reason, _, fix = text.rpartition(": ")
    level = level_of(found.rule, found.level)
    return Finding(f"plan/{found.rule}", level, place, reason or text, fix if reason else "change it, or expect it", found.source)


def level_of(rule: str, level: str) -> Level:
    """Of a planner's rule, here."""
    return NOTE if rule in TOLD else ERROR if level == rules.REFUSE else WARNING
