"""Build for vLLM: bind convert's checkpoint to the engine arguments and the environment it is to be served with.

Nothing is compiled here: weights are loaded, kernels chosen and CUDA graphs captured when the server starts.
"""

from __future__ import annotations

from pipeline.core.jsonio import read_json, write_json
from pipeline.core.stage import StageContext
from pipeline.engines.trtllm.build import link_tree
from pipeline.engines.vllm.arguments import environment, render
from pipeline.engines.vllm.loading import loader_of

__all__ = ["build"]


def build(ctx: StageContext) -> None:
    """Write engine_args.json, environment.json, checkpoint/ (hard links) and engine.json."""
    engine = ctx.config.engine.vllm
    assert engine is not None
    deploy = read_json(ctx.inputs["plan"] / "deploy.json")
    files = link_tree(ctx.inputs["convert"], ctx.out / "checkpoint")
    args = render(deploy, engine, loader_of(ctx.config.quant.layout, deploy["weight_formats"]))
    write_json(ctx.out / "engine_args.json", args)
    write_json(ctx.out / "environment.json", environment(deploy))
    write_json(ctx.out / "checkpoint.json", {"folder": "checkpoint", "files": files, "from": "convert"})
    not_run = (
        f"Written for vLLM {engine.version}, which did not judge the arguments; nothing was loaded or served on "
        f"{deploy['hardware']}."
    )
    write_json(ctx.out / "engine.json", {
        "kind": "vllm", "line": engine.version, "num_devices": deploy["num_devices"],
        "instances": [{
            "role": "aggregated", "count": deploy["instances"], "tp": deploy["tp"], "pp": deploy["pp"],
            "gpus_per_instance": deploy["num_devices"], "llm_args": "engine_args.json",
        }],
        "not_run": not_run,
    })  # fmt: skip
    ctx.progress.note(not_run)
