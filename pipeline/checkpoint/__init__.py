"""Checkpoints on disk, without torch: reading, writing, and what each tensor is.

Names are looked up when they are used: who only asks for a digest (every command does) does not pay for numpy.
"""

from importlib import import_module
from typing import Any

__all__ = ["Checkpoint", "Entry", "ShardWriter", "dequantized"]

_HOMES = {"Checkpoint": "source", "Entry": "source", "ShardWriter": "writer", "dequantized": "source"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
