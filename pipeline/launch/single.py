"""One node: the script that all launchers end in, and starting it with docker or as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.launch.fleet import Fleet, Instance
from pipeline.launch.router import router_command, router_yaml
from pipeline.launch.script import Files, fill, quoted

__all__ = ["instance_script", "single", "size_text"]


def instance_script(fleet: Fleet) -> str:
    """`instance.sh`: numbers, environment and command of every instance."""
    template = "trtllm_serve.sh" if fleet.disaggregated else "tritonserver.sh"
    return fill(
        "instance.sh",
        instances="\n".join(map(_case, fleet.instances)),
        environment="".join(_export(row) for row in fleet.environment) + (fill("warm.sh") if fleet.warmed else ""),
        imex=fill("imex.sh") if fleet.needs_imex else "",
        server=fill(template).rstrip("\n"),
        bind=fill("grace.sh" if fleet.multi_node_nvlink else "no_bind.sh").rstrip("\n"),
    )


def single(fleet: Fleet, base: Mapping[str, Any]) -> Files:
    """`single/`: with a container where one is known, and without."""
    if fleet.num_nodes > 1:
        return {}
    files = {"single/bare.sh": fill("single_bare.sh", stop=fill("stop.sh"), starts="\n".join(_bare_starts(fleet)))}
    if fleet.disaggregated:
        files["single/disaggregated.yaml"] = router_yaml(fleet, lambda item: f"localhost:{item.http_port}", base)
    if fleet.image:
        shm = "--ipc host" if fleet.disaggregated else f"--shm-size {size_text(fleet.shm_bytes)}"
        starts = "\n".join(_container_starts(fleet))
        files["single/container.sh"] = fill(
            "single_container.sh", image=quoted(fleet.image), name=fleet.name, shm=shm, starts=starts
        )
    return files


def size_text(size: int, suffix: str = "g") -> str:
    """Whole GiB as docker (`g`) or Kubernetes (`Gi`) write them."""
    return f"{size >> 30}{suffix}"


def _case(item: Instance) -> str:
    more = f" arguments={item.arguments}" if item.arguments else ""
    ports = f"http={item.http_port}" + ("" if more else f" grpc={item.grpc_port} metrics={item.metrics_port}")
    return f"{item.name})\n  gpus={item.visible_devices} ranks={item.ranks} {ports} prefix={item.shm_prefix}{more}\n  ;;"


def _export(row: Mapping[str, str]) -> str:
    return f"# {row['reason']} ({row['source']}).\nexport {row['name']}={quoted(row['value'])}\n"


def _bare_starts(fleet: Fleet) -> list[str]:
    lines = [f'start bash "$launch/instance.sh" {item.name}' for item in fleet.instances]
    if fleet.disaggregated:
        words = " ".join(map(quoted, router_command("FILE")))
        lines.append("start " + words.replace("FILE", '"$launch/single/disaggregated.yaml"'))
    return lines


def _container_starts(fleet: Fleet) -> list[str]:
    lines = [f"start {item.name} bash /package/launch/instance.sh {item.name}" for item in fleet.instances]
    if fleet.disaggregated:
        lines.append(f"start router {' '.join(router_command('/package/launch/single/disaggregated.yaml'))}")
    return lines
