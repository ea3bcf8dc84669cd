"""Layout of vLLM: config.pbtxt with all tensors of Triton's vLLM backend, and model.json with the engine's arguments.

The model's code comes with the backend. Its tensors and its policy are written out: started with
--disable-auto-complete-config, as NVIDIA's launcher of TensorRT-LLM does, the backend is not asked for them.
vLLM takes `model` relative to the working directory, so the server is to be started in the folder that holds `repository/`;
then the package can be moved as a whole. Every model of KIND_MODEL takes all GPUs that it sees: one instance, no GPU list.
"""

from __future__ import annotations

from tritonclient.grpc import model_config_pb2 as pb

from pipeline.core.jsonio import read_json, write_json
from pipeline.core.stage import StageContext
from pipeline.engines.trtllm.build import link_tree
from pipeline.triton import pbtxt
from pipeline.triton.layouts import write_model
from pipeline.triton.releases import Release

__all__ = ["INPUTS", "OUTPUTS", "layout"]

INPUTS = (
    *pbtxt.specs({"text_input": "STRING"}),
    *pbtxt.specs(
        {
            "image": "STRING[-1]",
            "stream": "BOOL",
            "sampling_parameters": "STRING",
            "exclude_input_in_output": "BOOL",
            "return_finish_reason": "BOOL",
            "return_cumulative_logprob": "BOOL",
            "return_logprobs": "BOOL",
            "return_num_input_tokens": "BOOL",
            "return_num_output_tokens": "BOOL",
        },
        optional=True,
    ),
)
"""Without `embedding_request`, which is the OpenAI frontend's own and not for models that generate."""
OUTPUTS = pbtxt.specs(
    {
        "text_output": "STRING[-1]",
        "finish_reason": "STRING[-1]",
        "cumulative_logprob": "FP32[-1]",
        "logprobs": "STRING[-1]",
        "num_input_tokens": "UINT32",
        "num_output_tokens": "UINT32[-1]",
    }
)
PARAMETERS = {"ENABLE_VLLM_HEALTH_CHECK": "true", "REPORT_CUSTOM_METRICS": "true"}
"""The backend unloads a model whose engine died, so that readiness says so, and publishes vLLM's metrics."""


def layout(ctx: StageContext, release: Release | None = None) -> None:
    """Write `repository/<model>/config.pbtxt`, `1/model.json` and the linked checkpoint."""
    name = ctx.config.serve.model_name or ctx.config.model.name
    args = read_json(ctx.inputs["engine"] / "engine_args.json")
    config = pbtxt.build(
        name,
        inputs=INPUTS,
        outputs=OUTPUTS,
        parameters=PARAMETERS | {"max_seq_len": str(args["max_model_len"])},
        backend="vllm",
        kind=pb.ModelInstanceGroup.KIND_MODEL,
        release=release,
    )
    version = write_model(ctx.out / "repository", config)
    link_tree(ctx.inputs["engine"] / "checkpoint", version / "checkpoint")
    write_json(version / "model.json", args | {"model": f"repository/{name}/1/checkpoint"})
