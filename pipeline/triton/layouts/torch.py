"""Layout of the compiled torch engine: one decoupled python model under the names of TensorRT-LLM's ensemble."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.core.stage import StageContext
from pipeline.share import share
from pipeline.triton import pbtxt
from pipeline.triton.pbtxt import TensorSpec

__all__ = ["layout"]

INPUTS = (
    TensorSpec("text_input", "STRING"),
    *(
        TensorSpec(name, kind, dims, optional=True)
        for name, kind, dims in (
            ("max_tokens", "INT32", (1,)),
            ("stream", "BOOL", (1,)),
            ("temperature", "FP32", (1,)),
            ("top_k", "INT32", (1,)),
            ("top_p", "FP32", (1,)),
            ("seed", "UINT64", (1,)),
            ("stop_words", "STRING", (-1,)),
            ("ignore_eos", "BOOL", (1,)),
            ("exclude_input_in_output", "BOOL", (1,)),
            ("return_finish_reason", "BOOL", (1,)),
            ("return_num_input_tokens", "BOOL", (1,)),
            ("return_num_output_tokens", "BOOL", (1,)),
        )
    ),
)
OUTPUTS = (
    TensorSpec("text_output", "STRING"),
    TensorSpec("finish_reason", "STRING"),
    TensorSpec("num_input_tokens", "INT32"),
    TensorSpec("num_output_tokens", "INT32"),
)


def layout(ctx: StageContext) -> None:
    """Write `repository/<model>/config.pbtxt` and `1/` with the model's code beside the engine's files."""
    serve = ctx.config.serve
    name = serve.model_name or ctx.config.model.name
    version = ctx.out / "repository" / name / "1"
    version.mkdir(parents=True)
    config = pbtxt.build(
        name, inputs=INPUTS, outputs=OUTPUTS, parameters={"max_queue": str(serve.max_queue)}, max_batch_size=1
    )
    pbtxt.write(version.parent / "config.pbtxt", config)
    for source in sorted((share("triton_repo") / "torch" / "1").glob("*.py")):
        shutil.copyfile(source, version / source.name)
    for source in sorted(path for path in ctx.inputs["engine"].rglob("*") if path.is_file()):
        place(source, version / source.relative_to(ctx.inputs["engine"]))


def place(source: Path, target: Path) -> None:
    """Hard-link `source`, which may be large, as `target`; copy it where links are not possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
