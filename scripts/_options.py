"""What the options of several scripts share."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["result_file"]


def result_file(name: str) -> Path:
    """A file to write a result to, as argparse's `type`: refused before anything is measured where its folder is not there."""
    file = Path(name)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{file.parent} is no folder: make it first, or name another file")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder: name a file in it")
    return file
