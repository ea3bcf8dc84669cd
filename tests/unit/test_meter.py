"""What a running stage says of itself."""

from __future__ import annotations

import io

import pytest

from pipeline.core.events import PlainConsole
from pipeline.core.meter import Meter
from pipeline.core.terminal import RichConsole, Terminal


def meter(total: int, unit: str, done: int, seconds: float) -> Meter:
    now = [100.0]
    found = Meter(total, unit, lambda: now[0])
    now[0] += seconds
    found.advance(done)
    return found


@pytest.mark.parametrize(
    ("total", "unit", "done", "seconds", "text"),
    [
        (688_586_727_424, "B", 255_777_089_146, 250.0, "37 % of 688.6 GB, 1.02 GB/s, 7 min left"),
        (14_000_000, "B", 7_000_000, 1.0, "50 % of 14.0 MB, 7.00 MB/s, 1 s left"),
        (900, "B", 0, 1.0, "0 % of 900 B"),
        (4088, "tokens", 1022, 10.0, "25 % of 4088 tokens, 102 tokens/s, 30 s left"),
        (10**12, "B", 10**9, 10.0, "0 % of 1000.0 GB, 100.0 MB/s, 2.8 h left"),
        (5, "B", 5, 1.0, "100 % of 5 B, 5 B/s, 0 s left"),
        (0, "B", 0, 1.0, "100 % of 0 B"),
    ],
)
def test_share_rate_and_time_left(total: int, unit: str, done: int, seconds: float, text: str) -> None:
    assert meter(total, unit, done, seconds).text() == text


def test_lines_and_bars_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setenv("TERM", "xterm")  # a dumb one, as a CI may have, gets no bars
    stream = io.StringIO()
    progress = PlainConsole(stream).stage_started("convert", "nothing is there yet")
    progress.start(4_000_000_000, "B")
    now[0] = 11.0
    progress.advance(1_100_000_000)
    assert stream.getvalue().splitlines()[1].startswith("[convert] 27 % of 4.00 GB, ")
    screen = io.StringIO()
    console = RichConsole(Terminal(file=screen, force_terminal=True, width=120))
    bar = console.stage_started("convert", "again")
    bar.start(4_000_000_000, "B")
    bar.advance(2_000_000_000)
    console.stage_ended("convert", "failed")
    assert "50 % of 4.00 GB" in screen.getvalue()
