"""Pods of the Kubernetes launcher: GPUs, /dev/shm, the package, locked memory, probes and placement."""

from __future__ import annotations

from typing import Any

from pipeline.launch.fleet import LOAD_SECONDS, Fleet, Instance
from pipeline.launch.router import router_command
from pipeline.launch.single import size_text

__all__ = ["group_templates", "labels", "metadata", "pod", "router_pod", "server_probes"]

PERIOD = 10
"""Seconds between two probes."""


def labels(fleet: Fleet, component: str) -> dict[str, str]:
    """What selects the pods of one component."""
    return {"app.kubernetes.io/name": fleet.name, "app.kubernetes.io/component": component}


def metadata(fleet: Fleet, component: str) -> dict[str, Any]:
    """Name and labels of an object."""
    return {"name": f"{fleet.name}-{component}", "labels": labels(fleet, component)}


def pod(
    fleet: Fleet, item: Instance, command: list[str], *, probes: dict[str, Any], ports: bool = True, ssh: bool = False
) -> dict[str, Any]:
    """Template of one pod of an instance: all its GPUs of one node."""
    names = {"http": item.http_port} if fleet.disaggregated else _triton_ports(item)
    volumes, mounts = _volumes(fleet, item, ssh)
    cards = {fleet.rdma: 1} if fleet.rdma and fleet.crosses_nodes else {}
    resources: dict[str, Any] = {"limits": {"nvidia.com/gpu": len(item.gpus), **cards}}
    placement: dict[str, Any] = {}
    if fleet.needs_imex:
        resources["claims"] = [{"name": "imex"}]
        placement = _one_clique(fleet)
    container = {
        "name": "server",
        "image": fleet.image,
        "command": command,
        "env": [{"name": "KEEP_GPUS", "value": "1"}],
        **({"ports": [{"name": name, "containerPort": port} for name, port in names.items()]} if ports else {}),
        "resources": resources,
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": mounts,
        **probes,
    }
    spec = {
        "nodeSelector": {
            "nvidia.com/gpu.compute.major": str(fleet.sm // 10),
            "nvidia.com/gpu.compute.minor": str(fleet.sm % 10),
        },
        **placement,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": volumes,
    }
    return {"metadata": {"labels": labels(fleet, item.role)}, "spec": spec}


def group_templates(fleet: Fleet, item: Instance) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leader and worker of a LeaderWorkerSet; a group of one has a leader only, but the API wants both."""
    spread = len(item.nodes) > 1
    start = ["bash", "/package/launch/kubernetes/leader.sh"] if spread else ["bash", "/package/launch/instance.sh"]
    words = [*start, item.name, str(item.ranks), str(len(item.gpus))] if spread else [*start, item.name]
    leader = pod(fleet, item, words, probes=server_probes(fleet, item), ssh=spread)
    if not spread:
        return leader, leader
    return leader, pod(fleet, item, ["bash", "/package/launch/kubernetes/worker.sh"], probes={}, ports=False, ssh=True)


def router_pod(fleet: Fleet) -> dict[str, Any]:
    """Template of the router, which needs no GPU."""
    container = {
        "name": "router",
        "image": fleet.image,
        "command": router_command("/config/disaggregated.yaml"),
        "ports": [{"name": "http", "containerPort": fleet.http_port}],
        "volumeMounts": [{"name": "config", "mountPath": "/config", "readOnly": True}],
        **_http_probes("http", "/health"),
    }
    volumes = [{"name": "config", "configMap": {"name": f"{fleet.name}-router"}}]
    return {"metadata": {"labels": labels(fleet, "router")}, "spec": {"containers": [container], "volumes": volumes}}


def server_probes(fleet: Fleet, item: Instance) -> dict[str, Any]:
    """Triton's readiness stays true when the stub that runs the model has died, so liveness asks for the stub as well.

    `[t]` keeps pgrep from finding the shell that runs it.
    """
    if fleet.disaggregated:
        return _http_probes("http", "/health")
    probes = _http_probes("http", "/v2/health/ready")
    alive = f"pgrep -f '[t]riton_python_backend_stub' >/dev/null && curl -sf http://localhost:{item.http_port}/v2/health/live"
    probes["livenessProbe"] = {
        "exec": {"command": ["bash", "-c", alive]},
        "periodSeconds": 3 * PERIOD,
        "timeoutSeconds": PERIOD,
        "failureThreshold": 3,
    }
    return probes


def _http_probes(port: str, path: str) -> dict[str, Any]:
    """The start may take as long as a first load; after that a server that does not answer is not ready, then dead."""
    get = {"httpGet": {"path": path, "port": port}}
    return {
        "startupProbe": {**get, "periodSeconds": PERIOD, "timeoutSeconds": 5, "failureThreshold": LOAD_SECONDS // PERIOD},
        "readinessProbe": {**get, "periodSeconds": PERIOD, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**get, "periodSeconds": 3 * PERIOD, "timeoutSeconds": PERIOD, "failureThreshold": 6},
    }


def _triton_ports(item: Instance) -> dict[str, int]:
    return {"http": item.http_port, "grpc": item.grpc_port, "metrics": item.metrics_port}


def _volumes(fleet: Fleet, item: Instance, ssh: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The package, /dev/shm (a container's own has 64 MB), the kernels' cache, and the key of the group."""
    size = size_text(fleet.shm_of([item]), "Gi")
    volumes: list[dict[str, Any]] = [
        {"name": "package", "persistentVolumeClaim": {"claimName": fleet.claim, "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        {"name": "cache", "emptyDir": {}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "package", "mountPath": "/package", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": "/root/.cache"},
    ]
    if ssh:
        volumes.append({"name": "ssh", "secret": {"secretName": f"{fleet.name}-ssh"}})
        mounts.append({"name": "ssh", "mountPath": "/ssh-key", "readOnly": True})
    return volumes, mounts


def _one_clique(fleet: Fleet) -> dict[str, Any]:
    """A channel of the deployment's IMEX domain, and all its pods in one NVLink clique."""
    ours = {"key": "app.kubernetes.io/component", "operator": "In", "values": fleet.roles}
    selector = {"matchLabels": {"app.kubernetes.io/name": fleet.name}, "matchExpressions": [ours]}
    term = {"labelSelector": selector, "topologyKey": "nvidia.com/gpu.clique"}
    return {
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
        "resourceClaims": [{"name": "imex", "resourceClaimTemplateName": f"{fleet.name}-imex"}],
    }
