"""Layout of TensorRT-LLM: one python model around `tensorrt_llm.LLM`, with the tensors of upstream's llmapi model.

`decoupled` and `max_batch_size` stand in config.pbtxt *and* in model.yaml and are equal: started with
--disable-auto-complete-config, as NVIDIA's launcher does, Triton reads only the first and streams one token of many.
The checkpoint is hard-linked into the version folder, and model.yaml names it relative to that folder, so the
repository can be moved as a whole; an absolute path there (or a file named by LLM_CONFIG_PATH) points elsewhere.
"""

from __future__ import annotations

from typing import Any

import yaml

from pipeline.core.stage import StageContext
from pipeline.engines.trtllm.build import link_tree
from pipeline.triton import pbtxt
from pipeline.triton.layouts import write_model
from pipeline.triton.releases import Release

__all__ = ["INPUTS", "OUTPUTS", "layout", "length_of", "llm_args", "write_llmapi"]

Specs = tuple[pbtxt.TensorSpec, ...]
DECOUPLED = True
ENGINES_MAX_BATCH_SIZE = 2048
"""Of TensorRT-LLM, where its arguments do not say."""

UPSTREAMS = {
    "image_url": "STRING[-1]",
    "streaming": "BOOL",
    "sampling_param_best_of": "INT32",
    "sampling_param_temperature": "FP32",
    "sampling_param_top_k": "INT32",
    "sampling_param_top_p": "FP32",
    "sampling_param_frequency_penalty": "FP32",
    "sampling_param_presence_penalty": "FP32",
    "sampling_param_max_tokens": "INT32",
    "sampling_param_stop": "STRING[-1]",
    "sampling_param_seed": "UINT64",
    "sampling_param_exclude_input_from_output": "BOOL",
    "sampling_param_return_perf_metrics": "BOOL",
    "return_finish_reason": "BOOL",
    "return_stop_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "stop": "BOOL",
    "lora_id": "UINT64",
    "lora_name": "STRING",
    "lora_path": "STRING",
    "lora_ckpt_source": "STRING",
}
"""Inputs that the model refuses are among them: a client of upstream's model gets its sentence, not Triton's."""
OURS = {
    "sampling_param_bad": "STRING[-1]",
    "sampling_param_end_id": "INT32",
    "sampling_param_pad_id": "INT32",
    "sampling_param_min_tokens": "INT32",
    "sampling_param_length_penalty": "FP32",
    "sampling_param_repetition_penalty": "FP32",
    "sampling_param_ignore_eos": "BOOL",
    "guided_decoding_guide_type": "STRING",
    "guided_decoding_guide": "STRING",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
"""Beyond upstream's: what its ensemble had, and the counts that usage is billed by."""
INPUTS = (*pbtxt.specs({"text_input": "STRING[-1]"}), *pbtxt.specs(UPSTREAMS | OURS, optional=True))
OUTPUTS = pbtxt.specs(
    {
        "text_output": "STRING[-1]",
        "finish_reason": "STRING[-1]",
        "stop_reason": "STRING[-1]",
        "cumulative_logprob": "FP32[-1]",
        "num_input_tokens": "INT32[-1]",
        "num_output_tokens": "INT32[-1]",
    }
)


def layout(ctx: StageContext, release: Release | None = None) -> None:
    """Write `repository/<model>/config.pbtxt` and `1/` with model.yaml, the model's code and the checkpoint."""
    write_llmapi(ctx, release, INPUTS, OUTPUTS, max_batch_size=0)


def write_llmapi(
    ctx: StageContext, release: Release | None, inputs: Specs, outputs: Specs, *, max_batch_size: int
) -> None:
    """The model with the tensors that its clients use."""
    settings = llm_args(ctx)
    config = pbtxt.build(
        ctx.config.serve.model_name or ctx.config.model.name,
        inputs=inputs,
        outputs=outputs,
        parameters={"max_requests": str(_slots(settings) + ctx.config.serve.max_queue)} | length_of(settings),
        max_batch_size=max_batch_size,
        decoupled=DECOUPLED,
        release=release,
    )
    version = write_model(ctx.out / "repository", config, "llmapi")
    link_tree(ctx.inputs["engine"] / "checkpoint", version / "checkpoint")
    policy = {"decoupled": DECOUPLED, "max_batch_size": max_batch_size}
    text = yaml.safe_dump(settings | {"model": "checkpoint", "triton_config": policy}, sort_keys=True, default_flow_style=False)
    (version / "model.yaml").write_text(text, encoding="utf-8")


def llm_args(ctx: StageContext) -> dict[str, Any]:
    """The engine's arguments."""
    settings: dict[str, Any] = yaml.safe_load((ctx.inputs["engine"] / "llm_args.yaml").read_text(encoding="utf-8"))
    return settings


def length_of(settings: dict[str, Any]) -> dict[str, str]:
    """The parameter from which clients learn how many tokens fit; none where the engine decides that at its start."""
    return {"max_seq_len": str(settings["max_seq_len"])} if settings.get("max_seq_len") else {}


def _slots(settings: dict[str, Any]) -> int:
    """Requests that the engine computes at once: `max_batch_size` is that of one rank where ranks keep their own requests."""
    ranks = settings.get("tensor_parallel_size", 1) if settings.get("enable_attention_dp") else 1
    return int(settings.get("max_batch_size", ENGINES_MAX_BATCH_SIZE) * ranks)
