"""Stage `plan`: choose precision, parallelism, batch and cache limits before anything is computed.

Needs no checkpoint: where there is one its own config.json and headers count, else `model.hf`.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.core.jsonio import write_json
from pipeline.core.stage import Stage, StageContext
from pipeline.models.arch import read_hf_config
from pipeline.planner.topology import HERE, text_of
from pipeline.share import share

__all__ = ["STAGE", "model_config", "run"]


def toolchain(config: Config) -> dict[str, str]:
    """The content of files that are given by path, and of the recipes that are compared."""
    files = {"workload.trace": config.workload.trace, "hw.topology": config.hw.topology}
    files |= {f"conf/quant/{file.name}": str(file) for file in sorted((share("conf") / "quant").glob("*.yaml"))}
    found = {name: sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items() if file and Path(file).is_file()}
    if config.hw.topology == HERE:
        found["hw.topology"] = sha256(text_of(HERE).encode()).hexdigest()
    return found


STAGE = Stage(
    name="plan",
    version=1,
    config=("hw", "model.name", "model.checkpoint", "model.hf", "quant", "parallel", "workload", "slo", "engine"),
    reads_checkpoint="headers",
    code=(
        "pipeline/planner", "pipeline/stages/plan.py", "pipeline/models/arch.py", "pipeline/checkpoint/layout.py",
        "pipeline/checkpoint/reader.py", "pipeline/engines/trtllm",
        "pipeline/engines/vllm",
        *(f"pipeline/engines/tensorrt/{name}.py" for name in ("library", "networks", "network/spec", "targets")),
    ),
    run="pipeline.stages.plan:run",
    toolchain=toolchain,
    light=True,
)


def run(ctx: StageContext) -> None:
    """Write precision.json, deploy.json, report.json, report.html and its pictures."""
    from pipeline.planner.page import page
    from pipeline.planner.plan import make_plan
    from pipeline.planner.search.choice import pictured

    plan = make_plan(ctx.config, model_config(ctx.config, ctx.checkpoint), ctx.checkpoint)
    for name in ("precision", "deploy", "report"):
        write_json(ctx.out / f"{name}.json", getattr(plan, name))
    front = pictured(plan.report) if "predicted" in plan.report else None
    for name, picture in (("memory", plan.picture), ("front", front)):
        if picture:
            (ctx.out / f"{name}.svg").write_text(picture, encoding="utf-8")
    (ctx.out / "report.html").write_text(page(plan.report, front=front, memory=plan.picture), encoding="utf-8")
    for warning in plan.report["warnings"]:
        ctx.progress.note(warning)


def model_config(config: Config, checkpoint: Path | None) -> dict[str, Any]:
    """The model's config.json, or the fields of it that the model's file in conf/ has."""
    if checkpoint is not None:
        return read_hf_config(checkpoint)
    if not config.model.hf:
        name = config.model.name
        raise ConfigError(f"model={name} has no checkpoint and no model.hf to plan from: set checkpoint=FOLDER.")
    return dict(config.model.hf)
