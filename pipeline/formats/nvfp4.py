"""NVFP4: 4-bit E2M1 values, an E4M3 scale for every 16 of them, and one float32 scale a tensor.

`weight` U8 [N, K/2]: two codes a byte, the even element in the low nibble. `weight_scale` F8_E4M3 [N, K/16], row-major:
runtimes swizzle it when they load. `weight_scale_2` F32 [] and `input_scale` F32 []. The weight is
e2m1 * weight_scale * weight_scale_2, and everything below is ModelOpt's NVFP4QTensor to the bit:

    weight_scale_2 = amax / 2688                       2688 = 6 * 448, so the largest block scale is 448
    weight_scale   = e4m3(block amax / (6 * weight_scale_2)), clamped to [2^-9, 448]; 1 for a block of zeros
    code           = e2m1(w / (weight_scale * weight_scale_2)), with true float32 divisions

One case differs: ModelOpt writes NaN scales for a tensor of zeros, here its scales are 1. Layers that runtimes fuse
must be quantised with the same `amax`: kernels take one weight_scale_2 for the fused matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.formats.base import Output, require_matrix
from pipeline.formats.numerics import (
    BF16,
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    E4M3_TINY,
    Array,
    Float32,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    row_strips,
)

__all__ = ["NVFP4", "Nvfp4"]

GROUP = 16


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """See the module."""

    name: str = "nvfp4"
    quant_algo: str = "NVFP4"
    group_size: int = GROUP
    bits_per_weight: float = 4 + 8 / GROUP
    static_input: bool = True

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """Packed codes, block scales, the tensor's scale, and the activations' scale."""
        n, k = require_matrix(module, shape, GROUP, "NVFP4")
        return (
            Output("weight", "U8", (n, k // 2)), Output("weight_scale", "F8_E4M3", (n, k // GROUP)),
            Output("weight_scale_2", "F32", ()), Output("input_scale", "F32", ()),
        )

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Strip by strip; see the module for the arithmetic."""
        n, k = weight.shape
        scale_2 = np.float32(amax) / (E2M1_MAX * E4M3_MAX)
        scale_2 = scale_2 if scale_2 > 0 else np.float32(1)
        codes, scales = np.empty((n, k // 2), np.uint8), np.empty((n, k // GROUP), E4M3)
        for rows in row_strips((n, k)):
            codes[rows], scales[rows] = _quantize_strip(weight[rows].astype(np.float32), scale_2)
        return {
            "weight": codes, "weight_scale": scales,
            "weight_scale_2": np.array(scale_2), "input_scale": np.array(input_scale, np.float32),
        }

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """e2m1 * (weight_scale * weight_scale_2)"""
        packed, scales, scale_2 = tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"].reshape(())
        out = np.empty((packed.shape[0], scales.shape[1], GROUP), np.float32)
        for rows in row_strips((packed.shape[0], packed.shape[1] * 2)):
            values = decode_e2m1(packed[rows]).reshape(-1, scales.shape[1], GROUP)
            np.multiply(values, (decode_e4m3(scales[rows]) * scale_2)[..., None], out=out[rows])
        return out.reshape(packed.shape[0], -1)

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """2688 times the tensor's scale."""
        return float(E2M1_MAX * E4M3_MAX * tensors["weight_scale_2"].reshape(()))

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """Largest dequantised magnitude, in BF16."""
        return float(np.abs(self.dequantize(tensors)).max(initial=0.0).astype(BF16))


def _quantize_strip(values: Float32, scale_2: np.float32) -> tuple[Array, Array]:
    """[n, K] -> codes [n, K/2], block scales [n, K/16]"""
    blocks = values.reshape(values.shape[0], -1, GROUP)
    wanted = np.abs(blocks).max(axis=-1) / (E2M1_MAX * scale_2)
    wanted[wanted == 0] = 1
    scales = encode_e4m3(np.clip(wanted, E4M3_TINY, E4M3_MAX))
    codes = encode_e2m1(blocks / (decode_e4m3(scales) * scale_2)[..., None]).reshape(values.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


NVFP4 = Nvfp4()
