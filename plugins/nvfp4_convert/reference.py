"""The conversion that the kernels must reproduce to the bit: that of `pipeline.formats`, in numpy.

`amax` is the largest magnitude of the dequantised weight, rounded to BF16. Weights are rounded to BF16 before they are
quantised, as ModelOpt does, unless `exact`.
"""

from __future__ import annotations

import numpy as np

from pipeline.formats import get_format
from pipeline.formats.numerics import BF16, E4M3, Array

__all__ = ["amax", "quantize"]


def amax(codes: Array, scale_inv: Array) -> np.float32:
    """codes U8 [n, k] and scale_inv F32 [ceil(n/128), ceil(k/128)] -> largest magnitude"""
    return np.float32(get_format("fp8_block").amax({"weight": codes.view(E4M3), "weight_scale_inv": scale_inv}))


def quantize(codes: Array, scale_inv: Array, amax: float, exact: bool = False) -> tuple[Array, Array, Array]:
    """-> weight U8 [n, k/2], weight_scale U8 [n, k/16] (E4M3 codes), weight_scale_2 F32 []"""
    weight = get_format("fp8_block").dequantize({"weight": codes.view(E4M3), "weight_scale_inv": scale_inv})
    stored = get_format("nvfp4").quantize(weight if exact else weight.astype(BF16), amax=amax, input_scale=1.0)
    return stored["weight"], stored["weight_scale"].view(np.uint8), stored["weight_scale_2"]
