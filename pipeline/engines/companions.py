"""What an engine built here takes over from the checkpoint beside weights: the tokenizer's files, and what ends an answer."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.core.jsonio import read_json
from pipeline.models.arch import Arch

__all__ = ["copy_companions", "eos_token_ids"]

COMPANIONS = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def copy_companions(source: Path, out: Path) -> None:
    """Those of the files that the checkpoint has."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def eos_token_ids(arch: Arch, source: Path) -> list[int]:
    """Those of generation_config.json, else those of config.json."""
    file = source / "generation_config.json"
    found = (read_json(file).get("eos_token_id") if file.is_file() else None) or arch.eos_token_id
    return [found] if isinstance(found, int) else list(found or [])
