"""`doctor --target`: whether this node can run what was planned, before hours are spent on it.

Run it on every node of the deployment, inside the container if you can. It starts nothing, and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.core.source import find_source
from pipeline.doctor import gpus, links, software, system
from pipeline.doctor.probe import BAD, UNKNOWN, WARN, Check, Run, Wanted, run_tool
from pipeline.launch.fleet import Fleet, planned_fleet
from pipeline.launch.image import image_of, launchable
from pipeline.models.arch import Arch
from pipeline.planner.params import LINEAR_CLASSES, stored_bytes
from pipeline.triton.releases import target as triton_release

__all__ = ["examine_target", "verdict", "wanted_of"]


def examine_target(wanted: Wanted, run: Run = run_tool) -> list[Check]:
    """Every check that the plan needs; without a GPU, those that need one say once that they were not asked."""
    found = list(gpus.PROBES[0].checks(wanted, run))
    if any(check.name == "memory" for check in found):
        found += [check for probe in (*gpus.PROBES[1:], *links.PROBES) for check in probe.checks(wanted, run)]
    else:
        found.append(Check("gpu", "the rest", UNKNOWN, "memory, driver, NVLink, fabric and clocks were not asked: no GPU here"))
    rest = [*system.PROBES, *software.PROBES]
    found += [check for probe in rest for check in probe.checks(wanted, run)]
    return [*found, *software.containers(wanted, run), *system.disk(wanted), *system.hard_links(wanted), *system.ports(wanted)]


def verdict(checks: list[Check], wanted: Wanted) -> str:
    """One sentence."""
    bad, warn, unknown = ([check.name for check in checks if check.status == status] for status in (BAD, WARN, UNKNOWN))
    notes = [f"{len(warn)} to look at"] if warn else []
    notes += [f"{len(unknown)} not asked"] if unknown else []
    more = f" ({', '.join(notes)})" if notes else ""
    where = f"{wanted.gpus} GPUs of {wanted.title}" + (f" on each of {wanted.nodes} nodes" if wanted.nodes > 1 else "")
    if any(check.found == gpus.NO_GPU for check in checks):
        return f"This machine has no NVIDIA GPU, and the plan is for {where}: {', '.join(bad)}{more}."
    if bad:
        return f"This node cannot run the plan for {where}: {', '.join(bad)}{more}."
    return f"This node can run the plan for {where}{more}."


def wanted_of(config: Config, hf: dict[str, Any], deploy: dict[str, Any], report: dict[str, Any]) -> Wanted:
    """What `deploy` (deploy.json) and the plan's report need of one node.

    Raises:
        ConfigError: the plan is for a CPU.
    """
    if config.hw.sm is None:
        raise ConfigError(f"hw={config.hw.name} has no GPU to look for: choose the node's (+hw=b200), or leave --target out.")
    fleet = planned_fleet(config, deploy)
    root = Path(config.store.root)
    source = find_source(config, root).folder
    release = triton_release(config) if launchable(config.engine.kind) else None
    image = release.images.get(config.engine.kind) if release and config.serve.container is None else None
    return Wanted(
        title=config.hw.title,
        sm=config.hw.sm,
        gpus=max(_gpus_of(fleet, node) for node in range(fleet.num_nodes)),
        memory_bytes=int(config.hw.memory_bytes),
        nvlink_bandwidth=config.hw.nvlink_bandwidth or 0.0,
        nvlink_domain=config.hw.nvlink_domain,
        nodes=fleet.num_nodes,
        needs_imex=fleet.needs_imex,
        image=image_of(config) or "",
        driver=image.driver if image else "",
        cuda=image.cuda if image else "",
        checkpoint_bytes=report["model"]["checkpoint_bytes"],
        converted_bytes=_size(root / "latest" / "convert"),
        source_bytes=0 if source else published_bytes(hf),
        store=root,
        hf_home=Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser(),
        checkpoint=source,
        shm_bytes=fleet.shm_bytes,
        ports=tuple(_ports(fleet)),
    )


def published_bytes(hf: dict[str, Any]) -> int:
    """What a download takes: linear layers in FP8 blocks, as DeepSeek publishes them."""
    return sum(stored_bytes(Arch.from_hf(hf), dict.fromkeys((*LINEAR_CLASSES, "mtp"), "fp8_block")).values())


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("**/*") if file.is_file()) if folder.is_dir() else 0


def _gpus_of(fleet: Fleet, node: int) -> int:
    return len({gpu for item in fleet.instances if node in item.nodes for gpu in item.gpus})


def _ports(fleet: Fleet) -> Iterator[int]:
    """On the first node."""
    if fleet.disaggregated:
        yield fleet.http_port
    for item in fleet.instances:
        if item.nodes[0] == 0:
            yield item.http_port
            if not fleet.disaggregated:
                yield from (item.grpc_port, item.metrics_port)
