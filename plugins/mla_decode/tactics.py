"""Which implementation of the decoding attention is fastest where: measured, kept in `tactics.json`, looked up by the op.

Each row of the file is one measured shape: `batch`, `length` (tokens of the longest sequence), `device` and the microseconds of
each implementation; `scripts/bench_plugins.py --only mla_decode --json FILE`, then `python -m plugins.mla_decode.tactics FILE`,
writes it anew. A shape that was not measured takes the nearest one's order. "ours" is always there; "flash_mla" where DeepSeek's
FlashMLA can be imported, for BF16 caches in pages of 64, and not under `R1_PIPELINE_MLA=ours`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["choose", "flash_mla", "present"]

FILE = Path(__file__).with_name("tactics.json")
FLASH_PAGE = 64


@functools.cache
def present() -> tuple[str, ...]:
    """Implementations that can be used in this process."""
    found = os.environ.get("R1_PIPELINE_MLA") != "ours" and importlib.util.find_spec("flash_mla") is not None
    return ("ours", "flash_mla") if found else ("ours",)


@functools.cache
def choose(batch: int, length: int, device: str, names: tuple[str, ...]) -> str:
    """The fastest of `names` at the nearest measured shape, by the logarithms; "ours" on a device that was not measured."""
    rows = [row for row in _rows() if row["device"] == device]
    if not rows:
        return "ours"

    def distance(row: Mapping[str, Any]) -> float:
        return abs(math.log(row["batch"] / batch)) + abs(math.log(row["length"] / length))

    times = min(rows, key=distance)["us"]
    return min((name for name in names if name in times), key=times.__getitem__, default="ours")


def flash_mla(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int) -> tuple[Tensor, Tensor]:
    """FlashMLA as the op's out BF16 [B, T, A, latent] and lse F32 [B, T, A]."""
    import flash_mla as library

    schedule = library.get_mla_metadata()[0]
    rest = table, lengths, latent, schedule, None, scale, q.shape[1] > 1
    out, lse = library.flash_mla_with_kvcache(q, cache.unsqueeze(2), *rest)
    query = torch.arange(q.shape[1], device=q.device).view(-1, 1)
    none = lengths.view(-1, 1, 1) - (q.shape[1] - 1 - query) <= 0  # its sums would be arbitrary, their logarithm inf
    return out.masked_fill(none.unsqueeze(-1), 0), lse.transpose(1, 2).masked_fill(none, -torch.inf)


@functools.cache
def _rows() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["rows"]


def _write(result: Path) -> None:
    """The file, from a benchmark's result."""
    measured = json.loads(result.read_text(encoding="utf-8"))
    rows = [
        {
            "batch": row["batch"],
            "length": row["length"],
            "device": measured["device"],
            "us": {"ours": row["ours_us"]} | {name: time for name, time in row["peers"].items() if name == "flash_mla"},
        }
        for row in measured["rows"]
        if row["plugin"] == "mla_decode" and row["cache"] == "bf16"
    ]
    FILE.write_text(json.dumps({"version": 1, "torch": measured["torch"], "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
