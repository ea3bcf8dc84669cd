"""One node with docker compose: a service an instance, and the router where prefill and decode are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.launch.fleet import LOAD_SECONDS, Fleet, Instance
from pipeline.launch.router import router_command, router_yaml
from pipeline.launch.script import Files, dump
from pipeline.launch.single import size_text

__all__ = ["compose"]


def compose(fleet: Fleet, base: Mapping[str, Any]) -> Files:
    """`compose/`; nothing where several nodes are needed, or no container is known."""
    if fleet.num_nodes > 1 or fleet.image is None:
        return {}
    services = {item.name: _service(fleet, item) for item in fleet.instances}
    files: Files = {}
    if fleet.disaggregated:
        services["router"] = _router(fleet)
        files["compose/disaggregated.yaml"] = router_yaml(fleet, lambda item: f"{item.name}:{item.http_port}", base)
    document = {"name": fleet.name, "services": services, "volumes": {"cache": {}}}
    return {"compose/compose.yaml": dump(document), **files}


def _service(fleet: Fleet, item: Instance) -> dict[str, Any]:
    health = "/health" if fleet.disaggregated else "/v2/health/ready"
    ports = [item.http_port] if fleet.disaggregated else [item.http_port, item.grpc_port, item.metrics_port]
    shared = {"ipc": "host"} if fleet.disaggregated else {"shm_size": size_text(fleet.shm_of([item]))}
    gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    return {
        "image": fleet.image,
        "command": ["bash", "/package/launch/instance.sh", item.name],
        "volumes": ["../..:/package:ro", "cache:/root/.cache"],
        **shared,
        "ulimits": {"memlock": -1, "stack": 67108864, "nofile": {"soft": 1048576, "hard": 1048576}},
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        "ports": [f"{port}:{port}" for port in ports],
        "healthcheck": _healthcheck(item.http_port, health),
        "stop_grace_period": "90s",
        "restart": "unless-stopped",
    }


def _router(fleet: Fleet) -> dict[str, Any]:
    return {
        "image": fleet.image,
        "command": router_command("/package/launch/compose/disaggregated.yaml"),
        "volumes": ["../..:/package:ro"],
        "ports": [f"{fleet.http_port}:{fleet.http_port}"],
        "healthcheck": _healthcheck(fleet.http_port, "/health"),
        "depends_on": {item.name: {"condition": "service_healthy"} for item in fleet.instances},
        "restart": "unless-stopped",
    }


def _healthcheck(port: int, path: str) -> dict[str, Any]:
    return {
        "test": ["CMD", "curl", "-sf", f"http://localhost:{port}{path}"],
        "interval": "10s",
        "timeout": "5s",
        "retries": 6,
        "start_period": f"{LOAD_SECONDS}s",
    }
