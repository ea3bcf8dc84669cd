"""What stands beside the shards of a converted checkpoint: index, configurations, companions, and a summary.

All of it follows from the headers that are on disk, not from what was meant to be written.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from pipeline.checkpoint.conversion import ConversionPlan
from pipeline.checkpoint.digest import companions
from pipeline.checkpoint.reader import read_header
from pipeline.checkpoint.source import INDEX, Checkpoint, pair
from pipeline.core.errors import StageError
from pipeline.core.jsonio import write_json

__all__ = ["describe"]


def describe(plan: ConversionPlan, out: Path) -> str:
    """Write everything but the shards, open the result as a reader would, and return a sentence about it."""
    files = [out / shard.name for shard in plan.shards]
    _remove_strangers(out, set(files))
    source = plan.source
    tensors = {name: info for file in files for name, info in read_header(file).items()}
    total = sum(info.num_bytes for info in tensors.values())
    weight_map = {name: info.file.name for name, info in tensors.items()}
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    inline, modelopt = plan.recipe.tables(pair(tensors, source.arch))
    config = {name: value for name, value in source.config.items() if name != "quantization_config"}
    write_json(out / "config.json", config | ({"quantization_config": inline} if inline else {}))
    if modelopt:
        write_json(out / "hf_quant_config.json", modelopt)
    for file in companions(source.folder):
        shutil.copyfile(file, out / file.name)
    written = Checkpoint.open(out)
    _check_counts(source, written)
    write_json(out / "conversion.json", _summary(plan, written))
    return _sentence(source, written)


def _summary(plan: ConversionPlan, written: Checkpoint) -> dict[str, Any]:
    """What was done, for people and for `verify`."""
    source = plan.source
    classes: dict[str, dict[str, Counter[str]]] = {}
    for entry in written.entries.values():
        kind = classes.setdefault(entry.place.kind, {}).setdefault(entry.format.name, Counter())
        kind.update(parameters=prod(entry.shape), bytes=entry.num_bytes, count=1)
    return {
        "recipe": asdict(plan.recipe),
        "rounding": plan.recipe.rounding,
        "classes": classes,
        "kept_byte_for_byte": sum(step.copies for step in plan.steps),
        "parameters_in": len(source.entries), "parameters_out": len(written.entries),
        "tensors_in": len(source.tensors), "tensors_out": len(written.tensors),
        "bytes_in": sum(info.num_bytes for info in source.tensors.values()),
        "bytes_out": sum(info.num_bytes for info in written.tensors.values()),
    }


def _check_counts(source: Checkpoint, written: Checkpoint) -> None:
    """No parameter may be lost or invented: MTP layers have been, elsewhere."""
    if odd := source.entries.keys() ^ written.entries.keys():
        raise StageError(
            f"{len(source.entries)} parameters went in and {len(written.entries)} came out, {min(odd)} differs: "
            f"this is a fault of convert, please report it."
        )


def _sentence(source: Checkpoint, written: Checkpoint) -> str:
    before, after = (sum(info.num_bytes for info in side.tensors.values()) for side in (source, written))
    formats = Counter(entry.format.name for entry in written.entries.values() if entry.place.linear)
    kinds = ", ".join(f"{count} in {name}" for name, count in sorted(formats.items()))
    return f"{len(written.entries)} parameters; linear layers: {kinds}; {before / 1e6:.1f} MB became {after / 1e6:.1f} MB"


def _remove_strangers(out: Path, shards: set[Path]) -> None:
    """Drop files that a killed run of another version left here."""
    for file in out.iterdir():
        if file.is_file() and file not in shards:
            file.unlink()
