"""NVFP4: 4-bit E2M1 values, an E4M3 scale for every 16 of them, and one float32 scale a tensor.

`weight` U8 [N, K/2]: two codes a byte, the even element in the low nibble. `weight_scale` F8_E4M3 [N, K/16], row-major:
runtimes swizzle it when they load. `weight_scale_2` F32 [] and `input_scale` F32 []. The weight is
e2m1 * weight_scale * weight_scale_2, and everything below is ModelOpt's NVFP4QTensor to the bit:

    weight_scale_2 = amax / 2688                       2688 = 6 * 448, so the largest block scale is 448
    weight_scale   = e4m3(block amax / (6 * weight_scale_2)), clamped to [2^-9, 448]; 1 for a block of zeros
    code           = e2m1(w / (weight_scale * weight_scale_2)), with true float32 divisions

One case differs: ModelOpt writes NaN scales for a tensor of zeros, here its scales are 1. Layers that runtimes fuse
must be quantised with the same `amax`: kernels take one weight_scale_2 for the fused matrix. `search` may look for
better block scales (`nvfp4_search`); the layout stays the same. Two relatives differ in the fields alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.formats.base import Output, dequantized_amax, require_matrix, tensor_scale
from pipeline.formats.numerics import (
    E4M3,
    Array,
    Float32,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    row_strips,
)
from pipeline.formats.nvfp4_search import amax_scales, best_scales

__all__ = ["NVFP4", "Nvfp4"]

GROUP = 16


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """See the module."""

    name: str = "nvfp4"
    quant_algo: str = "NVFP4"
    group_size: int = GROUP
    bits_per_weight: float = 4 + 8 / GROUP
    tensor_scale: bool = True
    packing: tuple[int, int] = (1, 2)
    static_input: bool = True
    """Whether an `input_scale` for the activations is stored."""
    largest: float = 2688.0
    """The largest e2m1 * weight_scale: 6 * 448."""
    search: str = "amax"
    """How block scales are found."""

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """Packed codes, block scales, the tensor's scale, and the activations' scale."""
        n, k = require_matrix(module, shape, self.group_size, self.quant_algo)
        weight = (
            Output("weight", "U8", (n, k // 2)),
            Output("weight_scale", "F8_E4M3", (n, k // self.group_size)),
            Output("weight_scale_2", "F32", ()),
        )
        return (*weight, Output("input_scale", "F32", ())) if self.static_input else weight

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Strip by strip; see the module for the arithmetic."""
        (n, k), scale_2 = weight.shape, self.scale_2(amax)
        codes, scales = np.empty((n, k // 2), np.uint8), np.empty((n, k // self.group_size), E4M3)
        for rows in row_strips((n, k)):
            blocks = weight[rows].astype(np.float32).reshape(-1, k // self.group_size, self.group_size)
            scales[rows] = self._scales(blocks, scale_2, np.float32(amax))
            codes[rows] = _pack(encode_e2m1(blocks / (decode_e4m3(scales[rows]) * scale_2)[..., None]).reshape(-1, k))
        stored = {"weight": codes, "weight_scale": scales, "weight_scale_2": np.array(scale_2)}
        return stored | ({"input_scale": np.array(input_scale, np.float32)} if self.static_input else {})

    def scale_2(self, amax: float) -> np.float32:
        """weight_scale_2; four_over_six leaves room for block scales of amax / 4."""
        return tensor_scale(amax, self.largest * 4 / 7 if self.search == "four_over_six" else self.largest)

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """e2m1 * (weight_scale * weight_scale_2)"""
        packed, scales, scale_2 = tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"].reshape(())
        out = np.empty((*scales.shape, self.group_size), np.float32)
        for rows in row_strips((packed.shape[0], packed.shape[1] * 2)):
            values = decode_e2m1(packed[rows]).reshape(-1, scales.shape[1], self.group_size)
            np.multiply(values, (decode_e4m3(scales[rows]) * scale_2)[..., None], out=out[rows])
        return out.reshape(packed.shape[0], -1)

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """2688 (or `largest`) times the tensor's scale."""
        return float(np.float32(self.largest) * tensors["weight_scale_2"].reshape(()))

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """Largest dequantised magnitude, in BF16."""
        return dequantized_amax(self, tensors)

    def _scales(self, blocks: Float32, scale_2: np.float32, amax: np.float32) -> Array:
        """Block scales [n, K/g], in E4M3."""
        if self.search == "amax" or amax == 0:
            return amax_scales(np.abs(blocks).max(axis=-1), scale_2).view(E4M3)
        return best_scales(self.search, blocks, scale_2, amax, self.largest).view(E4M3)


def _pack(codes: Array) -> Array:
    """[n, K] -> [n, K/2], the even element in the low nibble"""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


NVFP4 = Nvfp4()
