"""The Pareto front as SVG: a user's tokens/s against the hardware's tokens/s/GPU. The same numbers give the same text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Mark", "Series", "front_svg"]

WIDTH, HEIGHT = 920, 460
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 44, 96
COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7f6fb0", "#7f7f7f")
TICKS = 6
Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """One configuration."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Series:
    """A front, or published points (`joined` is then false)."""

    name: str
    marks: Sequence[Mark]
    joined: bool = True


def front_svg(series: Sequence[Series], best: Mark, interval: tuple[float, float], title: str) -> str:
    """`interval` is that of `best.x`; throughput follows it, so its whisker is a ray through the origin."""
    shown = [item for item in series if item.marks]
    everything = [mark for item in shown for mark in item.marks] + [best]
    tops = max(mark.x for mark in everything), max(mark.y for mark in everything)
    limits = _end(tops[0]), _end(tops[1])
    body = [line for number, item in enumerate(shown) for line in _series(item, COLOURS[number % len(COLOURS)], limits)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="10" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        *_axes(limits, tops), *body, *_best(best, interval, limits), *_legend([item.name for item in shown]), "</svg>\n",
    ])  # fmt: skip


def _step(top: float) -> float:
    """A round number that divides an axis up to `top` into about six."""
    power = 10 ** math.floor(math.log10(top / TICKS))
    return power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= top / TICKS)


def _end(top: float) -> float:
    """Where an axis ends: the first tick beyond `top`."""
    return _step(top) * math.ceil(top * 1.03 / _step(top))


def _place(x: float, y: float, limits: Place) -> Place:
    across = LEFT + x / limits[0] * (WIDTH - LEFT - RIGHT)
    return across, HEIGHT - BOTTOM - y / limits[1] * (HEIGHT - TOP - BOTTOM)


def _axes(limits: Place, tops: Place) -> Iterator[str]:
    for tick in range(round(limits[1] / _step(tops[1])) + 1):
        left, up = _place(0, tick * _step(tops[1]), limits)
        yield f'<line x1="{left:.1f}" y1="{up:.1f}" x2="{WIDTH - RIGHT}" y2="{up:.1f}" stroke="#e3e3e3"/>'
        yield f'<text x="{left - 8:.1f}" y="{up + 4:.1f}" text-anchor="end">{tick * _step(tops[1]):,.0f}</text>'
    for tick in range(round(limits[0] / _step(tops[0])) + 1):
        across, floor = _place(tick * _step(tops[0]), 0, limits)
        yield f'<text x="{across:.1f}" y="{floor + 18:.1f}" text-anchor="middle">{tick * _step(tops[0]):,.0f}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - BOTTOM + 40}" text-anchor="middle">tokens/s/user</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">tokens/s/GPU</text>'


def _series(item: Series, colour: str, limits: Place) -> Iterator[str]:
    places = [(*_place(mark.x, mark.y, limits), mark) for mark in item.marks]
    if item.joined and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    for x, y, mark in places:
        text = escape(f"{mark.label}: {mark.x:.1f} tokens/s/user, {mark.y:,.0f} tokens/s/GPU")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{text}</title></circle>'


def _best(best: Mark, interval: Place, limits: Place) -> Iterator[str]:
    x, y = _place(best.x, best.y, limits)
    ends = [_place(min(side, limits[0]), min(best.y * side / best.x, limits[1]), limits) for side in interval]
    (x1, y1), (x2, y2) = ends
    yield f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#c00000" stroke-width="2"/>'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="#c00000" stroke-width="2.5"/>'
    anchor, shift = ("end", -12) if x > WIDTH * 0.6 else ("start", 12)
    yield (
        f'<text x="{x + shift:.1f}" y="{y - 10:.1f}" text-anchor="{anchor}" font-weight="bold" fill="#c00000">'
        f"{escape(best.label)}</text>"
    )


def _legend(names: Sequence[str]) -> Iterator[str]:
    column = (WIDTH - 40) // 3
    for number, name in enumerate([*names, "recommended, with its 80 % interval"]):
        colour = COLOURS[number % len(COLOURS)] if number < len(names) else "#c00000"
        x, y = 20 + number % 3 * column, HEIGHT - 36 + number // 3 * 18
        yield f'<circle cx="{x + 6}" cy="{y - 4}" r="5" fill="{colour}"/><text x="{x + 18}" y="{y}">{escape(name)}</text>'
