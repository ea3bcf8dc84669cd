"""Convert: from an R1-layout checkpoint to the precision that `plan` chose, shard by shard.

Output shard i holds the parameters whose weights lie in source shard i; a scale, or a fused partner, in another shard
is read from there. A weight that changes format is first rounded to BF16, as ModelOpt does, so equal inputs give
ModelOpt's bytes. How the bytes flow is `pipeline/checkpoint/stream.py`; a rerun after a kill keeps every finished shard
(`pipeline/checkpoint/journal.py`).
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import asdict
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.stage import Need, Stage, StageContext

if TYPE_CHECKING:
    from pipeline.checkpoint.conversion import ConversionPlan, OutputShard
    from pipeline.checkpoint.journal import Journal
    from pipeline.config.schema import Config

__all__ = ["STAGE", "run"]


def toolchain(config: Config) -> dict[str, str]:
    """Who computes the roundings."""
    return {name: metadata.version(name) for name in ("numpy", "ml_dtypes")}


def requires(config: Config, checkpoint: Path | None) -> None:
    """A GPU and torch, if convert.device asks for them; its kernels use instructions of sm_80."""
    from pipeline.core.gpu import require_cuda

    if config.convert.device == "cuda":
        require_cuda("convert.device", (8, 0), "set convert.device=cpu, which gives the same bytes.")


STAGE = Stage(
    name="convert",
    version=1,
    config=(),  # not `convert`: on either device the bytes are the same
    needs=(Need(stage="plan", path="precision.json"),),
    reads_checkpoint="all",
    code=(
        "pipeline/stages/convert.py", "pipeline/checkpoint", "pipeline/formats", "pipeline/layouts", "pipeline/native/src",
        "pipeline/models/arch.py", "plugins/nvfp4_convert", "plugins/nvrtc.py",
    ),
    toolchain=toolchain,
    requires=requires,
    run="pipeline.stages.convert:run",
    resumable=True,
)


def run(ctx: StageContext) -> None:
    """Plan everything, write what is not there yet, then describe it."""
    from pipeline.checkpoint.conversion import plan_conversion
    from pipeline.checkpoint.describe import describe
    from pipeline.checkpoint.journal import Journal
    from pipeline.checkpoint.problems import refuse_all
    from pipeline.checkpoint.recipe import Recipe
    from pipeline.checkpoint.source import Checkpoint
    from pipeline.core.jsonio import write_json

    assert ctx.checkpoint is not None
    plan = plan_conversion(Checkpoint.open(ctx.checkpoint), Recipe.from_file(ctx.inputs["plan"] / "precision.json"))
    refuse_all(plan.problems)
    journal = Journal(ctx.out, ctx.state / "shards")
    write_shards(ctx, plan, journal)
    ctx.progress.note(describe(plan, ctx.out))
    write_json(ctx.state / "digests.json", journal.digests([shard.name for shard in plan.shards]))


def write_shards(ctx: StageContext, plan: ConversionPlan, journal: Journal) -> None:
    """Write the shards that the journal does not vouch for."""
    from pipeline import native
    from pipeline.checkpoint.stream import Finished, Options, convert_shards

    keys = {shard.name: shard_key(plan, shard) for shard in plan.shards}
    todo = [shard for shard in plan.shards if not journal.holds(shard, keys[shard.name])]
    _require_space(ctx.out, todo)
    if kept := len(plan.shards) - len(todo):
        ctx.progress.note(f"{kept} of {len(plan.shards)} shards are finished from an earlier run")
    if todo:
        native.say_if_slow(ctx.progress.note)
    options = Options(device=ctx.config.convert.device)
    ctx.progress.start(sum(shard.num_source_bytes for shard in todo), "B")
    with closing(convert_shards(plan, todo, ctx.out, journal.folder, options)) as events:
        for event in events:
            if isinstance(event, Finished):
                _require_unchanged(plan, event.shard, keys[event.shard.name])
                journal.record(event.shard.name, keys[event.shard.name], event.facts)
            else:
                ctx.progress.advance(event)


def shard_key(plan: ConversionPlan, shard: OutputShard) -> str:
    """Names everything that the shard's bytes follow from."""
    names = [name for step in shard.steps for name in (step.entry.name, step.fused) if name]
    files = sorted({info.file for name in names for info in plan.source.entries[name].tensors.values()})
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    facts = [STAGE.version, asdict(plan.recipe), stamps, shard.plan]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _require_unchanged(plan: ConversionPlan, shard: OutputShard, key: str) -> None:
    """What was read must be what was planned."""
    from pipeline.core.errors import StageError

    try:
        same = shard_key(plan, shard) == key
    except OSError:
        same = False
    if not same:
        raise StageError(
            f"Files of {plan.source.folder} changed or vanished while {shard.name} was made from them: let nobody write "
            f"there, then run the same command; what is finished is kept."
        )


def _require_space(out: Path, shards: list[OutputShard]) -> None:
    """Refuse at once what would fail after hours."""
    from pipeline.core.errors import StageError
    from pipeline.core.events import human_bytes

    wanted = sum(shard.num_bytes for shard in shards)
    free = shutil.disk_usage(out).free
    if wanted > free:
        raise StageError(
            f"The converted checkpoint takes {human_bytes(wanted)}, but {out} has {human_bytes(free)} free: make room, "
            f"or put the store elsewhere with store.root=DIR."
        )
