"""Triton's C++ backend over a TensorRT engine (inflight_batcher_llm): parameters, and what the engine itself says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.versions import last_with_tensorrt
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Rule
from pipeline.lint.document import Document, read_document
from pipeline.lint.repository.subject import Model

__all__ = ["RULES"]

DOCS = "tensorrtllm_backend docs/model_config.md"
ALLOWED = {
    "batching_strategy": ("inflight_fused_batching", "inflight_batching", "V1"),
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching", "V1"),
    "batch_scheduler_policy": ("guaranteed_no_evict", "max_utilization"),
    "decoding_mode": ("top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"),
    "guided_decoding_backend": ("xgrammar",),
}
SHARES = ("kv_cache_free_gpu_mem_fraction", "cross_kv_cache_fraction", "gpu_weights_percent", "lora_cache_gpu_memory_fraction")
REMOVED = ("enable_trt_overlap",)
KNOWN = (
    *ALLOWED, *SHARES, *REMOVED, "gpt_model_path", "encoder_model_path", "engine_dir", "xgrammar_tokenizer_info_path",
    "tokenizer_dir", "executor_worker_path", "max_beam_width", "max_tokens_in_paged_kv_cache", "kv_cache_host_memory_bytes",
    "enable_kv_cache_reuse",
    "max_attention_window_size", "sink_token_length", "exclude_input_in_output", "cancellation_check_period_ms",
    "stats_check_period_ms", "recv_poll_period_ms", "iter_stats_max_iterations", "request_stats_max_iterations",
    "normalize_log_probs", "gpu_device_ids", "participant_ids", "num_nodes", "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size", "lora_cache_host_memory_bytes", "lora_prefetch_dir", "medusa_choices", "eagle_choices",
    "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size", "enable_chunked_context",
    "multi_block_mode", "enable_context_fmha_fp32_acc", "cuda_graph_mode", "cuda_graph_cache_size",
    "speculative_decoding_fast_logits", "FORCE_CPU_ONLY_INPUT_TENSORS", "prompt_embedding_table_data_type",
)  # fmt: skip
"""Parameters of the engine's model; others are ignored, so only near misses are told."""


def _served(model: Model) -> bool:
    """Whether it is the engine's own model."""
    return model.config.backend == "tensorrtllm" or "batching_strategy" in model.parameters


def _engine(model: Model) -> Document | None:
    """config.json of the engine, where its folder is at hand."""
    named = model.parameters.get("gpt_model_path") or model.parameters.get("engine_dir")
    if not named:
        return None
    folder = Path(named)
    file = (folder if folder.is_absolute() else model.folder / folder) / "config.json"
    try:
        return read_document(file) if file.is_file() else None
    except ConfigError:
        return None


def _gone(model: Model) -> Iterator[Fault]:
    if model.config.backend == "tensorrtllm" and model.target.without_tensorrt:
        reason = f"TensorRT-LLM {model.target.version} has no TensorRT backend: {last_with_tensorrt()} was the last release with it"
        yield Fault(model.at(r"\bbackend\b"), reason)


def _value(model: Model) -> Iterator[Fault]:
    for key, allowed in ALLOWED.items():
        value = model.parameters.get(key)
        if value and _served(model) and value not in allowed:
            yield Fault(model.at_parameter(key), f"{key} is {value!r}", f"set one of {', '.join(allowed)}")


def _share(model: Model) -> Iterator[Fault]:
    for key in SHARES:
        value = model.parameters.get(key)
        if value and _served(model) and not _between(value):
            yield Fault(model.at_parameter(key), f"{key} is {value!r}, not between 0 and 1")


def _between(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _v1(model: Model) -> Iterator[Fault]:
    key = "batching_strategy" if "batching_strategy" in model.parameters else "gpt_model_type"
    if model.parameters.get(key) == "V1" and model.config.model_transaction_policy.decoupled:
        yield Fault(model.at_parameter(key), f"{key} V1 answers a batch when all of it is done, so nothing is streamed")


def _policy(model: Model) -> Iterator[Fault]:
    key = "batch_scheduler_policy"
    if model.parameters.get(key) == "max_utilization":
        yield Fault(model.at_parameter(key), "max_utilization pauses requests and computes them again when the KV cache is full")


def _removed(model: Model) -> Iterator[Fault]:
    for key in REMOVED:
        if key in model.parameters and _served(model):
            yield Fault(model.at_parameter(key), f"{key} is no parameter any more, and read by nobody")


def _misspelt(model: Model) -> Iterator[Fault]:
    for key in model.config.parameters if model.config.backend == "tensorrtllm" else ():
        near = get_close_matches(key, KNOWN, n=1, cutoff=0.85) if key not in KNOWN else []
        if near:
            yield Fault(model.at_parameter(key), f"{key} is read by nobody", f"did you mean {near[0]}?")


def _engine_dir(model: Model) -> Iterator[Fault]:
    if model.config.backend == "tensorrtllm" and not {"gpt_model_path", "engine_dir"} & set(model.config.parameters):
        yield Fault(model.at(r"\bparameters\b", "parameters.gpt_model_path"), "no gpt_model_path names the engine")


def _batch(model: Model) -> Iterator[Fault]:
    found = _engine(model)
    most = found.get("build_config.max_batch_size") if found else None
    if isinstance(most, int) and model.config.max_batch_size > most:
        reason = f"max_batch_size {model.config.max_batch_size} exceeds the {most} that the engine was built for, which wins"
        yield Fault(model.at(r"\bmax_batch_size\b"), reason, f"set {most}, or build the engine for more")


def _version(model: Model) -> Iterator[Fault]:
    """An engine runs in the release that built it."""
    found = _engine(model)
    built = found.get("version") if found else None
    held = model.target.version
    if isinstance(built, str) and held and not f"{built}.".startswith(f"{held}.") and built != held:
        image = f" (Triton {model.target.triton})" if model.target.triton else ""
        reason = f"the engine was built with TensorRT-LLM {built}, and would be loaded by {held}{image}: it cannot be deserialised"
        yield Fault(model.at_parameter("gpt_model_path"), reason)


def _guided(model: Model) -> Iterator[Fault]:
    inputs = [tensor.name for tensor in model.config.input if tensor.name.startswith("guided_decoding_guide")]
    if inputs and model.config.backend == "tensorrtllm" and "guided_decoding_backend" not in model.parameters:
        reason = f"{inputs[0]} is taken, but no guided_decoding_backend is set: a request with a guide ends in an error"
        yield Fault(model.at_tensor(inputs[0]), reason)


def _tokenizer_info(model: Model) -> Iterator[Fault]:
    needed = {"xgrammar_tokenizer_info_path", "tokenizer_dir"}
    if "guided_decoding_backend" in model.parameters and _served(model) and not needed & model.parameters.keys():
        place = model.at_parameter("guided_decoding_backend")
        yield Fault(place, "guided_decoding_backend is set without the tokenizer that it needs")


def _escaped(model: Model) -> Iterator[Fault]:
    for key, value in model.parameters.items():
        if re.search(r"\\[,:]", value):
            yield Fault(model.at_parameter(key), f"{key} is {value!r}: a backslash of fill_template.py's command line is left")


RULES: tuple[Rule[Model], ...] = (
    Rule("engine/removed-backend", ERROR, _gone, "serve the checkpoint with the llmapi model",
         "NVIDIA/TensorRT-LLM releases v1.3.0rc20, pull request 15907"),
    Rule("engine/value", ERROR, _value, "set an allowed value", DOCS),
    Rule("engine/share", ERROR, _share, "set a share of memory, such as 0.9", DOCS),
    Rule("engine/v1-streams", WARNING, _v1, "set inflight_fused_batching", DOCS),
    Rule("engine/max-utilization", WARNING, _policy, "set guaranteed_no_evict, the default", "tensorrtllm_backend issue 120"),
    Rule("engine/removed-parameter", WARNING, _removed, "remove it", DOCS),
    Rule("engine/unknown-parameter", WARNING, _misspelt, "correct the name", f"{DOCS}; fill_template.py passes misspelt names"),
    Rule("engine/no-engine", ERROR, _engine_dir, "set it to the engine's folder", DOCS),
    Rule("engine/batch", ERROR, _batch, "lower max_batch_size", "tensorrtllm_backend issue 130"),
    Rule("engine/version", ERROR, _version, "serve from the image that holds that release, or build again",
         "tensorrtllm_backend issues 531, 190, 235; NVIDIA/TensorRT-LLM issues 660, 1038; Triton server issue 8462"),
    Rule("engine/guided", NOTE, _guided, "set guided_decoding_backend: xgrammar, or remove the inputs",
         "NVIDIA/TensorRT-LLM issues 2624, 7878"),
    Rule("engine/guided-tokenizer", ERROR, _tokenizer_info,
         "set xgrammar_tokenizer_info_path (C++) or tokenizer_dir (python)", DOCS),
    Rule("engine/escaped", WARNING, _escaped, "remove the backslash", "TensorRT-LLM triton_backend/tools/fill_template.py"),
)  # fmt: skip
