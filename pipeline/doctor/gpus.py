"""GPUs: how many of which kind, memory, power, clocks, faults, and the driver."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.doctor.probe import BAD, OK, WARN, Check, Probe, Wanted

__all__ = ["NO_GPU", "PROBES", "Gpu", "parse_gpus"]

MIB = 1 << 20
FIELDS = (
    "index", "name", "compute_cap", "memory.total", "memory.used", "driver_version", "persistence_mode", "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total", "power.limit", "power.default_limit", "power.max_limit",
)  # fmt: skip
CLOCKS = ("index", "clocks.max.sm", "clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown")
"""These fields were renamed (clocks_event_reasons); the old names are still taken."""
SAME = 0.02
"""Memory sizes this close are the same GPU: nvidia-smi counts what the driver keeps for itself, CUDA does not."""
IDLE_BYTES = 2 << 30
"""Memory that a GPU without a job has in use at most."""
OLDEST_DRIVER = 535
"""Branch from which data-centre drivers run newer CUDA through the container's compatibility package (NVIDIA's support matrix)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One row of nvidia-smi."""

    index: int
    name: str
    sm: int
    memory: int
    used: int
    driver: str
    persistent: bool
    mig: bool
    faults: int
    power: float | None
    default_power: float | None


def parse_gpus(text: str) -> list[Gpu]:
    """The rows of `nvidia-smi --query-gpu=<FIELDS> --format=csv,noheader,nounits`."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        Gpu(
            index=int(row[0]), name=row[1], sm=int(row[2].replace(".", "")), memory=int(row[3]) * MIB, used=int(row[4]) * MIB,
            driver=row[5], persistent=row[6] == "Enabled", mig=row[7] == "Enabled", faults=int(_number(row[8]) or 0),
            power=_number(row[9]), default_power=_number(row[10]),
        )
        for row in rows
    ]  # fmt: skip


def _number(word: str) -> float | None:
    """None for [N/A] and the like."""
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else None


def judge_gpus(text: str, wanted: Wanted) -> Iterator[Check]:
    """Everything that one row says."""
    gpus = parse_gpus(text)
    kinds = ", ".join(sorted({gpu.name for gpu in gpus})) or "none"
    enough = len(gpus) >= wanted.gpus
    yield Check("gpu", "count", OK if enough else BAD, f"{len(gpus)} ({kinds})", f"{wanted.gpus}", "take a node with more GPUs")
    if not gpus:
        return
    yield _alike("compute", gpus, [f"SM{gpu.sm}" for gpu in gpus], f"SM{wanted.sm} ({wanted.title})", "choose +hw= of this node")
    yield _memory(gpus, wanted)
    yield _idle(gpus)
    yield _driver(gpus[0].driver, wanted)
    yield _where("MIG", [gpu.index for gpu in gpus if gpu.mig], BAD, "off", "nvidia-smi -mig 0, as root, and reset the GPUs")
    faulty = [gpu.index for gpu in gpus if gpu.faults]
    yield _where("ECC errors", faulty, BAD, "none", "drain the node: uncorrectable memory errors")
    unready = [gpu.index for gpu in gpus if not gpu.persistent]
    yield _where("persistence", unready, WARN, "on everywhere", "nvidia-smi -pm 1, or run nvidia-persistenced: starts are slower")
    yield _power(gpus)


def _alike(name: str, gpus: Sequence[Gpu], values: list[str], wanted: str, fix: str) -> Check:
    kinds = sorted(set(values))
    return Check("gpu", name, OK if kinds == [wanted.split()[0]] else BAD, ", ".join(kinds), wanted, fix)


def _where(name: str, gpus: list[int], status: str, good: str, fix: str) -> Check:
    """A thing that no GPU should have."""
    found = f"not so on GPU {', '.join(map(str, gpus))}" if gpus else good
    return Check("gpu", name, status if gpus else OK, found, good, fix)


def _memory(gpus: Sequence[Gpu], wanted: Wanted) -> Check:
    least = min(gpu.memory for gpu in gpus)
    enough = least >= wanted.memory_bytes * (1 - SAME)
    found, want = f"{least / 2**30:.1f} GiB", f"{wanted.memory_bytes / 2**30:.1f} GiB"
    return Check("gpu", "memory", OK if enough else BAD, found, want, "plan with hw.memory_bytes of this GPU")


def _idle(gpus: Sequence[Gpu]) -> Check:
    busy = [gpu for gpu in gpus if gpu.used > IDLE_BYTES]
    found = ", ".join(f"GPU {gpu.index} has {gpu.used / 2**30:.1f} GiB in use" for gpu in busy) or "free"
    return Check("gpu", "memory in use", BAD if busy else OK, found, "free", "end what runs there: the plan counts all memory")


def _driver(found: str, wanted: Wanted) -> Check:
    """The container's own compatibility package lets data-centre GPUs run with older branches."""
    if not wanted.driver:
        return Check("driver", "driver", OK, found)
    if _order(found) >= _order(wanted.driver):
        return Check("driver", "driver", OK, f"{found} (the container wants {wanted.driver})")
    status = WARN if _order(found)[0] >= OLDEST_DRIVER else BAD
    compatible = "works through the container's cuda-compat, if that covers it; else install that driver"
    fix = compatible if status == WARN else "install that driver"
    return Check("driver", "driver", status, found, f"{wanted.driver} or later", fix)


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _power(gpus: Sequence[Gpu]) -> Check:
    capped = [gpu for gpu in gpus if gpu.power and gpu.default_power and gpu.power < gpu.default_power]
    caps = ", ".join(f"GPU {gpu.index} is capped to {gpu.power:.0f} W of {gpu.default_power:.0f}" for gpu in capped)
    fix = "nvidia-smi -pl WATTS: speeds are those of full power"
    return Check("gpu", "power", WARN if capped else OK, caps or "not capped", "not capped", fix)


def judge_clocks(text: str, wanted: Wanted) -> Iterator[Check]:
    """Whether a GPU is slowed down now."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    slow = [int(row[0]) for row in rows if "Active" in row[2:]]
    yield _where("clocks", slow, WARN, "not slowed down", "look at `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`: cooling or power")


def judge_cuda(text: str, wanted: Wanted) -> Iterator[Check]:
    """`CUDA Version: 13.0` in nvidia-smi's head is the newest that the driver runs by itself."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError("no CUDA Version")
    found, want = (int(match[1]), int(match[2])), _order(wanted.cuda)[:2]
    status = OK if found >= want else WARN
    shown = f"{wanted.cuda}, the container's"
    yield Check("driver", "cuda", status, f"{found[0]}.{found[1]}", shown, "newer by the container's cuda-compat: see the driver")


NO_GPU = "no NVIDIA GPU: nvidia-smi is not here, or finds none"
NVIDIA_SMI = "this node has no NVIDIA driver, or the container was started without GPUs (docker run --gpus all)"
PROBES = (
    Probe(
        area="gpu", name="count", command=("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"),
        judge=judge_gpus, without=BAD, nothing=NO_GPU, fix=NVIDIA_SMI,
    ),
    Probe(
        area="gpu", name="clocks", command=("nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits"),
        judge=judge_clocks,
    ),
    Probe(area="driver", name="cuda", command=("nvidia-smi",), judge=judge_cuda, when=lambda wanted: bool(wanted.cuda)),
)  # fmt: skip
