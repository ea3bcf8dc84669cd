"""Layout of TensorRT-LLM for old clients: the llmapi model with the names of TensorRT-LLM's ensemble and BLS models.

`text_input`, `max_tokens`, `stream`, `stop_words`, ... with a batch dimension of one are what old clients and Triton's OpenAI
frontend send (the frontend sends exactly these names to every model that is not vLLM's). Its manual asks for orchestrator mode
(TRTLLM_ORCHESTRATOR=1) because of the C++ backend's ranks; here `LLM` starts its own ranks, and the variable does nothing.

The names are translated inside the model, not by a BLS model in front of it. Triton's python backend makes the later responses
of a decoupled BLS call into numpy arrays on a thread that does not hold Python's lock (`Stub::ProcessBLSResponseDecoupled`), so a
model that serves several requests from Python threads corrupts its memory: an adapter like that died within 1,000 requests
at 24 at once on 24.10. One that waits in `execute`, as upstream's, serves one request an instance.
"""

from __future__ import annotations

from pipeline.core.stage import StageContext
from pipeline.triton import pbtxt
from pipeline.triton.layouts.llmapi import write_llmapi
from pipeline.triton.releases import Release

__all__ = ["INPUTS", "OUTPUTS", "layout"]

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
    """Write `repository/<model>/config.pbtxt` and `1/` as the llmapi layout does, under these names."""
    write_llmapi(ctx, release, INPUTS, OUTPUTS, max_batch_size=1)
