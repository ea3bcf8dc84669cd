"""Triton's vLLM backend: `model.json` holds the engine's arguments; what it refuses, and what runs out of memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Rule
from pipeline.lint.document import Document, read_text
from pipeline.lint.repository.gpus import device_lists
from pipeline.lint.repository.subject import Model

__all__ = ["RULES"]

BACKEND = "triton-inference-server/vllm_backend src/model.py"
MEMORY = "docs.vllm.ai configuration/conserving_memory"
ARGUMENTS = "docs.vllm.ai configuration/engine_args"
CACHE_TYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4")
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
COUNTS = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens",
)  # fmt: skip
SWITCHES = ("enable_prefix_caching", "enforce_eager", "trust_remote_code", "enable_chunked_prefill", "enable_expert_parallel")
KNOWN = (
    *COUNTS, *SWITCHES, "model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "served_model_name", "revision", "dtype",
    "load_format", "config_format", "quantization", "kv_cache_dtype", "block_size", "gpu_memory_utilization", "swap_space",
    "cpu_offload_gb", "num_gpu_blocks_override", "calculate_kv_scales", "prefix_caching_hash_algo", "seed", "max_logprobs",
    "disable_log_stats", "disable_log_requests", "enable_lora", "max_loras", "max_lora_rank", "lora_dtype", "max_cpu_loras",
    "fully_sharded_loras", "speculative_config", "compilation_config", "scheduling_policy", "async_scheduling",
    "distributed_executor_backend", "disable_custom_all_reduce", "enable_eplb", "eplb_config", "all2all_backend",
    "data_parallel_backend", "kv_transfer_config", "guided_decoding_backend", "structured_outputs_config", "reasoning_parser",
    "hf_overrides", "rope_scaling", "rope_theta", "max_seq_len_to_capture", "limit_mm_per_prompt", "mm_processor_kwargs",
    "generation_config", "override_generation_config", "attention_backend", "moe_backend", "enable_dbo",
    "long_prefill_token_threshold",
    "max_num_partial_prefills", "max_long_partial_prefills", "disable_cascade_attn", "disable_sliding_window", "download_dir",
    "device", "runner", "task", "model_impl", "logits_processors", "safetensors_load_strategy", "decode_context_parallel_size",
)  # fmt: skip
"""Engine arguments of vLLM; it has more, so only near misses are told."""
REMOVED = {
    "disable_log_requests": "enable_log_requests, false by default, took its place in 0.10.1",
    "num_scheduler_steps": "multi-step scheduling went with the V0 engine in 0.10.1",
    "multi_step_stream_outputs": "multi-step scheduling went with the V0 engine in 0.10.1",
    "use_v2_block_manager": "there has been one block manager since 0.8",
}
FIRST_WITHOUT = "25.09"
"""First listed release of Triton whose vLLM (0.10.1) has none of them."""
LONG = re.compile(r"deepseek|kimi|r1|v3|checkpoint|^[./]", re.IGNORECASE)
"""Names of models whose own length does not fit, and folders, which may hold one."""
TIGHT = 0.95
"""Share of a GPU above which activations and graphs have no room."""


def _args(model: Model) -> Document:
    """model.json; an empty one where there is none."""
    return model.engine_args or Document(model.folder, {})


def _world(model: Model) -> int:
    sizes = [_args(model).get(key, 1) for key in COUNTS[:2]]
    return sizes[0] * sizes[1] if all(isinstance(size, int) and size > 0 for size in sizes) else 0


def _model(model: Model) -> Iterator[Fault]:
    """Arguments by themselves may get their model where they are packaged."""
    if model.engine_args is not None and model.given is None and not isinstance(_args(model).get("model"), str):
        yield Fault(_args(model).at("model"), "no model is named: vLLM would load its own default, facebook/opt-125m")


def _strict(model: Model) -> Iterator[Fault]:
    """The backend reads JSON, which forbids what YAML lets pass."""
    if model.engine_args is None or model.engine_args.file.suffix != ".json":
        return
    try:
        json.loads(read_text(model.engine_args.file))
    except ValueError as error:
        place = replace(model.engine_args.at(""), line=getattr(error, "lineno", None))
        yield Fault(place, f"{model.engine_args.file.name} is YAML, but not JSON: {error}")


def _unknown(model: Model) -> Iterator[Fault]:
    for key in model.engine_args.values if model.engine_args is not None else ():
        near = get_close_matches(key, KNOWN, n=1, cutoff=0.85) if key not in KNOWN else []
        if near:
            yield Fault(_args(model).at(key), f"{key} is no engine argument: vLLM refuses it", f"did you mean {near[0]}?")


def _removed(model: Model) -> Iterator[Fault]:
    for key in REMOVED if (model.target.triton or FIRST_WITHOUT) >= FIRST_WITHOUT else ():
        if key in _args(model).values:
            yield Fault(_args(model).at(key), f"{key} is gone from vLLM, which refuses it: {REMOVED[key]}")


def _policy(model: Model) -> Iterator[Fault]:
    stated = model.config.HasField("model_transaction_policy")
    if _is_vllm(model) and stated and not model.config.model_transaction_policy.decoupled:
        yield Fault(model.at(r"\bdecoupled\b"), "decoupled is false: the backend asserts that it is true")


def _completed(model: Model) -> Iterator[Fault]:
    config = model.config
    said = config.input and config.output and config.HasField("model_transaction_policy")
    if _is_vllm(model) and model.understood and not said:
        reason = f"model {model.name} needs auto-completion for tensors and policy, which TensorRT-LLM's launcher turns off"
        yield Fault(model.at(), reason)


def _batching(model: Model) -> Iterator[Fault]:
    if _is_vllm(model) and model.config.max_batch_size > 0:
        yield Fault(model.at(r"\bmax_batch_size\b"), f"max_batch_size is {model.config.max_batch_size}: vLLM batches by itself")


def _kind(model: Model) -> Iterator[Fault]:
    for group in model.config.instance_group if _is_vllm(model) else ():
        if group.kind == pb.ModelInstanceGroup.KIND_GPU and _world(model) > 1:
            reason = f"KIND_GPU is for one GPU, but this model has {_world(model)} ranks: the backend refuses it"
            yield Fault(model.at(r"\bKIND_GPU\b", "instance_group.kind"), reason)


def _group(model: Model) -> Iterator[Fault]:
    if _is_vllm(model) and model.understood and not model.config.instance_group:
        reason = f"model {model.name} has no instance_group: Triton starts a copy on every GPU"
        yield Fault(model.at(key="instance_group"), reason)


def _copies(model: Model) -> Iterator[Fault]:
    if _is_vllm(model) and model.count > 1 and not _pinned(model):
        place = model.at(r"\bcount\b", "instance_group.count")
        yield Fault(place, f"{model.count} instances of vLLM on the same GPUs: each takes its share of the memory")


def _pinned(model: Model) -> bool:
    return all(group.kind == pb.ModelInstanceGroup.KIND_GPU for group in model.config.instance_group)


def _devices(model: Model) -> Iterator[Fault]:
    for devices in device_lists(model.parameters.get("GPU_DEVICE_IDS", "")):
        if _is_vllm(model) and _world(model) > 1 and len(devices) != _world(model):
            place = model.at_parameter("GPU_DEVICE_IDS")
            yield Fault(place, f"GPU_DEVICE_IDS names {len(devices)} GPUs for {_world(model)} ranks: the backend refuses it")


def _lora(model: Model) -> Iterator[Fault]:
    """Arguments by themselves may get it where they are packaged, as their model."""
    asked = str(_args(model).get("enable_lora", "")).lower() == "true"
    if asked and model.given is None and not (model.versions[-1] / "multi_lora.json").is_file():
        yield Fault(_args(model).at("enable_lora"), "enable_lora is true, but there is no multi_lora.json beside model.json")


def _each(keys: tuple[str, ...], fits: Callable[[Any], bool], wanted: str) -> Callable[[Model], Iterator[Fault]]:
    """A rule over arguments of one kind."""

    def check(model: Model) -> Iterator[Fault]:
        for key in keys:
            value = _args(model).values.get(key)
            if value is not None and not fits(value):
                yield Fault(_args(model).at(key), f"{key} is {value!r}, not {wanted}")

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _length(model: Model) -> Iterator[Fault]:
    named = str(_args(model).get("model", ""))
    if LONG.search(named) and not _args(model).get("max_model_len"):
        reason = "max_model_len is left out: vLLM takes the model's (163,840 for DeepSeek-R1), and stops if that does not fit"
        yield Fault(_args(model).at("max_model_len"), reason)


def _tight(model: Model) -> Iterator[Fault]:
    value = _args(model).get("gpu_memory_utilization")
    if _is_number(value) and TIGHT < value <= 1:
        place = _args(model).at("gpu_memory_utilization")
        yield Fault(place, f"gpu_memory_utilization {value:g} leaves no room for CUDA graphs and other processes")


def _tokens(model: Model) -> Iterator[Fault]:
    args = _args(model)
    batched, sequences = args.get("max_num_batched_tokens"), args.get("max_num_seqs")
    if _is_number(batched) and _is_number(sequences) and batched < sequences:
        reason = f"max_num_batched_tokens {batched} is below max_num_seqs {sequences}: vLLM refuses it"
        yield Fault(args.at("max_num_batched_tokens"), reason)


def _prompt(model: Model) -> Iterator[Fault]:
    args = _args(model)
    batched, length = args.get("max_num_batched_tokens"), args.get("max_model_len")
    if args.get("enable_chunked_prefill") is False and _is_number(batched) and _is_number(length) and batched < length:
        reason = f"max_num_batched_tokens {batched} is below max_model_len {length} without chunked prefill: vLLM refuses it"
        yield Fault(args.at("max_num_batched_tokens"), reason)


def _caching(model: Model) -> Iterator[Fault]:
    args = _args(model)
    if args.get("calculate_kv_scales") and str(args.get("kv_cache_dtype", "auto")) in ("auto", "bfloat16"):
        yield Fault(args.at("calculate_kv_scales"), "calculate_kv_scales has no effect without an FP8 cache")


def _is_vllm(model: Model) -> bool:
    return model.config.backend == "vllm" or (model.engine_args is not None and not model.config.backend)


def _whole(value: Any) -> bool:
    """Also as a text, which vLLM converts."""
    return str(value).isdecimal() and int(str(value)) > 0


RULES: tuple[Rule[Model], ...] = (
    Rule("vllm/model", ERROR, _model, "set model to the checkpoint's folder or name", ARGUMENTS),
    Rule("vllm/json", ERROR, _strict, "write JSON: names and texts in double quotes, no comma at the end, no comments",
         f"{BACKEND}: json.load"),
    Rule("vllm/unknown", ERROR, _unknown, "correct the name", f"{ARGUMENTS}: AsyncEngineArgs(**model.json)"),
    Rule("vllm/removed", WARNING, _removed, "leave it out",
         "vllm-project/vllm issue 23283, pull requests 22779, 13492; triton-inference-server/vllm_backend pull request 96"),
    Rule("vllm/decoupled", ERROR, _policy, "set decoupled: true", BACKEND),
    Rule("vllm/auto-completed", NOTE, _completed, "write input, output and model_transaction_policy into config.pbtxt", BACKEND),
    Rule("vllm/max-batch-size", WARNING, _batching, "set max_batch_size: 0", BACKEND),
    Rule("vllm/kind", ERROR, _kind, "use KIND_MODEL", BACKEND),
    Rule("vllm/instance-group", WARNING, _group, "add instance_group [{ count: 1, kind: KIND_MODEL }]",
         "Triton model_configuration.md: one instance for each GPU by default"),
    Rule("vllm/copies", WARNING, _copies, "set count 1, or give the copies GPUs of their own", BACKEND),
    Rule("vllm/gpu-device-ids", ERROR, _devices, "name tensor_parallel_size x pipeline_parallel_size GPUs", BACKEND),
    Rule("vllm/lora", ERROR, _lora, "add multi_lora.json, or leave enable_lora out", BACKEND),
    Rule("vllm/count", ERROR, _each(COUNTS, _whole, "a whole number above 0"), "correct the value", ARGUMENTS),
    Rule("vllm/switch", ERROR, _each(SWITCHES, lambda value: isinstance(value, bool), "true or false"),
         "correct the value", ARGUMENTS),
    Rule("vllm/memory-share", ERROR,
         _each(("gpu_memory_utilization",), lambda value: _is_number(value) and 0 < value <= 1, "above 0 and up to 1"),
         "set 0.9, the default of most releases", ARGUMENTS),
    Rule("vllm/kv-cache-dtype", WARNING,
         _each(("kv_cache_dtype",), lambda value: value in CACHE_TYPES, f"one of {', '.join(CACHE_TYPES)}"),
         "choose one of them", ARGUMENTS),
    Rule("vllm/block-size", WARNING,
         _each(("block_size",), lambda value: value in BLOCK_SIZES, f"one of {', '.join(map(str, BLOCK_SIZES))}"),
         "choose one of them; MLA kernels want 64", ARGUMENTS),
    Rule("vllm/max-model-len", WARNING, _length, "set it to the longest request that is served", MEMORY),
    Rule("vllm/tight", WARNING, _tight, "set 0.9, and lower max_model_len or max_num_seqs if memory is short", MEMORY),
    Rule("vllm/tokens", ERROR, _tokens, "raise it to at least max_num_seqs", "vllm SchedulerConfig"),
    Rule("vllm/prompt", ERROR, _prompt, "raise it, or leave chunked prefill on", "vllm SchedulerConfig"),
    Rule("vllm/kv-scales", NOTE, _caching, "set kv_cache_dtype: fp8, or leave it out", ARGUMENTS),
)  # fmt: skip
