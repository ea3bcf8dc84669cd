"""A probe: a tool's output, read by a pure function and held against what the plan wants of the node."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError

__all__ = ["BAD", "OK", "UNKNOWN", "WARN", "Check", "Probe", "Run", "Wanted", "run_tool"]

OK, WARN, BAD, UNKNOWN = "ok", "warn", "bad", "?"
TIMEOUT = 20.0
"""Seconds for one tool; nvidia-smi takes several on a node whose GPUs are not persistent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a plan needs of one node."""

    title: str
    sm: int
    gpus: int
    """That the fullest node uses."""
    memory_bytes: int
    """Of one GPU, as software sees it."""
    nvlink_bandwidth: float
    """Bytes a second of one GPU, one direction; 0: no NVLink."""
    nvlink_domain: int
    nodes: int
    needs_imex: bool
    image: str
    """Container that the launchers start; empty: none is known."""
    driver: str
    """CUDA driver that the container was built for; empty: not known."""
    cuda: str
    checkpoint_bytes: int
    """Of the converted checkpoint, which engine and package share by hard links."""
    converted_bytes: int
    """Of it, what the store's last conversion has."""
    source_bytes: int
    """Still to be downloaded; 0 where `checkpoint` is given."""
    store: Path
    hf_home: Path
    checkpoint: Path | None
    shm_bytes: int
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was found, what the plan wants, and what to do."""

    area: str
    name: str
    status: str
    """ok; warn: works, but slower or at a risk; bad: the plan cannot run; ?: could not be asked."""
    found: str
    wanted: str = ""
    fix: str = ""

    def text(self) -> str:
        wanted = f", wanted {self.wanted}" if self.wanted and self.status != OK else ""
        way_out = f" -> {self.fix}" if self.fix and self.status != OK else ""
        return f"{self.status:4} {self.area:8} {self.name:15} {self.found}{wanted}{way_out}"

    def plain(self) -> dict[str, Any]:
        return asdict(self)


Run = Callable[[tuple[str, ...]], str | None]
"""Output of a command; None where the tool is missing, fails or hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A command and the function that judges its output."""

    area: str
    name: str
    command: tuple[str, ...]
    judge: Callable[[str, Wanted], Iterable[Check]]
    without: str = UNKNOWN
    """Status where the tool gives nothing."""
    nothing: str = ""
    """What that means, where it is more than that the tool is missing."""
    fix: str = ""
    when: Callable[[Wanted], bool] = lambda wanted: True

    def checks(self, wanted: Wanted, run: Run) -> Iterator[Check]:
        """Nothing where the plan does not need it."""
        if not self.when(wanted):
            return
        output = run(self.command)
        if output is None:
            nothing = self.nothing or f"`{' '.join(self.command[:2])}` gives nothing here"
            yield Check(self.area, self.name, self.without, nothing, "", self.fix)
            return
        try:
            yield from self.judge(output, wanted)
        except (ValueError, IndexError, KeyError, ConfigError) as error:  # a version of the tool that prints otherwise
            found = f"`{' '.join(self.command[:2])}` prints what is not understood: {error}"
            yield Check(self.area, self.name, UNKNOWN, found)


def run_tool(command: tuple[str, ...]) -> str | None:
    """Standard output of a command that ended well in time."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
