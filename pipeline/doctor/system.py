"""The machine around the GPUs: shared memory, limits, disk, links, ports."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.core.events import human_bytes
from pipeline.doctor.probe import BAD, OK, UNKNOWN, WARN, Check, Probe, Wanted

__all__ = ["PROBES", "disk", "hard_links", "parse_limits", "parse_sizes", "ports"]

STACK, FILES = 64 << 20, 65536
"""As in the launchers: stack=64 MiB of NVIDIA's containers; files: shards, sockets and shared regions of all ranks."""


def parse_sizes(text: str) -> tuple[int, int]:
    """Size and available bytes of `df --block-size=1 --output=size,avail PATH`."""
    size, available = text.splitlines()[-1].split()
    return int(size), int(available)


def judge_shm(text: str, wanted: Wanted) -> Iterator[Check]:
    """Of this process; a container has its own (64 MB with docker unless told otherwise)."""
    size, available = parse_sizes(text)
    found = f"{human_bytes(available)} of {human_bytes(size)} free"
    fix = f"docker: --shm-size={wanted.shm_bytes >> 30}g; Kubernetes: an emptyDir in memory at /dev/shm; the launchers set both"
    yield Check("memory", "/dev/shm", OK if available >= wanted.shm_bytes else BAD, found, human_bytes(wanted.shm_bytes), fix)


def parse_limits(text: str) -> dict[str, float]:
    """Soft limits of /proc/self/limits by name; inf for unlimited."""
    rows = re.findall(r"^(Max [a-z ]+?)\s{2,}(\S+)\s+\S+", text, re.M)
    return {name: float("inf") if value == "unlimited" else float(value) for name, value in rows}


def judge_limits(text: str, wanted: Wanted) -> Iterator[Check]:
    """Locked memory stops RDMA and NCCL; the other two only make trouble late."""
    limits = parse_limits(text)
    wide = wanted.nodes > 1
    for name, key, least, status, flag in (
        ("memlock", "Max locked memory", float("inf"), BAD if wide else WARN, "memlock=-1"),
        ("stack", "Max stack size", STACK, WARN, f"stack={STACK}"),
        ("nofile", "Max open files", FILES, WARN, "nofile=1048576"),
    ):
        enough = limits[key] >= least
        found, want = (f"{value:.0f}" if value != float("inf") else "unlimited" for value in (limits[key], least))
        yield Check("limits", name, OK if enough else status, found, want, f"docker: --ulimit {flag}; else limits.conf of the node")


def judge_memory(text: str, wanted: Wanted) -> Iterator[Check]:
    """Weights pass through the page cache; with less they are read again by every rank that comes later."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    if match is None:
        raise ValueError("no MemAvailable")
    available, share = int(match[1]) * 1024, wanted.checkpoint_bytes // wanted.nodes
    fix = "loading reads from disk more than once: expect a slower start"
    yield Check("memory", "host", OK if available >= share else WARN, f"{human_bytes(available)} free", human_bytes(share), fix)


def judge_balancing(text: str, wanted: Wanted) -> Iterator[Check]:
    """The kernel's page migration stalls GPU work where GPUs are NUMA nodes."""
    on = text.strip() not in ("0", "")
    fix = "sysctl kernel.numa_balancing=0"
    yield Check("cpu", "numa balancing", WARN if on else OK, "on" if on else "off", "off on Grace", fix)


def disk(wanted: Wanted) -> Iterator[Check]:
    """Room for the download and for what convert has still to write; one file system may have to hold both."""
    rooms = [("store", wanted.store, max(0, wanted.checkpoint_bytes - wanted.converted_bytes))]
    if wanted.source_bytes:
        rooms.append(("HF cache", wanted.hf_home, wanted.source_bytes))
    folders = {name: _existing(path) for name, path, _ in rooms}
    for name, path, size in rooms:
        device = folders[name].stat().st_dev
        needed = sum(other for key, _, other in rooms if folders[key].stat().st_dev == device)
        free = os.statvfs(folders[name]).f_bavail * os.statvfs(folders[name]).f_frsize
        more = f"; {human_bytes(needed)} with the other on the same file system" if needed > size else ""
        fix = "set store.root to a larger disk" if name == "store" else "set HF_HOME to a larger disk, or checkpoint=FOLDER"
        status = OK if free >= needed else BAD
        yield Check("disk", name, status, f"{human_bytes(free)} free at {path}", f"{human_bytes(size)}{more}", fix)


def hard_links(wanted: Wanted) -> Iterator[Check]:
    """Checkpoint, bundle and package share their bytes by hard links; they are never copied."""
    folder = _existing(wanted.store)
    fix = "set store.root to a file system with hard links (ext4, XFS, Lustre, NFS; not FAT, most object stores)"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as scratch:
            (Path(scratch) / "a").write_bytes(b"")
            os.link(Path(scratch) / "a", Path(scratch) / "b")
    except OSError as error:
        status = UNKNOWN if isinstance(error, PermissionError) and not os.access(folder, os.W_OK) else BAD
        yield Check("disk", "hard links", status, f"not at {folder} ({error.strerror})", "in the store", fix)
        return
    yield Check("disk", "hard links", OK, f"work at {folder}", "in the store", fix)


def ports(wanted: Wanted) -> Iterator[Check]:
    """Those of the first node's servers."""
    taken = [port for port in wanted.ports if not _free(port)]
    found = f"taken: {', '.join(map(str, taken))}" if taken else f"{', '.join(map(str, wanted.ports))} free"
    fix = "stop what listens there, or set serve.http_port and the others"
    yield Check("network", "ports", BAD if taken else OK, found, "free", fix)


def _free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True


def _existing(path: Path) -> Path:
    """The nearest folder that is there already."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


PROBES = (
    Probe(area="memory", name="/dev/shm", command=("df", "--block-size=1", "--output=size,avail", "/dev/shm"), judge=judge_shm),
    Probe(area="limits", name="memlock", command=("cat", "/proc/self/limits"), judge=judge_limits),
    Probe(area="memory", name="host", command=("cat", "/proc/meminfo"), judge=judge_memory),
    Probe(
        area="cpu", name="numa balancing", command=("cat", "/proc/sys/kernel/numa_balancing"), judge=judge_balancing,
        when=lambda wanted: wanted.needs_imex,
    ),
)  # fmt: skip
