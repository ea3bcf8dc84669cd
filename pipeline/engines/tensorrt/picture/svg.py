"""The picture as SVG: one file, no scripts, no fonts; the full name of a box, and its layers, show where the pointer rests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from pipeline.engines.tensorrt.picture.blocks import Block, Picture
from pipeline.engines.tensorrt.picture.layout import Place, spread

__all__ = ["svg", "text_of"]

Point = tuple[float, float]
LINE, LETTER, SMALL = 15, 7.2, 5.9
"""Height of a line of text, and width of a letter of its two sizes, in pixels."""
BETWEEN, MARGIN, HEAD = 44, 24, 26
"""Pixels between rows, around a cluster, and of its title."""
COLOURS = {
    "matmul": "#dce9f7", "attention": "#cfe3c4", "cache update": "#e4f0dc", "rope": "#e4f0dc", "top-k": "#fbe3c8",
    "collective": "#f6cfcf", "plugin": "#d9cdea", "moe": "#d9cdea", "quantise": "#fff2c4", "running sum": "#fbe3c8",
}  # fmt: skip
"""Word of a block's first major layer -> its colour; white for all others."""
OPEN, CLOSED = "#f6f7f9", "#dfe5ee"
WEIGHTS = ("model.", "lm_head.")
"""Beginnings of the names of weights that are inputs."""
OUT = "out of the cluster: "


@dataclass(slots=True)
class Box:
    """A block with its text."""

    block: Block
    texts: list[str]
    """The title first."""
    x: float = 0.0
    y: float = 0.0
    """Middle, and upper edge."""

    @property
    def width(self) -> float:
        """Pixels."""
        return max([LETTER * len(self.texts[0]), *(SMALL * len(text) for text in self.texts[1:])]) + 20

    @property
    def height(self) -> float:
        """Pixels."""
        return LINE * len(self.texts) + 10


def svg(drawn: Picture, title: str) -> str:
    """The picture; the same input gives the same text."""
    boxes = {block.name: Box(block, text_of(block)) for block in drawn.blocks}
    paths: dict[tuple[str, str], list[Point]] = {}
    parts: list[str] = []
    top, widest = 2.0 * HEAD, LETTER * len(title) / 2
    sent = {source for block in drawn.blocks for source in block.reads if boxes[source].block.cluster != block.cluster}
    for cluster in drawn.clusters:
        inside = [block for block in drawn.blocks if block.cluster == cluster]
        framed = len(inside) > 1
        half, bottom = _arrange(inside, sent, boxes, paths, top + (HEAD + 4 if framed else 0))
        if framed:
            parts.append(_frame(cluster, half, top, bottom))
        top, widest = bottom + (BETWEEN / 2 if framed else 0), max(widest, half)
    parts += [_line(boxes, paths, source, block) for block in drawn.blocks for source in block.reads]
    parts += [text for box in boxes.values() for text in _drawn(box)]
    width, height = 2 * (widest + MARGIN), top
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-width / 2:.0f} 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">',
        f'<rect x="{-width / 2:.0f}" width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        f'<text x="0" y="{HEAD}" text-anchor="middle" font-size="15" font-weight="bold">{escape(title)}</text>',
        *parts,
        "</svg>", "",
    ])  # fmt: skip


def text_of(block: Block) -> list[str]:
    """What is written in a block, the title first."""
    majors = [f"{count} {word}" if count > 1 else word for word, count in block.majors.items()]
    texts = _closed(block, majors) if block.name == block.cluster else _opened(block, majors)
    weights = [name.rsplit(".", 2)[-2:] for name in block.named if name.startswith(WEIGHTS)]
    told = f"W {'.'.join(weights[0])}" + (f" and {len(weights) - 1} more inputs" if len(weights) > 1 else "") if weights else ""
    inputs = _wrapped([name for name in block.named if not name.startswith(WEIGHTS)])
    outputs = [f"out: {text}" for text in _wrapped(block.outputs)]
    return [*texts, *filter(None, [told]), *(f"in: {_open(text)}" for text in inputs), *outputs]


def _opened(block: Block, majors: list[str]) -> Iterator[str]:
    yield (f"{block.part}: " if block.part else "") + ", ".join(majors)
    if block.weights:
        yield "W " + _open(block.weights[0]) + (f" and {len(block.weights) - 1} more" if len(block.weights) > 1 else "")
    if sum(block.minors.values()) > 1:
        minors = [f"{count} {word}" if count > 1 else word for word, count in block.minors.most_common(3)]
        yield "with " + ", ".join(minors) + (" …" if len(block.minors) > 3 else "")


def _closed(block: Block, majors: list[str]) -> Iterator[str]:
    yield block.cluster
    yield from (", ".join(majors[at : at + 4]) for at in range(0, len(majors), 4))
    if block.weights:
        yield f"{len(block.weights)} weights, the largest {_open(block.weights[0])}"
    yield "1 layer" if len(block.layers) == 1 else f"{len(block.layers)} layers"


def _wrapped(names: Sequence[str]) -> Iterator[str]:
    """Few names a line, and few lines."""
    for at in range(0, min(len(names), 9), 3):
        more = f" and {len(names) - 9} others" if at == 6 and len(names) > 9 else ""
        yield ", ".join(names[at : at + 3]) + more


def _open(text: str) -> str:
    """Open dimensions as people write them."""
    return text.replace("-1", "?")


def _arrange(
    inside: Sequence[Block], sent: set[str], boxes: Mapping[str, Box], paths: dict[tuple[str, str], list[Point]], top: float
) -> tuple[float, float]:
    """Place the boxes of one cluster, and the ways of lines through it; half of its width, and its lower edge."""
    names = [block.name for block in inside]
    reads = {block.name: list(block.reads) for block in inside} | {f"{OUT}{name}": [name] for name in names if name in sent}
    places, passages = spread(names, reads, {name: boxes[name].width for name in names})
    tops, heights = {}, {}
    for row in range(-1 if _used(places, -1) else 0, max(place.row for place in places.values()) + 1):
        heights[row] = max((boxes[name].height for name in names if places[name].row == row), default=1)
        tops[row], top = top, top + heights[row] + (BETWEEN if heights[row] > 1 else LINE)
    reach = [edge for place in _all(places, passages) for edge in (place.x - place.width / 2, place.x + place.width / 2)]
    middle = (min(reach) + max(reach)) / 2
    for name in names:
        boxes[name].x, boxes[name].y = places[name].x - middle, tops[places[name].row]
    for (source, name), between in passages.items():
        ends = [places[source]] if source not in names else [], [places[name]] if name not in names else []
        way = [*ends[0], *between, *ends[1]]
        paths[source, name] = [(place.x - middle, tops[place.row] + down) for place in way for down in (0, heights[place.row])]
    return (max(reach) - min(reach)) / 2 + MARGIN, top


def _used(places: Mapping[str, Place], row: int) -> bool:
    return any(place.row == row for place in places.values())


def _all(places: Mapping[str, Place], passages: Mapping[tuple[str, str], Sequence[Place]]) -> Iterator[Place]:
    yield from places.values()
    for line in passages.values():
        yield from line


def _frame(cluster: str, half: float, top: float, bottom: float) -> str:
    return (
        f'<rect x="{-half:.1f}" y="{top:.1f}" width="{2 * half:.1f}" height="{bottom - top:.1f}" rx="8" fill="{OPEN}" '
        f'stroke="#c3cad5"/><text x="{-half + 12:.1f}" y="{top + 18:.1f}" font-weight="bold" fill="#445">{escape(cluster)}</text>'
    )


def _line(boxes: Mapping[str, Box], paths: Mapping[tuple[str, str], list[Point]], source: str, block: Block) -> str:
    """From the lower edge of one box to the upper edge of another, through its passages, with the tensor's type and shape."""
    start, end = boxes[source], boxes[block.name]
    leaving = paths.get((source, f"{OUT}{source}"), []) if start.block.cluster != block.cluster else []
    points = [(start.x, start.y + start.height), *leaving, *paths[source, block.name], (end.x, end.y - 2)]
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x, y), (to_x, to_y) in pairwise(points):
        bend = (to_y - y) / 2
        text += f"C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}"
    told = escape(f"{block.reads[source]}: {source} to {block.name}")
    return f'<path d="{text}" fill="none" stroke="#8a94a6" marker-end="url(#end)"><title>{told}</title></path>'


def _drawn(box: Box) -> Iterator[str]:
    """The box, its texts, and below it what it hands on."""
    block, left = box.block, box.x - box.width / 2
    colour = CLOSED if block.name == block.cluster else COLOURS.get(next(iter(block.majors)), "white")
    told = "\n".join([block.name, *(layer.text().rstrip() for layer in block.layers[:60])])
    yield (
        f'<g><title>{escape(told)}</title><rect x="{left:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="5" fill="{colour}" stroke="#7d8798"/>'
    )
    yield f'<text x="{box.x:.1f}" y="{box.y + 16:.1f}" text-anchor="middle" font-weight="bold">{escape(box.texts[0])}</text>'
    for number, text in enumerate(box.texts[1:], start=1):
        y = box.y + 16 + LINE * number
        yield f'<text x="{box.x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="10" fill="#445">{escape(text)}</text>'
    below = box.y + box.height + 11
    yield f'<text x="{box.x + 5:.1f}" y="{below:.1f}" font-size="9" fill="#567">{escape(_open(block.gives))}</text></g>'
