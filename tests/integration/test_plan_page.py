"""The plan's page in a real browser: headless Chromium renders it, and its picture is looked at."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.load import load
from pipeline.planner.page import page
from pipeline.planner.plan import make_plan
from pipeline.planner.search.choice import pictured
from tests._utils.png import read_png

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync", "--disable-quic",
    "--disable-background-networking", "--disable-component-update", "--force-device-scale-factor=1",
    "--disable-dev-shm-usage",
)  # fmt: skip
RED, BLUE, GREEN = (0xC0, 0, 0), (0x1F, 0x4E, 0x79), (0x54, 0x82, 0x35)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load(["+hw=b200", "model=deepseek_r1", "slo.tpot_ms=50"])
    plan = make_plan(config, dict(config.model.hf))
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page(plan.report, front=pictured(plan.report), memory=plan.picture), encoding="utf-8")
    return file


def shot(html: Path, width: int, height: int) -> np.ndarray:
    """A screenshot [height, width, 3]."""
    picture = html.with_name(f"{width}.png")
    options = (f"--screenshot={picture}", f"--window-size={width},{height}", f"--user-data-dir={picture}.profile")
    done = subprocess.run([CHROMIUM, *QUIET, *options, html.as_uri()], capture_output=True, timeout=300, check=False)
    assert picture.is_file(), done.stderr.decode()[-2000:]
    return read_png(picture)


def count(pixels: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((pixels == colour).all(axis=-1).sum())


def test_a_desktop_shows_the_fronts_the_recommended_point_and_the_memory(html):
    pixels = shot(html, 1000, 4200)
    ink = (pixels < 200).any(axis=-1)
    assert ink[:120].any(), "no heading"
    assert count(pixels[:700], RED) > 100, "the recommended point is not drawn"
    assert count(pixels[:700], BLUE) > 300, "the front is not drawn"
    assert count(pixels[700:], GREEN) > 2000, "the cache's share of the memory bar is not drawn"
    assert not ink[:, -8:].any(), "something runs off the right edge"


def test_a_narrow_window_scrolls_only_down(html):
    pixels = shot(html, 560, 1600)
    assert count(pixels[:600], RED) > 20
    assert not (pixels[:, -8:] < 200).any(), "something runs off the right edge"
