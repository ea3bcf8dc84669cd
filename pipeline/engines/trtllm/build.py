"""Build for TensorRT-LLM: bind convert's checkpoint to the arguments and the environment it is to be served with.

Since the TensorRT backend was removed (after 1.3.0rc20) there is no engine file: weights are loaded, kernels tuned and
CUDA graphs captured when the server starts. What can be wrong before that is checked here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.core.errors import StageError
from pipeline.core.jsonio import read_json, write_atomic, write_json
from pipeline.core.stage import StageContext
from pipeline.engines.trtllm import installed_as, installed_version
from pipeline.engines.trtllm.environment import environment
from pipeline.engines.trtllm.llm_args import render, to_yaml
from pipeline.engines.trtllm.roles import arguments_file, described, roles_of, server_config
from pipeline.engines.trtllm.versions import VersionLine, version_line
from pipeline.engines.trtllm.warm import warm

__all__ = ["build", "link_tree"]

Args = dict[str, Any]


def build(ctx: StageContext) -> None:
    """Write the LLM arguments of every role, environment.json, checkpoint.json, checkpoint/ (hard links) and engine.json."""
    assert ctx.config.engine.trtllm is not None
    line = version_line(ctx.config.engine.trtllm.version)
    deploy = read_json(ctx.inputs["plan"] / "deploy.json")
    roles = roles_of(deploy)
    arguments = {role["role"]: render(role, line) for role in roles}
    files = link_tree(ctx.inputs["convert"], ctx.out / "checkpoint")
    validated = [_validate(args, ctx.out / "checkpoint", line) for args in arguments.values()]
    variables = environment(deploy, line)
    _write_arguments(ctx.out, roles, arguments)
    write_json(ctx.out / "environment.json", variables)
    write_json(ctx.out / "checkpoint.json", {"folder": "checkpoint", "files": files, "from": "convert"})
    warmed = ctx.config.engine.trtllm.warm and warm(ctx.out, arguments, variables, ctx.progress)
    not_run = _not_run(all(validated), bool(warmed), deploy["hardware"])
    write_json(ctx.out / "engine.json", {
        "kind": "trtllm", "line": line.line, "triton_containers": line.triton_containers, "serving": deploy["serving"],
        "num_devices": sum(role["count"] * role["num_devices"] for role in roles),
        "instances": [described(role) for role in roles], "quantization": _quantization(files),
        "validated_by_engine": all(validated), "warmed": warmed or None, "not_run": not_run,
    })  # fmt: skip
    ctx.progress.note(not_run)


def link_tree(source: Path, target: Path) -> dict[str, int]:
    """Hard-link every file below `source`; {name: bytes}. A checkpoint of hundreds of GB is never copied."""
    sizes = {}
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        name = file.relative_to(source)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target / name)
        except OSError as error:
            raise StageError(
                f"{name} cannot be hard-linked into the bundle ({error.strerror}), and a checkpoint is not copied: "
                f"keep the whole store on one file system that has hard links (store.root)."
            ) from error
        sizes[name.as_posix()] = file.stat().st_size
    return sizes


def _write_arguments(out: Path, roles: list[dict[str, Any]], arguments: dict[str, Args]) -> None:
    for name, args in arguments.items():
        file = out / arguments_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, to_yaml(args).encode())
    if "aggregated" not in arguments:
        write_atomic(out / "disaggregated.yaml", to_yaml(server_config(roles, arguments)).encode())


def _quantization(files: dict[str, int]) -> str | None:
    """The file of the checkpoint that says how it is quantised."""
    return next((name for name in ("hf_quant_config.json", "config.json") if name in files), None)


def _validate(args: Args, checkpoint: Path, line: VersionLine) -> bool:
    """Let TensorRT-LLM's own model of the arguments judge them, where it is installed in the line's version."""
    if not installed_as(line.line):
        return False
    # NOTE: imports torch and CUDA libraries, so only here and only when the version fits.
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    try:
        TorchLlmArgs(model=str(checkpoint), **args)
    except ValueError as error:
        raise StageError(f"TensorRT-LLM {installed_version()} refuses the arguments: {error}") from error
    return True


def _not_run(validated: bool, warmed: bool, hardware: str) -> str:
    """One line on what this build did not do."""
    if warmed:
        return f"Validated by TensorRT-LLM's TorchLlmArgs, loaded and warmed here; not served on {hardware}."
    if validated:
        return f"Validated by TensorRT-LLM's TorchLlmArgs; not loaded or served on {hardware}."
    return (
        "Checked against this pipeline's data for the version line only: tensorrt_llm of that line is not installed, "
        f"so its TorchLlmArgs did not judge, and nothing was loaded or served on {hardware}."
    )
