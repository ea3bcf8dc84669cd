"""Verify: the gate between a converted checkpoint and an engine.

It decodes every tensor as a runtime will and compares it with the source, then lets the reference model predict
held-out text with both sets of weights. Benchmarks are too noisy for a gate; these numbers are not.
"""

from __future__ import annotations

from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.stage import Need, Stage, StageContext

if TYPE_CHECKING:
    from pipeline.checkpoint.source import Checkpoint
    from pipeline.config.schema import Config
    from pipeline.verify.logits import LogitsError
    from pipeline.verify.weights import TensorError

__all__ = ["STAGE", "run"]


def toolchain(config: Config) -> dict[str, str]:
    """Libraries that shape the numbers, and the content of a text given by path."""
    versions = {name: _version(name) for name in ("numpy", "ml_dtypes", "tokenizers", "torch")}
    if config.verify.text and Path(config.verify.text).is_file():
        versions["verify.text"] = sha256(Path(config.verify.text).read_bytes()).hexdigest()
    return versions


STAGE = Stage(
    name="verify",
    version=1,
    needs=(Need(stage="convert"),),
    config=("verify",),
    reads_checkpoint="all",
    code=(
        "pipeline/stages/verify.py", "pipeline/verify", "pipeline/checkpoint", "pipeline/formats", "pipeline/models",
        "plugins/topk_router/reference.py",
    ),
    toolchain=toolchain,
    run="pipeline.stages.verify:run",
)


def run(ctx: StageContext) -> None:
    """Measure, write the report, then decide."""
    from pipeline.checkpoint.source import Checkpoint
    from pipeline.core.errors import GateError
    from pipeline.core.jsonio import write_atomic, write_json
    from pipeline.verify.gate import failures
    from pipeline.verify.report import as_json, as_markdown, lines
    from pipeline.verify.weights import broken_scales

    assert ctx.checkpoint is not None
    source, converted = Checkpoint.open(ctx.checkpoint), Checkpoint.open(ctx.inputs["convert"])
    errors = measure_weights(ctx, source, converted)
    logits, note = measure_logits(ctx, source, converted)
    failed = failures(ctx.config.verify, errors, broken_scales(converted), logits)
    write_json(ctx.out / "report.json", as_json(errors, logits, note, failed))
    write_atomic(ctx.out / "report.md", as_markdown(errors, logits, note, failed).encode())
    for line in lines(errors, logits, note):
        ctx.progress.note(line)
    if failed:
        raise GateError(" ".join([*failed, f"The full report is {ctx.out / 'report.md'}."]))


def measure_weights(ctx: StageContext, source: Checkpoint, converted: Checkpoint) -> list[TensorError]:
    """Errors of every parameter, with progress in bytes."""
    from pipeline.verify.weights import compare_weights

    ctx.progress.start(sum(entry.num_bytes for side in (source, converted) for entry in side.entries.values()), "B")
    errors = []
    for error, num_bytes in compare_weights(source, converted):
        errors.append(error)
        ctx.progress.advance(num_bytes)
    return errors


def measure_logits(ctx: StageContext, source: Checkpoint, converted: Checkpoint) -> tuple[LogitsError | None, str]:
    """The comparison, or None and the reason why it was left out."""
    from pipeline.verify.text import available_memory, heldout_file, memory_needed, windows_of

    config = ctx.config.verify
    text = heldout_file(source.folder, config.text)
    if text is None:
        return None, "Logits were not compared: the checkpoint has no heldout.txt; name a text as verify.text=FILE."
    tokenizer = source.folder / "tokenizer.json"
    windows = windows_of(text, tokenizer, source.arch, tokens=config.tokens, window=config.window)
    need = memory_needed(source.arch, sum(map(len, windows)))
    if need > available_memory() / 2:
        return None, (
            f"Logits were not compared: the float32 model and its log-probabilities take {need / 1e9:.1f} GB, more than "
            f"half of this machine's free memory; weights were compared in full."
        )
    _require_torch()
    from pipeline.verify.logits import compare_logits

    ctx.progress.start(2 * sum(len(window) for window in windows), "tokens")
    return compare_logits(source, converted, windows, ctx.progress.advance), ""


def _require_torch() -> None:
    from pipeline.core.errors import MissingToolError

    if _version("torch") == "absent":
        raise MissingToolError("verify compares logits with torch, which is not installed: pip install 'r1-pipeline[torch]'.")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
