"""Memory of a rank as a stacked bar, in SVG: weights, copies, engine, cache and what stays free, against what the GPU has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from pipeline.planner.memory import GIB, RankMemory, memory_of
from pipeline.planner.setup import Setup

__all__ = ["Bar", "memory_svg", "rank_bars"]

COLOURS = {
    "routed experts": "#1f4e79", "attention": "#2e75b6", "shared experts": "#5b9bd5", "dense layers": "#9dc3e6",
    "embedding, head": "#bdd7ee", "MTP layer": "#7f6fb0", "other weights": "#d9e2ef", "kv_b (absorbed)": "#a9d18e",
    "runtime": "#c55a11", "activations": "#ed7d31", "CUDA graphs": "#f4b183", "MoE buffers": "#ffc000",
    "NCCL, all-reduce": "#bf9000",
    "KV cache": "#548235", "left free": "#f2f2f2"
}  # fmt: skip
NAMES = {
    "routed_experts": "routed experts", "attention": "attention", "o_proj": "attention", "shared_experts": "shared experts",
    "dense_mlp": "dense layers", "embed": "embedding, head", "lm_head": "embedding, head", "mtp": "MTP layer",
    "NCCL rings": "NCCL, all-reduce", "NCCL NVLink SHARP": "NCCL, all-reduce", "all-reduce": "NCCL, all-reduce",
    "MoE all-to-all": "MoE buffers", "DEEPGEMM workspace": "MoE buffers", "routed_experts (scales)": "routed experts",
}  # fmt: skip
"""Component -> the part of the picture that it belongs to."""
WIDTH, RIGHT, BAR, GAP, TOP, LINE, LETTER = 920, 90, 34, 16, 48, 20, 8
LEGEND_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """One rank."""

    label: str
    parts: tuple[tuple[str, int], ...]
    """Name (a key of `COLOURS`) and bytes, in drawing order."""
    limit: int
    """Bytes of the GPU."""


def rank_bars(setup: Setup, label: str | None = None) -> list[Bar]:
    """One bar a pipeline stage; the ranks of a stage are alike."""
    stages = memory_of(setup)
    label = label or str(setup.layout)
    names = [label] if len(stages) == 1 else [f"{label}, stage {index}" for index in range(len(stages))]
    return [Bar(name, _parts(rank), rank.visible) for name, rank in zip(names, stages, strict=True)]


def memory_svg(bars: Sequence[Bar], title: str) -> str:
    """The picture, 920 pixels wide; the same input gives the same text."""
    used = [name for name in COLOURS if any(name == part for bar in bars for part, _ in bar.parts)]
    left = 20 + LETTER * max(len(bar.label) for bar in bars)
    scale = (WIDTH - left - RIGHT) / max(max(bar.limit, sum(size for _, size in bar.parts)) for bar in bars)
    legend_top = TOP + len(bars) * (BAR + GAP) + 24
    height = legend_top + -(-len(used) // LEGEND_COLUMNS) * LINE + 10
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        *[line for index, bar in enumerate(bars) for line in _bar(bar, left, TOP + index * (BAR + GAP), scale)],
        *_legend(used, legend_top),
        "</svg>\n",
    ])  # fmt: skip


def _parts(rank: RankMemory) -> tuple[tuple[str, int], ...]:
    sizes: dict[str, int] = {}
    for name, size in (*rank.weights.items(), *rank.copies.items(), *rank.overhead.items()):
        known = NAMES.get(name, name)
        part = known if known in COLOURS else "other weights"
        sizes[part] = sizes.get(part, 0) + size
    sizes["KV cache"] = rank.kv_cache
    sizes["left free"] = max(0, rank.visible - sum(sizes.values()))
    return tuple((name, sizes[name]) for name in COLOURS if sizes.get(name))


def _bar(bar: Bar, left: int, top: int, scale: float) -> Iterable[str]:
    middle, x = top + BAR // 2 + 4, float(left)
    yield f'<text x="{left - 8}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>'
    for name, size in bar.parts:
        width = size * scale
        yield (
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[name]}" stroke="#ffffff" '
            f'stroke-width="0.5"><title>{escape(name)}: {size / GIB:.2f} GiB</title></rect>'
        )
        if width > 34:
            yield f'<text x="{x + width / 2:.1f}" y="{middle}" text-anchor="middle" fill="{_ink(name)}">{size / GIB:.1f}</text>'
        x += width
    edge = left + bar.limit * scale
    yield f'<line x1="{edge:.1f}" y1="{top - 5}" x2="{edge:.1f}" y2="{top + BAR + 5}" stroke="#c00000" stroke-width="2"/>'
    yield f'<text x="{max(edge, x) + 6:.1f}" y="{middle}">{bar.limit / GIB:.1f} GiB</text>'


def _legend(names: Sequence[str], top: int) -> Iterable[str]:
    column = (WIDTH - 40) // LEGEND_COLUMNS
    for index, name in enumerate(names):
        x, y = 20 + index % LEGEND_COLUMNS * column, top + index // LEGEND_COLUMNS * LINE
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[name]}" stroke="#888888" stroke-width="0.5"/>'
        yield f'<text x="{x + 18}" y="{y + 10}">{escape(name)}</text>'


def _ink(name: str) -> str:
    """Black or white, whichever reads better on the part's colour."""
    red, green, blue = (int(COLOURS[name][i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
