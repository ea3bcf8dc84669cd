"""`heatmap.svg`: layers by projections, the worst SQNR of each cell. Plain SVG text, the same bytes for the same numbers.

The colour says how a cell stands to the limits of its tensors' formats: red below verify.min_sqnr_db, amber below
verify.alarm_sqnr_db, otherwise blue, the deeper the higher the SQNR, so formats are told apart; grey is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from pipeline.verify.sample import projection
from pipeline.verify.weights import TensorError

__all__ = ["COLUMNS", "heatmap"]

COLUMNS = (
    "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj",
    "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj", "mlp.gate", "eh_proj",
)  # fmt: skip
"""The order of a layer; columns that nothing falls into are left out, others come last."""
CELL, ROW, LEFT, TOP, LEGEND = 58, 18, 46, 116, 76
RED, AMBER, GREY = "#d73027", "#fdae61", "#e8e8e8"
LIGHT, DEEP = (222, 235, 247), (33, 113, 181)
FROM_DB, TO_DB = 15.0, 60.0
"""Where blue is lightest and deepest."""
Cells = dict[tuple[int, str], TensorError]


def heatmap(errors: Sequence[TensorError], limits: Mapping[str, float], warn: Mapping[str, float]) -> str:
    """The whole picture."""
    cells = _cells(errors)
    rows, columns = sorted({layer for layer, _ in cells}), _columns({column for _, column in cells})
    width = max(LEFT + CELL * len(columns) + 90, 640)
    height = TOP + ROW * len(rows) + LEGEND
    body = [*_heads(columns), *(text for row, layer in enumerate(rows) for text in _row(row, layer, columns, cells, limits, warn))]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="DejaVu Sans, Arial, sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="8" y="20" font-size="14">Worst SQNR of each layer and projection against the source, dB</text>',
        *body, *_legend(TOP + ROW * len(rows) + 18), "</svg>", "",
    ])  # fmt: skip


def _cells(errors: Sequence[TensorError]) -> Cells:
    """The worst tensor of each cell; vectors (norms, the router's bias) have none."""
    worst: Cells = {}
    for error in errors:
        column = projection(error.name).removesuffix(".weight")
        if error.layer is None or error.kind in ("norm", "other") or column.endswith(("norm", "bias")):
            continue
        key = (error.layer, column)
        if key not in worst or (error.rank, error.name) < (worst[key].rank, worst[key].name):
            worst[key] = error
    return worst


def _columns(found: set[str]) -> list[str]:
    return [column for column in COLUMNS if column in found] + sorted(found - set(COLUMNS))


def _heads(columns: list[str]) -> Iterator[str]:
    for number, column in enumerate(columns):
        x, y = LEFT + CELL * number + CELL // 2 + 3, TOP - 6
        yield f'<text x="{x}" y="{y}" transform="rotate(-40 {x} {y})">{escape(_short(column))}</text>'


def _short(column: str) -> str:
    """mlp.experts.*.gate_proj -> experts gate"""
    words = column.replace("self_attn.", "").replace("mlp.gate", "router" if column == "mlp.gate" else "mlp.gate")
    words = words.replace("mlp.shared_experts.", "shared ").replace("mlp.experts.*.", "experts ").replace("mlp.", "dense ")
    return words.replace("_proj_with_mqa", "").replace("_proj", "")


def _row(
    row: int, layer: int, columns: list[str], cells: Cells, limits: Mapping[str, float], warn: Mapping[str, float]
) -> Iterator[str]:
    y = TOP + ROW * row
    yield f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{layer}</text>'
    for number, column in enumerate(columns):
        if (error := cells.get((layer, column))) is not None:
            yield from _cell(LEFT + CELL * number, y, error, limits, warn)


def _cell(x: int, y: int, error: TensorError, limits: Mapping[str, float], warn: Mapping[str, float]) -> Iterator[str]:
    fill, ink = _colours(error, limits, warn)
    title = escape(f"{error.name}: {error.format}, {'exact' if error.sqnr_db is None else f'{error.sqnr_db:.2f} dB'}")
    label = "exact" if error.sqnr_db is None else "broken" if error.relative_l2 is None else f"{error.sqnr_db:.1f}"
    yield f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{ROW - 1}" fill="{fill}"><title>{title}</title></rect>'
    yield f'<text x="{x + CELL // 2}" y="{y + 13}" text-anchor="middle" fill="{ink}">{label}</text>'


def _colours(error: TensorError, limits: Mapping[str, float], warn: Mapping[str, float]) -> tuple[str, str]:
    """Of the cell, and of the figure in it."""
    if error.sqnr_db is None:
        return GREY, "#777777"
    if error.sqnr_db < limits.get(error.limit_key, float("-inf")):
        return RED, "#ffffff"
    if error.sqnr_db < warn.get(error.limit_key, float("-inf")):
        return AMBER, "#000000"
    return _blue(error.sqnr_db)


def _blue(decibel: float) -> tuple[str, str]:
    share = min(max((decibel - FROM_DB) / (TO_DB - FROM_DB), 0.0), 1.0)
    mixed = [round(a + (b - a) * share) for a, b in zip(LIGHT, DEEP, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed), "#ffffff" if share > 0.55 else "#000000"


def _legend(y: int) -> Iterator[str]:
    samples = [
        (RED, "#ffffff", "below", "below verify.min_sqnr_db"), (AMBER, "#000000", "alarm", "below verify.alarm_sqnr_db"),
        (*_blue(20.0), "20", "as usual; deeper is better"), (GREY, "#777777", "exact", "the source's own values"),
    ]  # fmt: skip
    for number, (fill, ink, label, text) in enumerate(samples):
        x, top = 8 + 310 * (number % 2), y + 24 * (number // 2)
        yield f'<rect x="{x}" y="{top}" width="{CELL - 1}" height="{ROW - 1}" fill="{fill}"/>'
        yield f'<text x="{x + CELL // 2}" y="{top + 13}" text-anchor="middle" fill="{ink}">{label}</text>'
        yield f'<text x="{x + CELL + 6}" y="{top + 13}">{text}</text>'
