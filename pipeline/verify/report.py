"""The report of `verify`, as JSON and as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.verify.weights import TensorError

if TYPE_CHECKING:
    from pipeline.verify.logits import LogitsError

__all__ = ["as_json", "as_markdown", "class_rows", "lines"]

HEADER = ("class", "format", "tensors", "exact", "worst SQNR dB", "mean SQNR dB", "clipped", "worst tensor")


def class_rows(errors: Sequence[TensorError]) -> list[tuple[str, ...]]:
    """One row for each class and format, as text."""
    groups: dict[tuple[str, str], list[TensorError]] = {}
    for error in errors:
        groups.setdefault((error.kind, error.format), []).append(error)
    return [_row(kind, name, group) for (kind, name), group in sorted(groups.items())]


def lines(errors: Sequence[TensorError], logits: LogitsError | None, note: str) -> list[str]:
    """What the user sees: two small tables."""
    table = [HEADER, *class_rows(errors)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [*text, note if logits is None else _logits_line(logits)]


def as_json(
    errors: Sequence[TensorError], logits: LogitsError | None, note: str, failed: list[str]
) -> dict[str, Any]:
    """Every number."""
    return {
        "verdict": "failed" if failed else "passed",
        "failures": failed,
        "classes": [dict(zip(HEADER, row, strict=True)) for row in class_rows(errors)],
        "logits": None if logits is None else asdict(logits) | {"ppl_ratio": logits.ppl_ratio},
        "logits_note": note,
        "tensors": {error.name: {k: v for k, v in asdict(error).items() if k != "name"} for error in errors},
    }


def as_markdown(errors: Sequence[TensorError], logits: LogitsError | None, note: str, failed: list[str]) -> str:
    """The same for people."""
    parts = ["# Verification", "", "Failed." if failed else "Passed.", *(f"- {text}" for text in failed), ""]
    parts += ["## Weights against the source", "", *_markdown([HEADER, *class_rows(errors)]), ""]
    parts += ["## Logits on held-out text", "", note if logits is None else _logits_line(logits), ""]
    return "\n".join(parts)


def _row(kind: str, name: str, group: list[TensorError]) -> tuple[str, ...]:
    measured = sorted((error for error in group if error.sqnr_db is not None), key=lambda e: (e.rank, e.name))
    counts = (kind, name, str(len(group)), str(len(group) - len(measured)))
    if not measured:
        return (*counts, "-", "-", "-", "-")
    mean = sum(error.rank for error in measured) / len(measured)
    clipped = max(error.clipped for error in measured)
    return (*counts, f"{measured[0].rank:.2f}", f"{mean:.2f}", f"{clipped:.4%}", measured[0].name)


def _logits_line(logits: LogitsError) -> str:
    return (
        f"{logits.tokens} tokens: mean KL {logits.kl:.6f} nats, top-1 agreement {logits.top1:.2%}, "
        f"perplexity {logits.ppl_source:.4f} -> {logits.ppl_converted:.4f} ({logits.ppl_ratio:.4f}x)"
    )


def _markdown(rows: list[tuple[str, ...]]) -> list[str]:
    ruled = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return [f"| {' | '.join(row)} |" for row in ruled]
