"""NVLink, its fabric, IMEX between nodes, and the network cards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.doctor.probe import BAD, OK, WARN, Check, Probe, Wanted
from pipeline.planner.topology import parse

__all__ = ["PROBES", "parse_fabric", "parse_imex", "parse_links", "parse_ports"]

CLOSE = 0.97
"""Of the sheet's bandwidth; the raw rate that nvidia-smi shows is a little above it."""


def parse_links(text: str) -> dict[int, list[float]]:
    """GPU -> GB/s of each of its links in `nvidia-smi nvlink --status`; 0 for an inactive one."""
    links: dict[int, list[float]] = {}
    gpu = -1
    for line in text.splitlines():
        if match := re.match(r"\s*GPU (\d+):", line):
            gpu = int(match[1])
            links[gpu] = []
        elif match := re.match(r"\s*Link \d+:\s*(?:([\d.]+) GB/s|<inactive>|.*inactive.*)", line, re.I):
            links[gpu].append(float(match[1] or 0))
    return links


def judge_links(text: str, wanted: Wanted) -> Iterator[Check]:
    """Sum of the links of each GPU against the sheet, and none of them down."""
    links = parse_links(text)
    want = wanted.nvlink_bandwidth / 1e9
    if not links:
        raise ValueError("no link")
    weak = [gpu for gpu, rates in links.items() if sum(rates) < CLOSE * want or 0 in rates]
    said = (f"GPU {gpu} has {sum(links[gpu]):.0f} GB/s, {links[gpu].count(0)} links down" for gpu in weak)
    found = "; ".join(said) or f"{min(map(sum, links.values())):.0f} GB/s"
    fix = "links are down: restart the fabric manager, then reset the GPUs; if they stay down, drain the node"
    yield Check("nvlink", "links", BAD if weak else OK, found, f"{want:.0f} GB/s a GPU", fix)


def judge_topology(text: str, wanted: Wanted) -> Iterator[Check]:
    """All GPUs that an instance takes here in one NVLink domain."""
    topology = parse(text)
    largest = max(topology.domains(), key=len)
    want = min(wanted.gpus, wanted.nvlink_domain)
    found = f"{len(largest)} of {topology.num_gpus} GPUs in one domain"
    fix = "the predicted speed takes them to be in one: set hw.topology to this node's `nvidia-smi topo -m`, or take another"
    yield Check("nvlink", "topology", OK if len(largest) >= want else BAD, found, f"{want} in one", fix)
    numa = sorted({number for number in topology.numa if number is not None})
    yield Check("cpu", "numa", OK, f"GPUs at NUMA nodes {', '.join(map(str, numa)) or 'unknown'}")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Registration of one GPU with NVLink's fabric."""

    state: str
    status: str
    cluster: str
    clique: str


def parse_fabric(text: str) -> list[Fabric]:
    """The Fabric section of each GPU in `nvidia-smi -q`; none on systems without NVSwitch."""
    found = []
    for section in re.findall(r"^\s+Fabric\n((?:\s{8,}.*\n?)+)", text, re.M):
        values = dict(re.findall(r"^\s+(\w+)\s+: (.*)$", section, re.M))
        found.append(Fabric(*(values.get(key, "N/A").strip() for key in ("State", "Status", "ClusterUUID", "CliqueId"))))
    return found


def judge_fabric(text: str, wanted: Wanted) -> Iterator[Check]:
    """Every GPU must have finished its registration; on a rack all of them in one clique."""
    fabric = parse_fabric(text)
    if not fabric or all(item.state == "N/A" for item in fabric):
        yield Check("nvlink", "fabric", OK, "no NVSwitch fabric to register with")
        return
    late = [number for number, item in enumerate(fabric) if (item.state, item.status) != ("Completed", "Success")]
    found = f"GPU {', '.join(map(str, late))}: {fabric[late[0]].state}, {fabric[late[0]].status}" if late else "registered"
    fix = "start nvidia-fabricmanager in the driver's own version (HGX), or look at the rack's NVLink switches"
    yield Check("nvlink", "fabric", BAD if late else OK, found, "Completed, Success", fix)
    if wanted.needs_imex:
        cliques = {(item.cluster, item.clique) for item in fabric}
        name = ", ".join(sorted(f"{cluster} clique {clique}" for cluster, clique in cliques))
        fix = "these GPUs are not in one NVLink partition: compare ClusterUUID and CliqueId of all nodes of the job"
        yield Check("nvlink", "clique", OK if len(cliques) == 1 else BAD, name, "one, the same on every node", fix)


def parse_imex(text: str) -> tuple[str, dict[str, str]]:
    """State of the domain, and of each node, in `nvidia-imex-ctl -N`."""
    nodes = {match[1]: match[2] for match in re.finditer(r"^Node #\d+\s+[*-]?\s*(\S+)\s+[*-]?\s*-\s*([A-Z_ ]+?)\s+-", text, re.M)}
    state = re.search(r"Domain State:\s*(\w+)", text)
    return (state[1] if state else "unknown"), nodes


def judge_imex(text: str, wanted: Wanted) -> Iterator[Check]:
    """The domain is up, and has as many nodes as the plan."""
    state, nodes = parse_imex(text)
    ready = [name for name, said in nodes.items() if said == "READY"]
    enough = state == "UP" and len(ready) >= wanted.nodes
    found = f"domain {state}, {len(ready)} of {len(nodes)} nodes ready"
    fix = "name all nodes in /etc/nvidia-imex/nodes_config.cfg and restart nvidia-imex on each (journalctl -u nvidia-imex)"
    yield Check("nvlink", "imex", OK if enough else BAD, found, f"UP with {wanted.nodes} nodes ready", fix)


def judge_channel(text: str, wanted: Wanted) -> Iterator[Check]:
    """A channel is the right to map other nodes' memory."""
    there = "channel" in text
    fix = "nvidia-modprobe -c 0, or Slurm's switch/nvidia_imex, or a ComputeDomain on Kubernetes; pass it into the container"
    yield Check("nvlink", "imex channel", OK if there else BAD, text.strip().replace("\n", ", ") or "none", "channel0", fix)


def parse_ports(text: str) -> list[tuple[str, str]]:
    """(state, rate) of each port in /sys/class/infiniband, whose two files are printed one after the other."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(state.partition(":")[2].strip(), rate) for state, rate in zip(lines[::2], lines[1::2], strict=False)]


def judge_network(text: str, wanted: Wanted) -> Iterator[Check]:
    """Cards with an active link, where instances or caches cross nodes by network."""
    ports = parse_ports(text)
    active = [rate for state, rate in ports if state == "ACTIVE"]
    found = f"{len(active)} of {len(ports)} RDMA ports active" + (f" ({sorted(set(active))[-1]})" if active else "")
    fix = "bring the ports up, or pass /dev/infiniband into the container: else traffic between nodes goes over TCP"
    yield Check("network", "rdma", OK if active else WARN, found, "one a GPU", fix)


def _crosses(wanted: Wanted) -> bool:
    return wanted.nodes > 1


def _imex(wanted: Wanted) -> bool:
    return wanted.needs_imex


def _nvlink(wanted: Wanted) -> bool:
    return wanted.nvlink_bandwidth > 0


PROBES = (
    Probe(area="nvlink", name="links", command=("nvidia-smi", "nvlink", "--status"), judge=judge_links, when=_nvlink),
    Probe(area="nvlink", name="topology", command=("nvidia-smi", "topo", "-m"), judge=judge_topology, when=_nvlink),
    Probe(area="nvlink", name="fabric", command=("nvidia-smi", "-q"), judge=judge_fabric, when=_nvlink),
    Probe(
        area="nvlink", name="imex", command=("nvidia-imex-ctl", "-N"), judge=judge_imex, when=_imex,
        fix="install the nvidia-imex of the driver's version; on Kubernetes the ComputeDomain runs it: look at its status",
    ),
    Probe(
        area="nvlink", name="imex channel", command=("ls", "/dev/nvidia-caps-imex-channels"), judge=judge_channel, without=BAD,
        nothing="no IMEX channel", when=_imex, fix="nvidia-modprobe -c 0, or what gives jobs a channel here",
    ),
    Probe(
        area="network", name="rdma", when=_crosses, judge=judge_network, without=WARN,
        command=("sh", "-c", 'for port in /sys/class/infiniband/*/ports/*; do cat "$port/state" "$port/rate"; done'),
        nothing="no RDMA card is visible",
        fix="pass /dev/infiniband into the container; without one, traffic between nodes goes over TCP",
    ),
)  # fmt: skip
