"""FP8 with one scale a row: ModelOpt's FP8_PER_CHANNEL_PER_TOKEN.

`weight` F8_E4M3 [N, K] and `weight_scale` F32 [N] = amax of the row / 448, 1 for a row of zeros; w = code * scale.
Activations get a scale a token at run time, so none is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.formats.base import Output, require_matrix
from pipeline.formats.numerics import BF16, E4M3, E4M3_MAX, Array, Float32, decode_e4m3, encode_e4m3, row_strips

__all__ = ["FP8_CHANNEL", "Fp8Channel"]


@dataclass(frozen=True, slots=True)
class Fp8Channel:
    """See the module."""

    name: str = "fp8_channel"
    quant_algo: str = "FP8_PER_CHANNEL_PER_TOKEN"
    group_size: None = None
    bits_per_weight: float = 8.0
    tensor_scale: bool = False
    packing: tuple[int, int] = (1, 1)

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """Weight and row scales."""
        n, k = require_matrix(module, shape, 1, "FP8 with a scale a row")
        return Output("weight", "F8_E4M3", (n, k)), Output("weight_scale", "F32", (n,))

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Each row by its own amax / 448."""
        codes, scales = np.empty(weight.shape, E4M3), np.empty(weight.shape[0], np.float32)
        for rows in row_strips(weight.shape):
            values = weight[rows].astype(np.float32)
            scale = np.abs(values).max(axis=1) / E4M3_MAX
            scale[scale == 0] = 1
            codes[rows], scales[rows] = encode_e4m3(values / scale[:, None]), scale
        return {"weight": codes, "weight_scale": scales}

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """code * scale of its row"""
        return decode_e4m3(tensors["weight"]) * tensors["weight_scale"][:, None]

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """448 times the largest row scale."""
        return float(E4M3_MAX * tensors["weight_scale"].max())

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """From the codes alone, which are ordered as their values are."""
        tops = (tensors["weight"].view(np.uint8) & 0x7F).max(axis=1)
        return float((decode_e4m3(tops) * np.abs(tensors["weight_scale"])).astype(BF16).astype(np.float32).max())


FP8_CHANNEL = Fp8Channel()
