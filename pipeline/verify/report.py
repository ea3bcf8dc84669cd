"""The report of `verify`: as JSON, as Markdown tables, and the few lines that are shown at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.verify.damage import Damage, by_layer, by_projection
from pipeline.verify.weights import TensorError

if TYPE_CHECKING:
    from pipeline.verify.logits import LogitsError, Sensitivity

__all__ = ["Report", "class_rows"]

HEADER = ("class", "format", "tensors", "exact", "worst SQNR dB", "mean SQNR dB", "clipped", "worst tensor")
DAMAGE_HEADER = ("most damaged", "SQNR dB", "relative L2", "worst tensor")
SENSITIVITY_HEADER = ("converted alone", "tensors", "KL, nats", "top-1")
MOST_LAYERS = 12
"""Layers that the Markdown names; the JSON has all."""
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was measured, and the verdict."""

    errors: Sequence[TensorError]
    compared: str
    """Which parameters: a sentence."""
    failed: Sequence[str] = ()
    """Why it must not be built into an engine."""
    damage: Sequence[str] = ()
    """Those of `failed` that no other precision would mend."""
    alarms: Sequence[str] = ()
    logits: LogitsError | None = None
    note: str = ""
    """Why there are no logits."""
    sensitivity: Sequence[Sensitivity] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """passed or failed"""
        return "failed" if self.failed else "passed"

    def lines(self) -> list[str]:
        """What the user sees: small tables and sentences."""
        tables = [[HEADER, *class_rows(self.errors)]]
        if self.sensitivity:
            tables.append([SENSITIVITY_HEADER, *_sensitivity_rows(self.sensitivity)])
        text = [line for rows in tables for line in _aligned(rows)]
        return [*text, self.compared, *self.alarms, self.note if self.logits is None else _logits_line(self.logits)]

    def as_json(self) -> dict[str, Any]:
        """Every number."""
        logits = None if self.logits is None else asdict(self.logits) | {"ppl_ratio": self.logits.ppl_ratio}
        return {
            "verdict": self.verdict,
            "failures": list(self.failed),
            "damage": list(self.damage),
            "alarms": list(self.alarms),
            "compared": self.compared,
            "classes": [dict(zip(HEADER, row, strict=True)) for row in class_rows(self.errors)],
            "layers": [_damage_table(item) for item in by_layer(self.errors)],
            "projections": [_damage_table(item) for item in by_projection(self.errors)],
            "logits": logits,
            "logits_note": self.note,
            "sensitivity": [asdict(item) for item in self.sensitivity],
            "tensors": {error.name: {k: v for k, v in asdict(error).items() if k != "name"} for error in self.errors},
        }

    def as_markdown(self) -> str:
        """The same for people."""
        parts = ["# Verification", "", f"{self.verdict.capitalize()}.", *(f"- {text}" for text in self.failed), ""]
        parts += ["## Weights against the source", "", self.compared, *(f"- {text}" for text in self.alarms), ""]
        parts += [*_markdown([HEADER, *class_rows(self.errors)]), "", *self._damage()]
        if self.sensitivity:
            parts += ["## One group converted, the rest as in the source", ""]
            parts += [*_markdown([SENSITIVITY_HEADER, *_sensitivity_rows(self.sensitivity)]), ""]
        parts += ["## Logits on held-out text", "", self.note if self.logits is None else _logits_line(self.logits), ""]
        return "\n".join(parts)

    def _damage(self) -> list[str]:
        layers, columns = (
            [item for item in ranked if item.sqnr_db is not None] for ranked in (by_layer(self.errors), by_projection(self.errors))
        )
        if not layers and not columns:
            return []
        rows = [_damage_row(item) for item in (*columns, *layers[:MOST_LAYERS])]
        more = [f"{len(layers) - MOST_LAYERS} more layers are in report.json.", ""] if len(layers) > MOST_LAYERS else []
        return ["## Where it was lost", "", "![SQNR of each layer and projection](heatmap.svg)", "",
                *_markdown([DAMAGE_HEADER, *rows]), "", *more]  # fmt: skip


def class_rows(errors: Sequence[TensorError]) -> list[Row]:
    """One row for each class and format, as text."""
    groups: dict[tuple[str, str], list[TensorError]] = {}
    for error in errors:
        groups.setdefault((error.kind, error.format), []).append(error)
    return [_row(kind, name, group) for (kind, name), group in sorted(groups.items())]


def _row(kind: str, name: str, group: list[TensorError]) -> Row:
    measured = sorted((error for error in group if error.sqnr_db is not None), key=lambda e: (e.rank, e.name))
    counts = (kind, name, str(len(group)), str(len(group) - len(measured)))
    if not measured:
        return (*counts, "-", "-", "-", "-")
    mean = sum(error.rank for error in measured) / len(measured)
    clipped = max(error.clipped for error in measured)
    return (*counts, f"{measured[0].rank:.2f}", f"{mean:.2f}", f"{clipped:.4%}", measured[0].name)


def _damage_table(item: Damage) -> dict[str, Any]:
    return asdict(item) | {"sqnr_db": item.sqnr_db}


def _damage_row(item: Damage) -> Row:
    return item.name, f"{item.sqnr_db:.2f}", f"{item.relative**0.5:.4f}", item.worst


def _sensitivity_rows(found: Sequence[Sensitivity]) -> list[Row]:
    return [(item.group, str(item.tensors), f"{item.kl:.6f}", f"{item.top1:.2%}") for item in found]


def _logits_line(logits: LogitsError) -> str:
    return (
        f"{logits.tokens} tokens: mean KL {logits.kl:.6f} nats, top-1 agreement {logits.top1:.2%}, "
        f"perplexity {logits.ppl_source:.4f} -> {logits.ppl_converted:.4f} ({logits.ppl_ratio:.4f}x)"
    )


def _aligned(rows: list[Row]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown(rows: list[Row]) -> list[str]:
    ruled = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return [f"| {' | '.join(row)} |" for row in ruled]
