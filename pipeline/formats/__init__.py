"""Weight formats, by the name that the configuration uses. A new format is one file and one entry here."""

from __future__ import annotations

from pipeline.core.errors import ConfigError
from pipeline.formats.base import Format, Output
from pipeline.formats.bf16 import BF16_FORMAT
from pipeline.formats.fp8 import FP8
from pipeline.formats.fp8_block import FP8_BLOCK
from pipeline.formats.nvfp4 import NVFP4

__all__ = ["FORMATS", "Format", "Output", "get_format"]

FORMATS: dict[str, Format] = {item.name: item for item in (BF16_FORMAT, FP8, FP8_BLOCK, NVFP4)}


def get_format(name: str) -> Format:
    """The format of that name."""
    if name not in FORMATS:
        raise ConfigError(f"{name!r} is not a weight format: choose one of {', '.join(FORMATS)}.")
    return FORMATS[name]
