"""Every server of a deployment with its ranks, nodes, GPUs and ports: the one thing that all launchers are rendered from.

It follows from three files: `engine.json` (which instances there are), `deploy.json` (the GPU of each rank) and
`environment.json`, and from `hw.*` and `serve.*`. Nothing else may decide a number in a launcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.core.errors import StageError
from pipeline.core.jsonio import read_json
from pipeline.engines.trtllm.roles import described as row_of
from pipeline.engines.trtllm.roles import roles_of as planned_roles
from pipeline.launch.image import image_of

__all__ = ["LOAD_SECONDS", "Fleet", "Instance", "dns_label", "fleet_of", "planned_fleet", "roles_of"]

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Nodes of an instance, and its GPUs on each of them."""

LOAD_SECONDS = 5400
"""Deadline of a start: the first load of DeepSeek-R1 can take about an hour (TensorRT-LLM's examples/models/core/deepseek_v3)."""
PORT_STEP = 10
"""Between the ports of one instance and the next."""
PORTS = (8000, 8001, 8002)
"""HTTP, gRPC and metrics where serve.*_port is 0, which only a server on this machine can take."""
STUB_BYTES = 64 << 20
"""/dev/shm of one stub of Triton's python backend: its region starts at 1 MiB, and grows with the requests in flight. Allowance."""
RANK_BYTES = 256 << 20
"""/dev/shm of one rank: NCCL's and MPI's buffers between processes of a node. Allowance."""
LEAST_SHM = 2 << 30
"""As in `docker run --shm-size=2g` of Triton's TensorRT-LLM guide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One server: one copy of the model."""

    name: str
    role: str
    """aggregated, context or generation."""
    nodes: tuple[int, ...]
    """Which nodes of the allocation, from 0."""
    gpus: tuple[int, ...]
    """GPU of each rank of one of its nodes; all its nodes are alike."""
    http_port: int
    grpc_port: int
    metrics_port: int
    arguments: str
    """LLM-args YAML, relative to the package; empty where the Triton repository holds them."""

    @property
    def ranks(self) -> int:
        """World size."""
        return len(self.nodes) * len(self.gpus)

    @property
    def visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES."""
        return ",".join(map(str, self.gpus))

    @property
    def shm_prefix(self) -> str:
        """shm-region-prefix-name without the rank; the port makes it unique among all servers that live on a node."""
        return f"{self.name.replace('-', '_')}_{self.http_port}_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All servers of one deployment."""

    name: str
    """DNS label."""
    engine: str
    """trtllm or vllm."""
    image: str | None
    """None: no published container holds the engine's version."""
    line: str
    """Version (line) of the engine."""
    environment: Sequence[Mapping[str, str]]
    """{name, value, reason, source} of each variable."""
    instances: tuple[Instance, ...]
    gpus_per_node: int
    nvlink_domain: int
    sm: int
    http_port: int
    """Where clients ask."""
    claim: str
    """PersistentVolumeClaim that holds the package."""
    rdma: str | None = None
    """Kubernetes' resource for RDMA cards."""
    warmed: bool = False
    """Whether the bundle has what the engine kept when it was warmed (`cache/ROLE/`)."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the allocation."""
        return 1 + max(node for instance in self.instances for node in instance.nodes)

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode are servers of their own behind a router."""
        return any(instance.role != "aggregated" for instance in self.instances)

    @property
    def multi_node_nvlink(self) -> bool:
        """Whether the NVLink domain spans nodes (GB200 NVL72, GB300 NVL72): memory is then shared through IMEX."""
        return self.nvlink_domain > self.gpus_per_node

    @property
    def crosses_nodes(self) -> bool:
        """Whether GPUs of different nodes talk: ranks of one instance, or instances that hand the cache on."""
        return self.num_nodes > 1 and (self.disaggregated or any(len(item.nodes) > 1 for item in self.instances))

    @property
    def needs_imex(self) -> bool:
        """Whether they do so over NVLink."""
        return self.multi_node_nvlink and self.crosses_nodes

    @property
    def shm_bytes(self) -> int:
        """/dev/shm of the fullest node: stubs and ranks, rounded up to a power of two, at least 2 GiB."""
        return max(self.shm_of([item for item in self.instances if node in item.nodes]) for node in range(self.num_nodes))

    def shm_of(self, instances: Sequence[Instance]) -> int:
        """/dev/shm of these on one node."""
        stubs = sum(item.role == "aggregated" for item in instances)
        wanted = stubs * STUB_BYTES + sum(len(item.gpus) for item in instances) * RANK_BYTES
        return max(LEAST_SHM, 1 << (wanted - 1).bit_length())

    def of_role(self, role: str) -> list[Instance]:
        """The instances of one role."""
        return [item for item in self.instances if item.role == role]

    @property
    def roles(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(item.role for item in self.instances))


def fleet_of(config: Config, engine: Path, deploy: Mapping[str, Any]) -> Fleet:
    """The servers of the bundle in `engine`.

    Raises:
        StageError: the ranks of an instance do not divide into equal nodes.
        ConfigError: the container does not hold the engine's version.
    """
    variables = engine / "environment.json"
    environment = read_json(variables) if variables.is_file() else []
    return _fleet(config, read_json(engine / "engine.json"), environment, deploy)


def planned_fleet(config: Config, deploy: Mapping[str, Any]) -> Fleet:
    """The same before the engine stage has run, without its environment."""
    return _fleet(config, {}, [], deploy)


def _fleet(
    config: Config, described: Mapping[str, Any], environment: Sequence[Mapping[str, str]], deploy: Mapping[str, Any]
) -> Fleet:
    per_node = int(deploy.get("gpus_per_node") or config.hw.num_devices)
    return Fleet(
        name=dns_label(config.serve.model_name or config.model.name),
        engine=config.engine.kind,
        image=image_of(config),
        line=str(described.get("line") or described.get("version") or ""),
        environment=environment,
        instances=tuple(_instances(config, roles_of(described, deploy), deploy, per_node)),
        gpus_per_node=per_node,
        nvlink_domain=config.hw.nvlink_domain,
        sm=int(deploy.get("sm") or config.hw.sm or 0),
        http_port=_ports(config)[0],
        claim=config.serve.claim or f"{dns_label(config.model.name)}-package",
        rdma=config.serve.rdma,
        warmed=bool(described.get("warmed")),
    )


def roles_of(described: Mapping[str, Any], deploy: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{role, count, ranks, llm_args} of each row of engine.json's `instances`; of the plan's where there is no engine.json yet."""
    rows = described.get("instances") or [row_of(role) for role in planned_roles(deploy)]
    return [
        {
            "role": row["role"], "count": int(row["count"]), "ranks": int(row["tp"]) * int(row.get("pp", 1)),
            "llm_args": row.get("llm_args", ""),
        }
        for row in rows
    ]  # fmt: skip


def dns_label(name: str) -> str:
    """`name` as Kubernetes and host names want it: lower case, digits and '-', at most 40 characters."""
    return "".join(char if char.isalnum() else "-" for char in name.lower())[:40].strip("-") or "model"


def _instances(config: Config, rows: list[dict[str, Any]], deploy: Mapping[str, Any], per_node: int) -> Iterator[Instance]:
    split = any(row["role"] != "aggregated" for row in rows)
    places = _packed(rows, per_node) if split or "placement" not in deploy else _planned(deploy)
    http, grpc, metrics = _ports(config)
    names = [(row, index) for row in rows for index in range(row["count"])]
    for number, ((row, index), (nodes, gpus)) in enumerate(zip(names, places, strict=True)):
        step = (number + split) * PORT_STEP  # a router has the first ports
        yield Instance(
            name=f"{row['role']}-{index}", role=row["role"], nodes=nodes, gpus=gpus, http_port=http + step,
            grpc_port=grpc + step, metrics_port=metrics + step,
            arguments=row["llm_args"] if split else "",
        )  # fmt: skip


def _ports(config: Config) -> tuple[int, int, int]:
    asked = (config.serve.http_port, config.serve.grpc_port, config.serve.metrics_port)
    http, grpc, metrics = (port or usual for port, usual in zip(asked, PORTS, strict=True))
    return http, grpc, metrics


def _planned(deploy: Mapping[str, Any]) -> Iterator[Place]:
    """Where the plan puts each instance."""
    for instance in dict.fromkeys(place["instance"] for place in deploy["placement"]):
        ranks = [place for place in deploy["placement"] if place["instance"] == instance]
        nodes = tuple(dict.fromkeys(place["node"] for place in ranks))
        yield nodes, tuple(place["gpu"] for place in ranks if place["node"] == nodes[0])


def _packed(rows: Sequence[Mapping[str, Any]], per_node: int) -> Iterator[Place]:
    """One after the other: an instance that fits a node does not straddle two, a larger one takes whole nodes."""
    node, used = 0, 0
    for row in rows:
        for _ in range(row["count"]):
            nodes = -(-row["ranks"] // per_node)
            if row["ranks"] % nodes:
                raise StageError(
                    f"The {row['ranks']} ranks of a {row['role']} instance do not divide over {nodes} nodes of {per_node} GPUs: "
                    f"choose parallel.tp and parallel.pp whose product is a multiple of {nodes}."
                )
            here = row["ranks"] // nodes
            if used + here > per_node:
                node, used = node + 1, 0
            yield tuple(range(node, node + nodes)), tuple(range(used, used + here))
            node, used = (node + nodes, 0) if nodes > 1 else (node, used + here)
