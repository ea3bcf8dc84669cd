"""Layout of TensorRT-LLM: one python model around `tensorrt_llm.LLM`, with the tensors of upstream's llmapi model.

`decoupled` and `max_batch_size` stand in config.pbtxt *and* in model.yaml and are equal: started with
--disable-auto-complete-config, as NVIDIA's launcher does, Triton reads only the first and streams one token of many.
The checkpoint is hard-linked into the version folder, and model.yaml names it relative to that folder, so the
repository can be moved as a whole; an absolute path there (or a file named by LLM_CONFIG_PATH) points elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from pipeline.core.stage import StageContext
from pipeline.engines.trtllm.build import link_tree
from pipeline.share import share
from pipeline.triton import pbtxt
from pipeline.triton.pbtxt import TensorSpec

__all__ = ["INPUTS", "OUTPUTS", "layout"]

DECOUPLED, MAX_BATCH_SIZE = True, 0

INPUTS = (
    TensorSpec("text_input", "STRING", (-1,)),
    *(
        TensorSpec(name, kind, dims, optional=True)
        for name, kind, dims in (
            ("image_url", "STRING", (-1,)),
            ("streaming", "BOOL", (1,)),
            ("sampling_param_best_of", "INT32", (1,)),
            ("sampling_param_temperature", "FP32", (1,)),
            ("sampling_param_top_k", "INT32", (1,)),
            ("sampling_param_top_p", "FP32", (1,)),
            ("sampling_param_frequency_penalty", "FP32", (1,)),
            ("sampling_param_presence_penalty", "FP32", (1,)),
            ("sampling_param_max_tokens", "INT32", (1,)),
            ("sampling_param_stop", "STRING", (-1,)),
            ("sampling_param_seed", "UINT64", (1,)),
            ("sampling_param_exclude_input_from_output", "BOOL", (1,)),
            ("sampling_param_return_perf_metrics", "BOOL", (1,)),
            ("return_finish_reason", "BOOL", (1,)),
            ("return_stop_reason", "BOOL", (1,)),
            ("return_cumulative_logprob", "BOOL", (1,)),
            ("stop", "BOOL", (1,)),
            ("lora_id", "UINT64", (1,)),
            ("lora_name", "STRING", (1,)),
            ("lora_path", "STRING", (1,)),
            ("lora_ckpt_source", "STRING", (1,)),
        )
    ),
)
"""Inputs that the model refuses are declared too: a client of upstream's model gets its sentence, not Triton's."""
OUTPUTS = (
    TensorSpec("text_output", "STRING", (-1,)),
    TensorSpec("finish_reason", "STRING", (-1,)),
    TensorSpec("stop_reason", "STRING", (-1,)),
    TensorSpec("cumulative_logprob", "FP32", (-1,)),
)


def layout(ctx: StageContext) -> None:
    """Write `repository/<model>/config.pbtxt` and `1/` with model.yaml, the model's code and the checkpoint."""
    name = ctx.config.serve.model_name or ctx.config.model.name
    version = ctx.out / "repository" / name / "1"
    version.mkdir(parents=True)
    config = pbtxt.build(
        name, inputs=INPUTS, outputs=OUTPUTS, parameters={}, max_batch_size=MAX_BATCH_SIZE, decoupled=DECOUPLED
    )
    pbtxt.write(version.parent / "config.pbtxt", config)
    for source in sorted((share("triton_repo") / "llmapi" / "1").glob("*.py")):
        shutil.copyfile(source, version / source.name)
    link_tree(ctx.inputs["engine"] / "checkpoint", version / "checkpoint")
    (version / "model.yaml").write_text(_model_yaml(ctx.inputs["engine"] / "llm_args.yaml"), encoding="utf-8")


def _model_yaml(llm_args: Path) -> str:
    """The engine's arguments, the checkpoint, and what concerns Triton alone."""
    settings = yaml.safe_load(llm_args.read_text(encoding="utf-8"))
    settings["model"] = "checkpoint"
    settings["triton_config"] = {"decoupled": DECOUPLED, "max_batch_size": MAX_BATCH_SIZE}
    return yaml.safe_dump(settings, sort_keys=True, default_flow_style=False)
