"""MXFP8: E4M3 values with a power of two for every 32 of them.

`weight` F8_E4M3 [N, K] and `weight_scale` U8 [N, K/32], an E8M0 code: 2^(code - 127) is the least power of two that is
no smaller than block amax / 448, so nothing saturates. The exponent is read off the float's own bits, which is what
ModelOpt's ceil(log2()) gives wherever the logarithm is exact enough. A block of zeros has code 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.formats.base import Output, dequantized_amax, require_matrix
from pipeline.formats.numerics import (
    E4M3,
    E4M3_MAX,
    Array,
    Float32,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    encode_e8m0,
    row_strips,
)

__all__ = ["MXFP8", "Mxfp8"]

GROUP = 32


@dataclass(frozen=True, slots=True)
class Mxfp8:
    """See the module."""

    name: str = "mxfp8"
    quant_algo: str = "MXFP8"
    group_size: int = GROUP
    bits_per_weight: float = 8 + 8 / GROUP
    tensor_scale: bool = False
    packing: tuple[int, int] = (1, 1)

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """Weight and block exponents."""
        n, k = require_matrix(module, shape, GROUP, "MXFP8")
        return Output("weight", "F8_E4M3", (n, k)), Output("weight_scale", "U8", (n, k // GROUP))

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Strip by strip; scaling by a power of two rounds nothing."""
        n, k = weight.shape
        codes, scales = np.empty((n, k), E4M3), np.empty((n, k // GROUP), np.uint8)
        for rows in row_strips((n, k)):
            blocks = weight[rows].astype(np.float32).reshape(-1, k // GROUP, GROUP)
            scales[rows] = encode_e8m0(np.abs(blocks).max(axis=-1) / E4M3_MAX)
            codes[rows] = encode_e4m3(blocks * decode_e8m0(254 - scales[rows])[..., None]).reshape(-1, k)
        return {"weight": codes, "weight_scale": scales}

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """e4m3 * 2^(scale - 127)"""
        codes, scales = tensors["weight"], tensors["weight_scale"]
        out = np.empty((*scales.shape, GROUP), np.float32)
        for rows in row_strips(codes.shape):
            values = decode_e4m3(codes[rows]).reshape(-1, scales.shape[1], GROUP)
            np.multiply(values, decode_e8m0(scales[rows])[..., None], out=out[rows])
        return out.reshape(codes.shape)

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """448 times the largest power."""
        return float(E4M3_MAX * decode_e8m0(tensors["weight_scale"]).max())

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """Largest dequantised magnitude, in BF16."""
        return dequantized_amax(self, tensors)


MXFP8 = Mxfp8()
