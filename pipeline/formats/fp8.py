"""FP8 with one scale a tensor: ModelOpt's FP8.

`weight` F8_E4M3 [N, K], `weight_scale` F32 [] = amax / 448, `input_scale` F32 []; w = code * weight_scale.
The division is a true float32 one: ModelOpt divides in BF16, which moves 1.3 % of the codes by one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.formats.base import Output, require_matrix, tensor_scale
from pipeline.formats.numerics import BF16, E4M3, E4M3_MAX, Array, Float32, decode_e4m3, encode_e4m3, row_strips

__all__ = ["FP8", "Fp8"]


@dataclass(frozen=True, slots=True)
class Fp8:
    """See the module."""

    name: str = "fp8"
    quant_algo: str = "FP8"
    group_size: None = None
    bits_per_weight: float = 8.0
    tensor_scale: bool = True
    packing: tuple[int, int] = (1, 1)

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """Weight, its scale, and the activations' scale."""
        n, k = require_matrix(module, shape, 1, "FP8")
        return Output("weight", "F8_E4M3", (n, k)), Output("weight_scale", "F32", ()), Output("input_scale", "F32", ())

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """By amax / 448; a zero tensor has scale 1."""
        scale = tensor_scale(amax, E4M3_MAX)
        codes = np.empty(weight.shape, E4M3)
        for rows in row_strips(weight.shape):
            codes[rows] = encode_e4m3(weight[rows].astype(np.float32) / scale)
        return {"weight": codes, "weight_scale": np.array(scale), "input_scale": np.array(input_scale, np.float32)}

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """code * scale"""
        return decode_e4m3(tensors["weight"]) * tensors["weight_scale"].reshape(())

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """448 times the scale."""
        return float(E4M3_MAX * tensors["weight_scale"].reshape(()))

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """From the codes alone, which are ordered as their values are."""
        top = (tensors["weight"].view(np.uint8) & 0x7F).max(initial=0)
        return float((decode_e4m3(np.array(top, np.uint8)) * tensors["weight_scale"].reshape(())).astype(BF16))


FP8 = Fp8()
