"""All files of `launch/`, from the fleet, checked and written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.errors import StageError
from pipeline.core.jsonio import read_json
from pipeline.core.stage import StageContext
from pipeline.engines.trtllm.build import link_tree
from pipeline.launch.cluster import mpi, slurm
from pipeline.launch.compose import compose
from pipeline.launch.crosscheck import bundle_of, problems
from pipeline.launch.fleet import Fleet, fleet_of, roles_of
from pipeline.launch.guide import guide
from pipeline.launch.kubernetes import kubernetes
from pipeline.launch.script import Files
from pipeline.launch.single import instance_script, single

__all__ = ["LAUNCHERS", "render", "write"]

LAUNCHERS: tuple[Callable[[Fleet, Mapping[str, Any]], Files], ...] = (single, slurm, mpi, kubernetes, compose)
"""Each writes a folder, or nothing where it cannot start this deployment."""


def render(fleet: Fleet, base: Mapping[str, Any]) -> Files:
    """All files of `launch/`; `base` is the engine's disaggregated.yaml, or empty."""
    files = {"instance.sh": instance_script(fleet)}
    for launcher in LAUNCHERS:
        files |= launcher(fleet, base)
    return {**files, "README.md": guide(fleet, files)}


def write(ctx: StageContext, out: Path) -> None:
    """Render `out` (`launch/`) for the bundle of the engine stage, and check it.

    Raises:
        StageError: the launchers disagree with the bundle.
        ConfigError: the container does not hold the engine's version.
    """
    engine, deploy = ctx.inputs["engine"], read_json(ctx.inputs["plan"] / "deploy.json")
    fleet = fleet_of(ctx.config, engine, deploy)
    base = engine / "disaggregated.yaml"
    files = render(fleet, yaml.safe_load(base.read_text(encoding="utf-8")) if base.is_file() else {})
    rows = roles_of(read_json(engine / "engine.json"), deploy)
    if found := problems(files, bundle_of(engine, rows, deploy)):
        raise StageError("\n".join(f"launch/{said}" for said in found))
    for name, text in files.items():
        file = out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            file.chmod(0o755)
    if files.keys() == {"instance.sh", "README.md"}:
        ctx.progress.note(f"no launcher here starts {fleet.engine} over {fleet.num_nodes} nodes: start launch/instance.sh yourself")
    _take_along(engine, out.parent, fleet)


def _take_along(engine: Path, package: Path, fleet: Fleet) -> None:
    """What servers read beside the Triton repository: what was kept of warming; of one role also the checkpoint and arguments."""
    if fleet.warmed:
        link_tree(engine / "cache", package / "cache")
    if not fleet.disaggregated:
        return
    if not (package / "checkpoint").exists():
        link_tree(engine / "checkpoint", package / "checkpoint")
    for arguments in {item.arguments for item in fleet.instances}:
        (package / arguments).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(engine / arguments, package / arguments)
