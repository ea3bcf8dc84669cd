"""How the GPUs of a node are wired, from `nvidia-smi topo -m`, and what that makes of collectives.

The matrix names the slowest part of the way between two devices: NV# (that many NVLinks), PIX and PXB (PCIe switches), PHB
(the CPU's PCIe host), NODE (between hosts of one CPU), SYS (between CPUs). GPUs that reach one another over NVLink are one
domain; instances go inside a domain where they fit. The ring visits the GPUs so that its slowest link is as fast as can be,
then the second slowest, and so on: NCCL finds such rings itself, but a rank order that follows it keeps neighbours in the
engine's own kernels close too. `CUDA_VISIBLE_DEVICES` in ring order is the rank -> GPU mapping.

Times are bandwidth and latency of the links, without protocol: a comparison of orders, not a measurement. A collective is
as slow as its busiest link; ways between CPUs are one shared link.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

from pipeline.core.errors import ConfigError

__all__ = ["HERE", "Placement", "Topology", "all_reduce", "all_to_all", "parse", "place", "read", "text_of"]

PCIE = 50e9
"""Bytes a second of one PCIe 5.0 x16 slot, one direction, of which about 50 of 63 GB/s arrive. Estimate."""
CLASSES = {"PIX": PCIE, "PXB": PCIE, "PHB": 0.9 * PCIE, "NODE": 0.8 * PCIE, "SYS": 0.6 * PCIE}
"""Bytes a second by class of way; the last three are estimates of what CPUs forward."""
LATENCY = {"NV": 2e-6, "PIX": 4e-6, "PXB": 4e-6, "PHB": 5e-6, "NODE": 6e-6, "SYS": 8e-6}
"""Seconds of one message. Estimates."""
NVLINK = 25e9
"""Bytes a second of one NVLink 4 in one direction (18 of them: 450 GB/s); NVLink 5 has twice that."""
LARGEST_SEARCH = 16
"""GPUs up to which rings are searched; more of them are behind a switch anyway."""
HERE, COMMAND = "here", ("nvidia-smi", "topo", "-m")
"""hw.topology for the machine that plans, and what it is asked."""
DEVICE = re.compile(r"(GPU|NIC|mlx|bnxt|hns|rdma|ibp|roce)\w*")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Topology:
    """One node."""

    links: tuple[tuple[str, ...], ...]
    """Between GPUs: "X" on the diagonal, else NV#, PIX, PXB, PHB, NODE or SYS."""
    numa: tuple[int | None, ...]
    nics: dict[str, tuple[str, ...]]
    """Network card -> its way to each GPU."""
    nvlink: float = NVLINK
    """Bytes a second of one NVLink, one direction."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the node."""
        return len(self.links)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes a second from `a` to `b`, one direction."""
        kind = self.links[a][b]
        return int(kind[2:]) * self.nvlink if kind.startswith("NV") else CLASSES[kind]

    def latency(self, a: int, b: int) -> float:
        """Seconds of one message."""
        kind = self.links[a][b]
        return LATENCY["NV" if kind.startswith("NV") else kind]

    def domains(self) -> list[list[int]]:
        """GPUs that reach one another over NVLink, directly or through others; GPUs without NVLink are alone."""
        left, found = list(range(self.num_gpus)), []
        while left:
            domain, fringe = set(), [left[0]]
            while fringe:
                gpu = fringe.pop()
                domain.add(gpu)
                fringe += [other for other in left if other not in domain and self.links[gpu][other].startswith("NV")]
            found.append(sorted(domain))
            left = [gpu for gpu in left if gpu not in domain]
        return found

    def nearest_nics(self) -> dict[int, tuple[str, ...]]:
        """GPU -> the network cards with the shortest way to it."""
        order = [*CLASSES]
        nearest = {}
        for gpu in range(self.num_gpus):
            ways = {nic: order.index(kinds[gpu]) for nic, kinds in self.nics.items()}
            nearest[gpu] = tuple(nic for nic, way in ways.items() if way == min(ways.values()))
        return nearest


@dataclass(frozen=True, slots=True)
class Placement:
    """Instances on GPUs."""

    groups: tuple[tuple[int, ...], ...]
    """For each instance the GPU of each rank, in ring order."""

    @property
    def visible_devices(self) -> list[str]:
        """CUDA_VISIBLE_DEVICES of each instance; `gpu_device_ids` of Triton is these joined by ";"."""
        return [",".join(map(str, group)) for group in self.groups]


def read(source: Path | str, nvlink_bandwidth: float | None = None) -> Topology:
    """The topology in a file, or of this machine (`HERE`); `nvlink_bandwidth` is that of all NVLinks of one GPU, one direction, in
    bytes a second."""
    try:
        return parse(text_of(str(source)), nvlink_bandwidth)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hw.topology={source} cannot be read ({error}): save the output of `nvidia-smi topo -m`.") from error


def text_of(source: str) -> str:
    """What a file, or nvidia-smi here, says. ConfigError where there is no nvidia-smi or it fails."""
    return _asked() if source == HERE else Path(source).read_text(encoding="utf-8")


@cache
def _asked() -> str:
    told = f"`{' '.join(COMMAND)}`"
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"hw.topology={HERE} runs {told}, which fails ({error}): name a file of its output.") from error
    if done.returncode:
        raise ConfigError(f"{told} fails ({done.stderr.strip() or done.returncode}): name a file of its output.")
    return done.stdout


def parse(text: str, nvlink_bandwidth: float | None = None) -> Topology:
    """Read the matrix; other text around it does no harm.

    Raises:
        ConfigError: if there is no matrix, a row is short, a word is unknown, or the two directions disagree.
    """
    lines = [ESCAPE.sub("", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words and words[0] == "GPU0" and "X" not in words), None)
    if header is None:
        raise ConfigError("No matrix of GPUs was found: give the output of `nvidia-smi topo -m`.")
    devices = [word for word in header[: header.index("CPU") if "CPU" in header else None] if DEVICE.fullmatch(word)]
    rows = {words[0]: words[1:] for words in lines if words and words[0] in devices and words is not header}
    gpus = [name for name in devices if name.startswith("GPU")]
    if missing := [name for name in gpus if len(rows.get(name, ())) < len(devices)]:
        raise ConfigError(f"The row of {missing[0]} is missing or short: the matrix has {len(devices)} columns.")
    matrix = {name: dict(zip(devices, rows[name], strict=False)) for name in devices if name in rows}
    links = tuple(tuple(_way(matrix[a][b], a, b) for b in gpus) for a in gpus)
    if odd := next(((a, b) for a, b in combinations(range(len(gpus)), 2) if links[a][b] != links[b][a]), None):
        raise ConfigError(f"GPU{odd[0]} to GPU{odd[1]} is {links[odd[0]][odd[1]]}, but back it is {links[odd[1]][odd[0]]}.")
    nics = {name: tuple(_way(matrix[gpu][name], gpu, name) for gpu in gpus) for name in devices if name not in gpus}
    most = max((int(kind[2:]) for row in links for kind in row if kind.startswith("NV")), default=0)
    per_link = nvlink_bandwidth / most if nvlink_bandwidth and most else NVLINK
    return Topology(links, tuple(_numa(rows[name][len(devices) :]) for name in gpus), nics, per_link)


def place(topology: Topology, ranks: int) -> Placement:
    """As many instances of `ranks` GPUs as the node holds: inside NVLink domains first, the rest by the fastest links."""
    if ranks > topology.num_gpus:
        raise ConfigError(f"An instance of {ranks} ranks does not fit the {topology.num_gpus} GPUs of the topology.")
    groups: list[tuple[int, ...]] = []
    rest: list[int] = []
    for domain in topology.domains():
        inside = _split(topology, domain, ranks)
        groups += inside
        rest += [gpu for gpu in domain if not any(gpu in group for group in inside)]
    groups += _split(topology, sorted(rest), ranks)
    return Placement(tuple(sorted(tuple(ring(topology, group)) for group in groups)))


def ring(topology: Topology, gpus: Sequence[int]) -> list[int]:
    """`gpus` in the order whose sorted link bandwidths are largest, slowest first; the first of equal ones."""
    if len(gpus) < 4 or len(gpus) > LARGEST_SEARCH or len({topology.bandwidth(a, b) for a, b in combinations(gpus, 2)}) == 1:
        return list(gpus)
    speeds = sorted({topology.bandwidth(a, b) for a, b in combinations(gpus, 2)})
    best: list[int] = list(gpus)
    for slowest in speeds:
        found = next(_rings(topology, [gpus[0]], set(gpus[1:]), slowest), None)
        if found is None:
            break
        best = found
    return _fewest_slow(topology, best, gpus)


def all_reduce(topology: Topology, order: Sequence[int], size: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes a GPU in this order."""
    n = len(order)
    if n == 1:
        return 0.0
    edges = list(zip(order, [*order[1:], order[0]], strict=True))
    moved = 2 * (n - 1) / n * size
    latency = 2 * (n - 1) * max(topology.latency(a, b) for a, b in edges)
    return moved / min(_shared(topology, edges).values()) + latency


def all_to_all(topology: Topology, gpus: Sequence[int], size: float) -> float:
    """Seconds until every GPU has sent `size` bytes, evenly to all of `gpus`."""
    n = len(gpus)
    if n == 1:
        return 0.0
    pairs = [(a, b) for a in gpus for b in gpus if a != b]
    part, slowest = size / n, 0.0
    for gpu in gpus:
        slow = sum(part for a, b in pairs if a == gpu and not topology.links[a][b].startswith("NV"))
        fast = [topology.bandwidth(a, b) for a, b in pairs if a == gpu and topology.links[a][b].startswith("NV")]
        slowest = max(slowest, slow / PCIE, len(fast) * part / max(fast) if fast else 0.0)
    crossing = sum(part for a, b in pairs if topology.links[a][b] == "SYS") / 2
    return max(slowest, crossing / CLASSES["SYS"]) + max(topology.latency(a, b) for a, b in pairs)


def _shared(topology: Topology, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Bandwidth that each edge gets: those between CPUs share one way in each direction."""
    crossing = max(1, sum(topology.links[a][b] == "SYS" for a, b in edges) / 2)
    return {
        (a, b): topology.bandwidth(a, b) / (crossing if topology.links[a][b] == "SYS" else 1) for a, b in edges
    }


def _rings(topology: Topology, path: list[int], left: set[int], slowest: float) -> Iterator[list[int]]:
    """Rings whose links are all at least `slowest`, in order of GPU numbers."""
    if not left:
        if topology.bandwidth(path[-1], path[0]) >= slowest:
            yield list(path)
        return
    for gpu in sorted(left):
        if topology.bandwidth(path[-1], gpu) >= slowest:
            yield from _rings(topology, [*path, gpu], left - {gpu}, slowest)


def _fewest_slow(topology: Topology, order: list[int], gpus: Sequence[int]) -> list[int]:
    """Among rings with the same slowest link, one with fewer of the slow links: swaps of stretches as long as they help."""

    def speeds(ring: list[int]) -> list[float]:
        return sorted(topology.bandwidth(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))

    improved = True
    while improved:
        improved = False
        for i, j in combinations(range(1, len(gpus)), 2):
            other = [*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :]]
            if speeds(other) > speeds(order):
                order, improved = other, True
    return order


def _split(topology: Topology, gpus: list[int], ranks: int) -> list[tuple[int, ...]]:
    """Groups of `ranks` of `gpus`, each grown from its first GPU by the neighbour with the most bandwidth to the group."""
    left, groups = list(gpus), []
    while len(left) >= ranks:
        group = [left.pop(0)]
        while len(group) < ranks:
            best = max(left, key=lambda gpu: (sum(topology.bandwidth(gpu, member) for member in group), -gpu))
            group.append(best)
            left.remove(best)
        groups.append(tuple(sorted(group)))
    return groups


def _way(word: str, a: str, b: str) -> str:
    if word == "X" and a == b:
        return word
    if word in CLASSES or re.fullmatch(r"NV\d+", word):
        return word
    raise ConfigError(f"{a} to {b} is {word}, which is none of NV#, {', '.join(CLASSES)}.")


def _numa(words: list[str]) -> int | None:
    """The column after the CPUs."""
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else None
