"""Kubernetes: a Deployment where an instance fits a node, LeaderWorkerSets where it does not or where prefill and decode are apart.

Pods of an instance that spans nodes are one LeaderWorkerSet group: the leader starts the ranks of all with mpirun over ssh.
On systems whose NVLink spans nodes a ComputeDomain gives the pods of the deployment an IMEX channel, and affinity keeps
them in one NVLink clique.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.launch.fleet import LOAD_SECONDS, Fleet, Instance
from pipeline.launch.pods import group_templates, labels, metadata, pod, router_pod, server_probes
from pipeline.launch.router import router_yaml
from pipeline.launch.script import Files, dump, fill

__all__ = ["kubernetes"]

PULL_SECONDS = 1800
"""How long a leader waits for its workers, whose image of about 15 GB may have to be pulled."""
FRONT = "server"
"""Component that clients reach: the servers themselves, or the router."""


def kubernetes(fleet: Fleet, base: Mapping[str, Any]) -> Files:
    """`kubernetes/`; nothing where no container is known, or ranks on several nodes are not MPI's."""
    spread = any(len(item.nodes) > 1 for item in fleet.instances)
    if fleet.image is None or (spread and fleet.engine != "trtllm"):
        return {}
    grouped = fleet.disaggregated or spread
    documents = _grouped(fleet, base) if grouped else [_deployment(fleet)]
    domain = [_compute_domain(fleet)] if fleet.needs_imex else []
    files = {"kubernetes/serve.yaml": dump(*domain, *documents, _service(fleet, grouped))}
    if spread:
        files["kubernetes/leader.sh"] = fill("leader.sh", pull=PULL_SECONDS)
        files["kubernetes/worker.sh"] = fill("worker.sh")
    return files


def _grouped(fleet: Fleet, base: Mapping[str, Any]) -> list[dict[str, Any]]:
    sets = [_leader_worker_set(fleet, role) for role in fleet.roles]
    if not fleet.disaggregated:
        return sets

    def address(item: Instance) -> str:
        group = f"{fleet.name}-{item.role}"
        return f"{group}-{fleet.of_role(item.role).index(item)}.{group}:{fleet.of_role(item.role)[0].http_port}"

    files = {"disaggregated.yaml": router_yaml(fleet, address, base)}
    router = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(fleet, "router"), "data": files}
    return [*sets, router, _router(fleet)]


def _deployment(fleet: Fleet) -> dict[str, Any]:
    """Replicas of one instance; no rolling update, which would need as many GPUs again."""
    first, role = fleet.instances[0], fleet.instances[0].role
    command = ["bash", "/package/launch/instance.sh", first.name]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(fleet, role),
        "spec": {
            "replicas": len(fleet.instances),
            "strategy": {"type": "Recreate"},
            "progressDeadlineSeconds": LOAD_SECONDS + PULL_SECONDS,
            "selector": {"matchLabels": labels(fleet, role)},
            "template": pod(fleet, first, command, probes=server_probes(fleet, first)),
        },
    }


def _leader_worker_set(fleet: Fleet, role: str) -> dict[str, Any]:
    """As many groups as instances, each as many pods as nodes; a pod that restarts takes its group with it."""
    instances = fleet.of_role(role)
    leader, worker = group_templates(fleet, instances[0])
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(fleet, role),
        "spec": {
            "replicas": len(instances),
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": len(instances[0].nodes),
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }


def _router(fleet: Fleet) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(fleet, "router"),
        "spec": {
            "replicas": 1,
            "progressDeadlineSeconds": LOAD_SECONDS + PULL_SECONDS,
            "selector": {"matchLabels": labels(fleet, "router")},
            "template": router_pod(fleet),
        },
    }


def _service(fleet: Fleet, grouped: bool) -> dict[str, Any]:
    """Where clients ask: the router, or the servers (of a group the leader, which is its worker 0)."""
    first = fleet.instances[0]
    selector = labels(fleet, "router" if fleet.disaggregated else first.role)
    if grouped and not fleet.disaggregated:
        selector["leaderworkerset.sigs.k8s.io/worker-index"] = "0"
    ports = {"http": fleet.http_port}
    if not fleet.disaggregated:
        ports = {"http": first.http_port, "grpc": first.grpc_port, "metrics": first.metrics_port}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(fleet, FRONT),
        "spec": {
            "selector": selector,
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()],
        },
    }


def _compute_domain(fleet: Fleet) -> dict[str, Any]:
    """NVIDIA's DRA driver makes an IMEX domain of the nodes on which the pods land."""
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": {"name": fleet.name},
        "spec": {
            "numNodes": fleet.num_nodes,
            "channel": {"resourceClaimTemplate": {"name": f"{fleet.name}-imex"}},
        },
    }
