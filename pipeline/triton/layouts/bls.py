"""Layout of TensorRT-LLM for old clients: the llmapi model behind an adapter with the names of its ensemble and BLS models.

The adapter (`text_input`, `max_tokens`, `stream`, `stop_words`, ..., with a batch dimension of one) is what clients and
Triton's OpenAI frontend talk to: that frontend sends exactly these names to every model that is not vLLM's. It calls the
llmapi model, `tensorrt_llm`, which it must not be named like. The frontend's manual asks for orchestrator mode
(TRTLLM_ORCHESTRATOR=1) because of the C++ backend's ranks; here `LLM` starts its own ranks, and the variable does nothing.
"""

from __future__ import annotations

from pipeline.core.errors import ConfigError
from pipeline.core.stage import StageContext
from pipeline.triton import pbtxt
from pipeline.triton.layouts import write_model
from pipeline.triton.layouts.llmapi import length_of, llm_args, write_llmapi
from pipeline.triton.releases import Release

__all__ = ["ENGINE", "INPUTS", "OUTPUTS", "layout"]

ENGINE = "tensorrt_llm"
"""Name of the llmapi model, as upstream has it."""

INPUTS = (
    *pbtxt.specs({"text_input": "STRING", "max_tokens": "INT32"}),
    *pbtxt.specs(
        {
            "stream": "BOOL",
            "stop_words": "STRING[-1]",
            "bad_words": "STRING[-1]",
            "end_id": "INT32",
            "pad_id": "INT32",
            "top_k": "INT32",
            "top_p": "FP32",
            "temperature": "FP32",
            "length_penalty": "FP32",
            "repetition_penalty": "FP32",
            "presence_penalty": "FP32",
            "frequency_penalty": "FP32",
            "min_tokens": "INT32",
            "seed": "UINT64",
            "beam_width": "INT32",
            "ignore_eos": "BOOL",
            "exclude_input_in_output": "BOOL",
            "guided_decoding_guide_type": "STRING",
            "guided_decoding_guide": "STRING",
            "return_finish_reason": "BOOL",
            "return_log_probs": "BOOL",
            "return_context_logits": "BOOL",
            "return_generation_logits": "BOOL",
            "return_num_input_tokens": "BOOL",
            "return_num_output_tokens": "BOOL",
        },
        optional=True,
    ),
)
OUTPUTS = pbtxt.specs(
    {
        "text_output": "STRING[-1]",
        "finish_reason": "STRING[-1]",
        "num_input_tokens": "INT32[-1]",
        "num_output_tokens": "INT32[-1]",
    }
)


def layout(ctx: StageContext, release: Release | None = None) -> None:
    """Write the adapter and the model that it calls."""
    name = ctx.config.serve.model_name or ctx.config.model.name
    if name == ENGINE:
        raise ConfigError(f"serve.model_name={name} is the name of the model behind the adapter: choose another, such as ensemble.")
    parameters = {"tensorrt_llm_model_name": ENGINE} | length_of(llm_args(ctx))
    config = pbtxt.build(name, inputs=INPUTS, outputs=OUTPUTS, parameters=parameters, max_batch_size=1, release=release)
    write_model(ctx.out / "repository", config, "bls")
    write_llmapi(ctx, ENGINE, release)
