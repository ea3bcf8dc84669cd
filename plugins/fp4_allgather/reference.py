"""What every rank must hold after a gather: the quantised and dequantised rows of all ranks in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.quantize import reference

__all__ = ["gathered", "rounded"]


def rounded(x: Tensor, precision: str, input_scale: Tensor) -> Tensor:
    """x BF16 [N, K] after one trip in "bf16", "fp8" or "nvfp4"."""
    if precision == "bf16":
        return x
    if precision == "fp8":
        return reference.fp8_dequantize(*reference.fp8_quantize(x))
    return reference.nvfp4_dequantize(*reference.nvfp4_quantize(x, input_scale), input_scale)


def gathered(parts: Sequence[Tensor], precision: str, input_scale: Tensor) -> Tensor:
    """BF16 [sum of N, K]"""
    return torch.cat([rounded(part, precision, input_scale) for part in parts])
