"""Memory of the machine, as this process may have it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory", "whole_memory"]

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory() -> int:
    """Bytes that this process may still take, by the machine's account and its control group's."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return whole_memory()
    return min([free, *_group_limits()])


def whole_memory() -> int:
    """Bytes that there are, used or not."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits()])


def _group_limits() -> list[int]:
    texts = [Path(file).read_text(encoding="ascii").strip() for file in CGROUP_LIMITS if Path(file).is_file()]
    return [int(text) for text in texts if text.isdigit()]
