"""Convert: from an R1-layout checkpoint to the precision that `plan` chose, shard by shard.

Output shard i holds the parameters whose weights lie in source shard i; a scale, or a fused partner, in another shard
is read from there. Nothing is loaded but the tensors at work, so memory does not grow with the model. A weight that
changes format is first rounded to BF16, as ModelOpt does, so equal inputs give ModelOpt's bytes.

A finished shard has a record with its hash in a hidden journal, and a rerun keeps the shards whose records hold. The
journal goes last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from importlib import metadata
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.stage import Need, Stage, StageContext

if TYPE_CHECKING:
    from pipeline.checkpoint.conversion import ConversionPlan, OutputShard, Step
    from pipeline.checkpoint.recipe import Recipe
    from pipeline.checkpoint.source import Checkpoint, Entry
    from pipeline.config.schema import Config
    from pipeline.formats.numerics import Array

__all__ = ["STAGE", "run"]

JOURNAL = ".convert"
MAX_WORKERS = 8


def toolchain(config: Config) -> dict[str, str]:
    """Who computes the roundings."""
    return {name: metadata.version(name) for name in ("numpy", "ml_dtypes")}


STAGE = Stage(
    name="convert",
    version=1,
    needs=(Need(stage="plan", path="precision.json"),),
    reads_checkpoint="all",
    code=("pipeline/stages/convert.py", "pipeline/checkpoint", "pipeline/formats", "pipeline/layouts", "pipeline/models/arch.py"),
    toolchain=toolchain,
    run="pipeline.stages.convert:run",
    resumable=True,
)


@dataclass(frozen=True, slots=True)
class Converter:
    """The arithmetic of a plan's steps; safe to call from several threads."""

    plan: ConversionPlan
    amaxes: dict[str, float] = field(default_factory=dict)

    def convert(self, step: Step) -> dict[str, Array]:
        """The parameter's new tensors, by full name."""
        entry, amax = step.entry, self.amax(step.entry)
        if step.copies:
            return {info.name: array for info, array in zip(entry.tensors.values(), entry.stored().values(), strict=True)}
        if len(step.outputs) == 1 and step.outputs[0][1] == "F32":
            return {entry.name: entry.dequantized()}
        tensors = self.plan.recipe.relaid(entry) if step.relays else self.quantise(step, amax)
        stored = step.form.store(tensors, entry.shape)
        return {f"{entry.place.module}.{suffix}": array for suffix, array in stored.items()}

    def quantise(self, step: Step, amax: float) -> dict[str, Array]:
        """The target format's own tensors."""
        from pipeline.formats.numerics import BF16

        recipe, entry = self.plan.recipe, step.entry
        weight = entry.dequantized()
        if recipe.exact(step.target):
            amax = self.exact_amax(entry, weight)
        else:
            weight = weight.astype(BF16)
        if step.fused:
            amax = max(amax, self.fused_amax(step))
        return recipe.searching(step.target).quantize(weight, amax=amax, input_scale=recipe.input_scale)

    def fused_amax(self, step: Step) -> float:
        """That of the layer whose tensor-wide scale must be the same."""
        fused = self.plan.source.entries[step.fused or ""]
        return self.exact_amax(fused) if self.plan.recipe.exact(step.target) else self.amax(fused)

    def exact_amax(self, entry: Entry, weight: Array | None = None) -> float:
        """Largest magnitude in float32; computed once."""
        from pipeline.formats.base import amax_of

        self.amax(entry)
        if (key := f"exact {entry.name}") not in self.amaxes:
            self.amaxes[key] = amax_of(entry.dequantized() if weight is None else weight)
        return self.amaxes[key]

    def amax(self, entry: Entry) -> float:
        """Largest magnitude of a parameter; computed once, and refused when it is not finite."""
        from pipeline.checkpoint.conversion import not_finite
        from pipeline.checkpoint.problems import refuse

        if entry.name not in self.amaxes:
            self.amaxes[entry.name] = entry.amax()
        if not isfinite(self.amaxes[entry.name]):
            refuse(not_finite(entry))
        return self.amaxes[entry.name]


class Journal:
    """Records of finished shards."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / JOURNAL
        self.folder.mkdir(exist_ok=True)
        for part in self.folder.glob(".*.part"):
            part.unlink()

    def holds(self, shard: OutputShard, key: str) -> bool:
        """Whether the shard is there, from these very inputs, with the bytes that were written."""
        from pipeline.checkpoint.digest import file_sha256

        try:
            path = self.out / shard.name
            record = json.loads((self.folder / f"{shard.name}.json").read_text(encoding="utf-8"))
            return record["key"] == key and record["size"] == path.stat().st_size and (
                record["sha256"] == file_sha256(path)
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def record(self, shard: OutputShard, key: str) -> None:
        """Remember a published shard."""
        from pipeline.checkpoint.digest import file_sha256
        from pipeline.core.jsonio import write_json

        path = self.out / shard.name
        facts = {"name": path.name, "size": path.stat().st_size, "sha256": file_sha256(path), "key": key}
        write_json(self.folder / f"{path.name}.json", facts)


def run(ctx: StageContext) -> None:
    """Plan everything, write what is not there yet, then describe it."""
    from pipeline.checkpoint.conversion import plan_conversion
    from pipeline.checkpoint.problems import refuse_all
    from pipeline.checkpoint.recipe import Recipe
    from pipeline.checkpoint.source import Checkpoint

    assert ctx.checkpoint is not None
    source = Checkpoint.open(ctx.checkpoint)
    plan = plan_conversion(source, Recipe.from_file(ctx.inputs["plan"] / "precision.json"))
    refuse_all(plan.problems)
    journal = Journal(ctx.out)
    ctx.progress.start(sum(shard.num_source_bytes for shard in plan.shards), "B")
    write_shards(ctx, plan, journal)
    describe(ctx, plan)
    shutil.rmtree(journal.folder)


def write_shards(ctx: StageContext, plan: ConversionPlan, journal: Journal) -> None:
    """Write the shards that the journal does not vouch for."""
    shards, converter = plan.shards, Converter(plan)
    keys = [_shard_key(plan.recipe, shard) for shard in shards]
    todo = [(shard, key) for shard, key in zip(shards, keys, strict=True) if not journal.holds(shard, key)]
    _require_space(ctx.out, [shard for shard, _ in todo])
    if kept := len(shards) - len(todo):
        ctx.progress.note(f"{kept} of {len(shards)} shards are finished from an earlier run")
        ctx.progress.advance(sum(shard.num_source_bytes for shard in shards) - sum(s.num_source_bytes for s, _ in todo))
    for shard, key in todo:
        write_shard(ctx, converter, shard)
        journal.record(shard, key)


def write_shard(ctx: StageContext, converter: Converter, shard: OutputShard) -> None:
    """One file, its parameters on several threads; each is written where the header has its place."""
    from pipeline.checkpoint.writer import ShardWriter

    writer = ShardWriter(ctx.out / shard.name, shard.plan, ctx.out / JOURNAL)
    with writer, ThreadPoolExecutor(_num_workers()) as pool:
        for num_bytes in pool.map(partial(_convert_into, writer.write, converter), shard.steps):
            ctx.progress.advance(num_bytes)


def _convert_into(write: Any, converter: Converter, step: Step) -> int:
    for name, array in converter.convert(step).items():
        write(name, array)
    return step.entry.num_bytes


def describe(ctx: StageContext, plan: ConversionPlan) -> None:
    """Index, configurations and companions, all from the headers on disk; then open the result as a reader would."""
    from pipeline.checkpoint.digest import companions
    from pipeline.checkpoint.reader import read_header
    from pipeline.checkpoint.source import INDEX, Checkpoint, pair
    from pipeline.core.jsonio import write_json

    files = [ctx.out / shard.name for shard in plan.shards]
    _remove_strangers(ctx.out, set(files))
    source = plan.source
    tensors = {name: info for file in files for name, info in read_header(file).items()}
    total = sum(info.num_bytes for info in tensors.values())
    weight_map = {name: info.file.name for name, info in tensors.items()}
    write_json(ctx.out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    inline, modelopt = plan.recipe.tables(pair(tensors, source.arch))
    config = {name: value for name, value in source.config.items() if name != "quantization_config"}
    write_json(ctx.out / "config.json", config | ({"quantization_config": inline} if inline else {}))
    if modelopt:
        write_json(ctx.out / "hf_quant_config.json", modelopt)
    for file in companions(source.folder):
        shutil.copyfile(file, ctx.out / file.name)
    written = Checkpoint.open(ctx.out)
    _check_counts(source, written)
    write_json(ctx.out / "conversion.json", summary(plan, written))
    ctx.progress.note(_sentence(source, written))


def summary(plan: ConversionPlan, written: Checkpoint) -> dict[str, Any]:
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
    from pipeline.core.errors import StageError

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


def _shard_key(recipe: Recipe, shard: OutputShard) -> str:
    """Names everything that the shard's bytes follow from."""
    files = sorted({info.file for step in shard.steps for info in step.entry.tensors.values()})
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    facts = [STAGE.version, asdict(recipe), stamps, shard.plan]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _require_space(out: Path, shards: list[OutputShard]) -> None:
    """Refuse at once what would fail after hours."""
    from pipeline.core.errors import StageError

    wanted = sum(shard.num_bytes for shard in shards)
    free = shutil.disk_usage(out).free
    if wanted > free:
        raise StageError(
            f"The converted checkpoint takes {wanted / 1e9:.1f} GB, but {out} has {free / 1e9:.1f} GB free: make room, "
            f"or put the store elsewhere with store.root=DIR."
        )


def _remove_strangers(out: Path, shards: set[Path]) -> None:
    """Drop files that a killed run of another version left here."""
    for file in _visible_files(out):
        if file not in shards:
            file.unlink()


def _visible_files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.is_file())


def _num_workers() -> int:
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
