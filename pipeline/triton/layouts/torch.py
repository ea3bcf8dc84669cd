"""Layout of the compiled torch engine: one decoupled python model under the names of TensorRT-LLM's ensemble."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.core.jsonio import read_json
from pipeline.core.stage import StageContext
from pipeline.triton import pbtxt
from pipeline.triton.layouts import write_model
from pipeline.triton.releases import Release

__all__ = ["layout", "write_repository"]

INPUTS = (
    *pbtxt.specs({"text_input": "STRING"}),
    *pbtxt.specs(
        {
            "max_tokens": "INT32",
            "stream": "BOOL",
            "temperature": "FP32",
            "top_k": "INT32",
            "top_p": "FP32",
            "seed": "UINT64",
            "stop_words": "STRING[-1]",
            "ignore_eos": "BOOL",
            "exclude_input_in_output": "BOOL",
            "return_finish_reason": "BOOL",
            "return_num_input_tokens": "BOOL",
            "return_num_output_tokens": "BOOL",
        },
        optional=True,
    ),
)
OUTPUTS = pbtxt.specs(
    {"text_output": "STRING", "finish_reason": "STRING", "num_input_tokens": "INT32", "num_output_tokens": "INT32"}
)


def layout(ctx: StageContext, release: Release | None = None) -> None:
    """Write `repository/<model>/config.pbtxt` and `1/` with the model's code beside the engine's files."""
    write_repository(ctx, release)


def write_repository(ctx: StageContext, release: Release | None) -> Path:
    """The same; the folder `1/`."""
    serve = ctx.config.serve
    name = serve.model_name or ctx.config.model.name
    length = read_json(ctx.inputs["engine"] / "engine.json")["max_seq_len"]
    parameters = {"max_queue": str(serve.max_queue), "max_seq_len": str(length)}
    config = pbtxt.build(name, inputs=INPUTS, outputs=OUTPUTS, parameters=parameters, max_batch_size=1, release=release)
    version = write_model(ctx.out / "repository", config, "torch")
    for source in sorted(path for path in ctx.inputs["engine"].rglob("*") if path.is_file()):
        place(source, version / source.relative_to(ctx.inputs["engine"]))
    return version


def place(source: Path, target: Path) -> None:
    """Hard-link `source`, which may be large, as `target`; copy it where links are not possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
