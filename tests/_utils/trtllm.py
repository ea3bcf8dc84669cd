"""What tests of engine=trtllm share: NVIDIA's published recipes as arguments, and a progress that is a list of its notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

__all__ = ["RECIPES", "Notes"]

FOLDER = Path(__file__).parents[1] / "data" / "recipes"
RECIPES: dict[str, dict[str, Any]] = {
    file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.yaml"))
}


class Notes(list):
    """A `Progress`."""

    start = advance = note = list.append
