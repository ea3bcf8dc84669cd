"""Other libraries' kernels in tests on a GPU: extension libraries (*.so) are loaded from the folder R1_PIPELINE_PEERS."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

import torch

__all__ = ["WHERE", "load_peers", "poison"]

WHERE = "its library was not found: R1_PIPELINE_PEERS is a folder of extension libraries, others are imported"
SIZES = {64 << 10: 32, 512 << 10: 32, 8 << 20: 8, 64 << 20: 4}
"""Bytes of a tensor, and how many: of every pool of torch's allocator."""


@functools.cache
def load_peers() -> None:
    """What does not load here is left out."""
    folder = os.environ.get("R1_PIPELINE_PEERS")
    for library in sorted(Path(folder).glob("*.so")) if folder else ():
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(library))


def poison(device: str = "cuda") -> None:
    """What torch allocates next on the GPU holds NaN; nothing is done for a test of the CPU."""
    if device != "cuda":
        return
    for size, many in SIZES.items():
        kept = [torch.full((size // 4,), torch.nan, device="cuda") for _ in range(many)]
        del kept
