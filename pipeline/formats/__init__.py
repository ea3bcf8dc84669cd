"""Weight formats, by the name that the configuration uses. A new format is one file and one entry here."""

from __future__ import annotations

from pipeline.core.errors import ConfigError
from pipeline.formats.base import Format, Output
from pipeline.formats.bf16 import BF16_FORMAT
from pipeline.formats.fp8 import FP8
from pipeline.formats.fp8_block import FP8_BLOCK
from pipeline.formats.fp8_channel import FP8_CHANNEL
from pipeline.formats.int4_awq import INT4_AWQ
from pipeline.formats.mxfp4 import MXFP4
from pipeline.formats.mxfp8 import MXFP8
from pipeline.formats.nvfp4 import NVFP4
from pipeline.formats.w4a8_awq import W4A8_AWQ
from pipeline.formats.w4a8_nvfp4_fp8 import W4A8_NVFP4_FP8
from pipeline.formats.w4a16_nvfp4 import W4A16_NVFP4

__all__ = ["FORMATS", "Format", "Output", "get_format"]

FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        BF16_FORMAT, FP8, FP8_BLOCK, NVFP4, W4A16_NVFP4, W4A8_NVFP4_FP8, FP8_CHANNEL, MXFP8, MXFP4, INT4_AWQ, W4A8_AWQ,
    )
}  # fmt: skip
"""The order is that of preference where a layout could be more than one."""


def get_format(name: str) -> Format:
    """The format of that name."""
    if name not in FORMATS:
        raise ConfigError(f"{name!r} is not a weight format: choose one of {', '.join(FORMATS)}.")
    return FORMATS[name]
