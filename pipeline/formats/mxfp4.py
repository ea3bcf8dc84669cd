"""MXFP4: E2M1 values with a power of two for every 32 of them, activations in 16 bits.

`weight` U8 [N, K/2]: two codes a byte, the even element in the low nibble. `weight_scale` U8 [N, K/32], an E8M0 code:
the least power of two that is no smaller than block amax / 6. As in ModelOpt's MXFP4QTensor, and unlike NVFP4, a
value halfway between two codes takes the smaller one, and zero has the sign bit set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.base import Output, dequantized_amax, require_matrix
from pipeline.formats.numerics import (
    E2M1_MAX,
    E2M1_VALUES,
    Array,
    Float32,
    decode_e2m1,
    decode_e8m0,
    encode_e8m0,
    row_strips,
)

__all__ = ["MXFP4", "Mxfp4"]

GROUP = 32
BOUNDS = (E2M1_VALUES[:-1] + E2M1_VALUES[1:]) / 2
"""The upper end of each code's interval."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """See the module."""

    name: str = "mxfp4"
    quant_algo: str = "W4A16_MXFP4"
    group_size: int = GROUP
    bits_per_weight: float = 4 + 8 / GROUP
    tensor_scale: bool = False
    packing: tuple[int, int] = (1, 2)

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """Packed codes and block exponents."""
        n, k = require_matrix(module, shape, GROUP, "MXFP4")
        return Output("weight", "U8", (n, k // 2)), Output("weight_scale", "U8", (n, k // GROUP))

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Strip by strip."""
        n, k = weight.shape
        packed, scales = np.empty((n, k // 2), np.uint8), np.empty((n, k // GROUP), np.uint8)
        for rows in row_strips((n, k)):
            blocks = weight[rows].astype(np.float32).reshape(-1, k // GROUP, GROUP)
            scales[rows] = encode_e8m0(np.abs(blocks).max(axis=-1) / E2M1_MAX)
            codes = _encode(blocks * decode_e8m0(254 - scales[rows])[..., None]).reshape(-1, k)
            packed[rows] = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return {"weight": packed, "weight_scale": scales}

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """e2m1 * 2^(scale - 127)"""
        packed, scales = tensors["weight"], tensors["weight_scale"]
        out = np.empty((*scales.shape, GROUP), np.float32)
        for rows in row_strips((packed.shape[0], packed.shape[1] * 2)):
            values = decode_e2m1(packed[rows]).reshape(-1, scales.shape[1], GROUP)
            np.multiply(values, decode_e8m0(scales[rows])[..., None], out=out[rows])
        return out.reshape(packed.shape[0], -1)

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """6 times the largest power."""
        return float(E2M1_MAX * decode_e8m0(tensors["weight_scale"]).max())

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """Largest dequantised magnitude, in BF16."""
        return dequantized_amax(self, tensors)


def _encode(values: Float32) -> NDArray[np.uint8]:
    """Nearest E2M1 code, ties to the smaller magnitude."""
    size = np.abs(values)
    codes = (values <= 0).view(np.uint8) << 3
    for bound in BOUNDS:
        codes += size > bound
    return codes


MXFP4 = Mxfp4()
