"""Several nodes: one job of Slurm (pyxis and enroot), or mpirun over a hostfile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline.launch.fleet import LOAD_SECONDS, Fleet, Instance
from pipeline.launch.router import REQUEST_SECONDS, router_yaml
from pipeline.launch.script import Files, fill

__all__ = ["mpi", "slurm"]

REGISTRY = re.compile(r"^(\w[\w-]*[.:][\w.:-]*)/")
"""It has a dot or a port; enroot writes # after it. Names of Docker Hub and files have none."""
RDMA = """# RDMA cards: enroot's hook gives a container none unless told to.
export MELLANOX_VISIBLE_DEVICES=all
"""


def slurm(fleet: Fleet, base: Mapping[str, Any]) -> Files:
    """`slurm/`: an sbatch script with one srun a server; nothing where no container is known, or ranks are not MPI's."""
    if fleet.image is None or fleet.engine != "trtllm":
        return {}
    return {
        "slurm/serve.sbatch": fill(
            "slurm.sbatch",
            name=fleet.name,
            nodes=fleet.num_nodes,
            tasks=fleet.gpus_per_node,
            segment=_segment(fleet),
            image=REGISTRY.sub(r"\1#", fleet.image),
            rdma=RDMA if fleet.crosses_nodes else "",
            imex_mount=",/dev/nvidia-caps-imex-channels:/dev/nvidia-caps-imex-channels" if fleet.needs_imex else "",
            starts=_starts(fleet),
            router=_router(fleet, "slurm_router.sh"),
        ),
        **_addresses(fleet, "slurm", base),
    }


def mpi(fleet: Fleet, base: Mapping[str, Any]) -> Files:
    """`mpi/`: one mpirun a server, and a hostfile to fill in; nothing where ranks are not MPI's."""
    if fleet.engine != "trtllm":
        return {}
    hosts = "".join(f"node{node}\n" for node in range(fleet.num_nodes))
    head = f"# {fleet.num_nodes} host(s) of {fleet.gpus_per_node} GPUs, one a line: put your names here.\n"
    router = _router(fleet, "mpi_router.sh")
    script = fill("mpi.sh", nodes=fleet.num_nodes, stop=fill("stop.sh"), starts=_starts(fleet), router=router)
    return {"mpi/run.sh": script, "mpi/hostfile": head + hosts, **_addresses(fleet, "mpi", base)}


def _starts(fleet: Fleet) -> str:
    return "\n".join(f"start {item.name} {item.nodes[0]} {len(item.nodes)} {item.ranks}" for item in fleet.instances)


def _segment(fleet: Fleet) -> str:
    """Nodes of one NVLink domain, where several make one."""
    if not fleet.needs_imex:
        return ""
    return f"# All nodes in one NVLink domain (a block of Slurm's topology).\n#SBATCH --segment={fleet.num_nodes}\n"


def _router(fleet: Fleet, template: str) -> str:
    return fill(template, load=LOAD_SECONDS, request=REQUEST_SECONDS) if fleet.disaggregated else ""


def _addresses(fleet: Fleet, folder: str, base: Mapping[str, Any]) -> Files:
    """The router's file with a placeholder for each node, whose name only the job knows."""

    def address(item: Instance) -> str:
        return f"node{item.nodes[0]}-of-the-job:{item.http_port}"

    return {f"{folder}/disaggregated.yaml": router_yaml(fleet, address, base)} if fleet.disaggregated else {}
