"""What `convert --dry-run` shows: the plan of the conversion as a table by module class, and everything against it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from pipeline.checkpoint.conversion import ConversionPlan, OutputShard, Step, plan_conversion
from pipeline.checkpoint.layout import CLASSES
from pipeline.checkpoint.problems import Problem, sentences
from pipeline.checkpoint.recipe import Recipe
from pipeline.checkpoint.source import Checkpoint

__all__ = ["DryRun", "dry_run", "size_of", "table"]

HEAD = ("class", "stored as", "action", "parameters", "tensors in", "out", "bytes in", "bytes out", "largest |w|")
LEFT = 3
"""Columns of words; the others are figures."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """A plan, and why it could not be carried out, if so."""

    plan: ConversionPlan
    problems: tuple[Problem, ...]
    free: int
    """Bytes free where the result would be written."""

    def lines(self) -> list[str]:
        """For people."""
        rows = [_cells(row) for row in (*_rows(self.plan.steps), _total(self.plan.steps))]
        return [*table(rows, HEAD, LEFT), "", *self._facts(), *(f"! {text}" for text in sentences(self.problems))]

    def plain(self) -> dict[str, Any]:
        """For machines: every step, too."""
        return {
            "checkpoint": str(self.plan.source.folder),
            "rows": _rows(self.plan.steps),
            "total": _total(self.plan.steps),
            "fused": self._fused(),
            "free_bytes": self.free,
            "shards": [_shard(shard) for shard in self.plan.shards],
            "steps": [_step(step, shard.name) for shard in self.plan.shards for step in shard.steps],
            "problems": [{"kind": p.kind, "tensor": p.tensor, "text": p.text} for p in self.problems],
        }

    def _facts(self) -> list[str]:
        shards, fused = self.plan.shards, self._fused()
        largest = max((shard.num_bytes for shard in shards), default=0)
        needed = sum(shard.num_bytes for shard in shards)
        sources = len({info.file for step in self.plan.steps for info in step.entry.tensors.values()})
        lines = [f"{sources} files become {len(shards)}, the largest {size_of(largest)}"]
        if fused["pairs"]:
            lines.append(f"{fused['pairs']:,} pairs share a tensor-wide scale, {fused['across_shards']:,} across files")
        if parted := sum(len({info.file for info in step.entry.tensors.values()}) > 1 for step in self.plan.steps):
            lines.append(f"{parted:,} weights lie in another file than their scales")
        if needed > self.free:
            lines.append(f"the result takes {size_of(needed)}, but {size_of(self.free)} are free: set store.root=DIR")
        return lines

    def _fused(self) -> dict[str, int]:
        files = {step.entry.name: step.entry.main.file for step in self.plan.steps}
        pairs = [(step.entry.name, step.fused) for step in self.plan.steps if step.fused and step.entry.name < step.fused]
        return {"pairs": len(pairs), "across_shards": sum(files[a] != files.get(b) for a, b in pairs)}


def dry_run(folder: Path, recipe: Recipe, out: Path) -> DryRun:
    """Plan the conversion of `folder` towards `out`, and write nothing."""
    source, problems = Checkpoint.survey(folder)
    plan = plan_conversion(source, recipe)
    return DryRun(plan, (*problems, *plan.problems), _free(out))


def table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...], left: int) -> list[str]:
    """Columns under their heads: the first `left` of them words, then figures; the last row is the total."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    return [lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:-1]), rule, lines[-1].rstrip()]


def size_of(count: int) -> str:
    """688586727424 -> '688.59 GB'"""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"


def _rows(steps: list[Step]) -> list[dict[str, Any]]:
    """Sums by class, stored format and action, in the order of a model."""
    groups: dict[tuple[int, str, str], list[Step]] = {}
    for step in steps:
        stored = step.entry.format.name if step.entry.quantised else step.entry.main.dtype.lower()
        groups.setdefault((CLASSES.index(step.entry.place.kind), stored, step.action), []).append(step)
    return [
        {"class": CLASSES[kind], "stored": stored, "action": action} | _sums(groups[kind, stored, action])
        for kind, stored, action in sorted(groups)
    ]


def _total(steps: list[Step]) -> dict[str, Any]:
    return {"class": "total", "stored": "", "action": ""} | _sums(steps)


def _sums(steps: list[Step]) -> dict[str, Any]:
    limits = [step.amax_limit for step in steps if step.amax_limit is not None and isfinite(step.amax_limit)]
    return {
        "parameters": len(steps),
        "tensors_in": sum(len(step.entry.tensors) for step in steps),
        "tensors_out": sum(len(step.outputs) for step in steps),
        "bytes_in": sum(step.entry.num_bytes for step in steps),
        "bytes_out": sum(step.num_bytes for step in steps),
        "amax_limit": max(limits, default=None),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    limit = "" if row["amax_limit"] is None else f"<= {row['amax_limit']:.4g}"
    counts = (f"{row[name]:,}" for name in ("parameters", "tensors_in", "tensors_out"))
    sizes = (size_of(row[name]) for name in ("bytes_in", "bytes_out"))
    return (row["class"], row["stored"], row["action"], *counts, *sizes, limit)


def _shard(shard: OutputShard) -> dict[str, Any]:
    files = {info.file.name for step in shard.steps for info in step.entry.tensors.values()}
    sums = {"tensors": len(shard.plan), "bytes_in": shard.num_source_bytes, "bytes_out": shard.num_bytes}
    return {"name": shard.name, "reads": sorted(files)} | sums


def _step(step: Step, shard: str) -> dict[str, Any]:
    entry, limit = step.entry, step.amax_limit
    return {
        "parameter": entry.name,
        "class": entry.place.kind,
        "from": entry.format.name,
        "action": step.action,
        "fused": step.fused,
        "amax_limit": limit if limit is not None and isfinite(limit) else None,
        "sources": [[info.name, info.file.name, info.start, info.stop] for info in entry.tensors.values()],
        "outputs": [[name, dtype, list(shape)] for name, dtype, shape in step.outputs],
        "shard": shard,
        "bytes_in": entry.num_bytes,
        "bytes_out": step.num_bytes,
    }


def _free(out: Path) -> int:
    """Of the file system on which `out` would be made."""
    return shutil.disk_usage(next(folder for folder in (out, *out.parents) if os.path.exists(folder))).free
