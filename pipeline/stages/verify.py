"""Verify: the gate between a converted checkpoint and an engine.

It decodes every tensor as a runtime will and compares it with the source, then lets the reference model predict
held-out text with both sets of weights. Benchmarks are too noisy for a gate; these numbers are not.
"""

from __future__ import annotations

from dataclasses import fields
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import VerifyConfig
from pipeline.core.errors import GateError
from pipeline.core.jsonio import read_json
from pipeline.core.memory import available_memory
from pipeline.core.stage import Need, Stage, StageContext

if TYPE_CHECKING:
    from pipeline.checkpoint.source import Checkpoint
    from pipeline.config.schema import Config
    from pipeline.verify.logits import LogitsError, Sensitivity
    from pipeline.verify.report import Report
    from pipeline.verify.weights import TensorError

__all__ = ["STAGE", "run"]


def toolchain(config: Config) -> dict[str, str]:
    """Libraries that shape the numbers, and the content of a text given by path."""
    versions = {name: _version(name) for name in ("numpy", "ml_dtypes", "tokenizers", "torch")}
    if config.verify.text and Path(config.verify.text).is_file():
        versions["verify.text"] = sha256(Path(config.verify.text).read_bytes()).hexdigest()
    return versions


def requires(config: Config, checkpoint: Path | None) -> None:
    """The text that `verify.text` names, and torch where there is a text and room to predict it."""
    from pipeline.models.arch import Arch
    from pipeline.verify.text import heldout_file, memory_needed

    if not (checkpoint and heldout_file(checkpoint, config.verify.text)) or _version("torch") != "absent":
        return
    if memory_needed(Arch.from_dir(checkpoint), config.verify.tokens) <= available_memory() / 2:
        _require_torch()


def gate(out: Path) -> None:
    """GateError with every reason of the report in `out`, if it has one."""
    report = read_json(out / "report.json")
    if report["failures"]:
        raise GateError(*report["failures"], report=out / "report.md", damage=bool(report["damage"]))


STAGE = Stage(
    name="verify",
    version=3,
    needs=(Need(stage="convert"),),
    config=tuple(f"verify.{item.name}" for item in fields(VerifyConfig) if item.name != "on_failure"),
    reads_checkpoint="all",
    code=(
        "pipeline/stages/verify.py", "pipeline/verify", "pipeline/inspect", "pipeline/checkpoint", "pipeline/formats",
        "pipeline/layouts", "pipeline/models", "plugins/topk_router/reference.py",
    ),
    toolchain=toolchain,
    requires=requires,
    gate=gate,
    run="pipeline.stages.verify:run",
)


def run(ctx: StageContext) -> None:
    """Measure, and write the report with the verdict; `gate` acts on it."""
    from pipeline.checkpoint.source import Checkpoint
    from pipeline.verify.gate import alarms, failures, scale_failures
    from pipeline.verify.report import Report

    assert ctx.checkpoint is not None
    source, converted = Checkpoint.open(ctx.checkpoint), Checkpoint.open(ctx.inputs["convert"])
    errors, compared = measure_weights(ctx, source, converted)
    logits, note = measure_logits(ctx, source, converted)
    damage = [*scale_failures(errors), *broken_rules(ctx.inputs["convert"])]
    report = Report(
        errors=errors, compared=compared, failed=[*damage, *failures(ctx.config.verify, errors, logits)], damage=damage,
        alarms=alarms(ctx.config.verify, errors), logits=logits, note=note,
        sensitivity=measure_sensitivity(ctx, source, converted, errors) if logits and ctx.config.verify.sensitivity else [],
    )  # fmt: skip
    write(ctx, report)


def broken_rules(folder: Path) -> list[str]:
    """What headers, configs and tensor-wide scales show to be wrong, a sentence a rule."""
    from pipeline.inspect.contents import Contents
    from pipeline.verify.invariants import ERROR, Subject, check

    found = check(Subject(Contents.open(folder)))
    return [finding.sentence() for finding in found if finding.rule.level == ERROR]


def write(ctx: StageContext, report: Report) -> None:
    """report.json, report.md and heatmap.svg, and what the user sees at once."""
    from pipeline.core.jsonio import write_atomic, write_json
    from pipeline.verify.heatmap import heatmap

    config = ctx.config.verify
    write_json(ctx.out / "report.json", report.as_json())
    write_atomic(ctx.out / "report.md", report.as_markdown().encode())
    write_atomic(ctx.out / "heatmap.svg", heatmap(report.errors, config.min_sqnr_db, config.alarm_sqnr_db).encode())
    for line in report.lines():
        ctx.progress.note(line)


def measure_weights(ctx: StageContext, source: Checkpoint, converted: Checkpoint) -> tuple[list[TensorError], str]:
    """Errors of every parameter, or of a sample, with progress in bytes; and which they are."""
    from pipeline import native
    from pipeline.verify.sample import choose, sentence
    from pipeline.verify.weights import compare_weights

    native.say_if_slow(ctx.progress.note)
    chosen = choose(converted.entries.values(), ctx.config.verify.sample)
    ctx.progress.start(sum(entry.num_bytes + source.entries[entry.name].num_bytes for entry in chosen), "B")
    errors = []
    for error, num_bytes in compare_weights(source, chosen):
        errors.append(error)
        ctx.progress.advance(num_bytes)
    return errors, sentence(len(chosen), len(converted.entries), ctx.config.verify.sample)


def measure_logits(ctx: StageContext, source: Checkpoint, converted: Checkpoint) -> tuple[LogitsError | None, str]:
    """The comparison, or None and the reason why it was left out."""
    from pipeline.verify.text import heldout_file, memory_needed

    if heldout_file(source.folder, ctx.config.verify.text) is None:
        return None, "Logits were not compared: the checkpoint has no heldout.txt; name a text as verify.text=FILE."
    windows = heldout_windows(ctx, source, ctx.config.verify.tokens)
    need = memory_needed(source.arch, sum(map(len, windows)))
    if need > available_memory() / 2:
        return None, (
            f"Logits were not compared: the float32 model and its log-probabilities take {need / 1e9:.1f} GB, more than "
            f"half of this machine's free memory."
        )
    _require_torch()
    from pipeline.verify.logits import compare_logits

    ctx.progress.start(2 * sum(len(window) for window in windows), "tokens")
    return compare_logits(source, converted, windows, ctx.progress.advance), ""


def measure_sensitivity(
    ctx: StageContext, source: Checkpoint, converted: Checkpoint, errors: list[TensorError]
) -> list[Sensitivity]:
    """The KL of each layer and of each class alone, for those that changed; only where logits could be compared."""
    from pipeline.verify.damage import groups
    from pipeline.verify.logits import sensitivity

    found = groups(errors)
    windows = heldout_windows(ctx, source, ctx.config.verify.sensitivity_tokens)
    ctx.progress.start((len(found) + 1) * sum(map(len, windows)), "tokens")
    return sensitivity(source, converted, windows, found, ctx.progress.advance)


def heldout_windows(ctx: StageContext, source: Checkpoint, tokens: int) -> list[list[int]]:
    """Token ids of the held-out text."""
    from pipeline.verify.text import heldout_file, windows_of

    text = heldout_file(source.folder, ctx.config.verify.text)
    assert text is not None
    return windows_of(text, source.folder / "tokenizer.json", source.arch, tokens=tokens, window=ctx.config.verify.window)


def _require_torch() -> None:
    from pipeline.core.errors import MissingToolError

    if _version("torch") == "absent":
        raise MissingToolError("verify compares logits with torch, which is not installed: pip install 'r1-pipeline[torch]'.")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
