"""Runs a function as several ranks of a gloo group: one process imports torch, then forks. For collectives without GPUs.

    python -m tests._utils.ranks 3 tests.unit.test_plugins_fp4_allgather:check
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

__all__ = ["main"]


def main() -> int:
    """Exit code 0 if every rank returned."""
    world, (module, name) = int(sys.argv[1]), sys.argv[2].split(":")
    function = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, world, Path(folder) / "store", function) for rank in range(world)]
        failed = [child for child in children if os.waitpid(child, 0)[1]]
        return int(bool(failed))


def _fork(rank: int, world: int, store: Path, function: object) -> int:
    child = os.fork()
    if child:
        return child
    try:
        import torch.distributed as dist

        dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=300), world, rank)
        function()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
