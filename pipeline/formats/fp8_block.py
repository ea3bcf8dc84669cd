"""FP8 in blocks of 128x128: DeepSeek's own layout.

`weight` F8_E4M3 [N, K] and `weight_scale_inv` F32 [ceil(N/128), ceil(K/128)]; w = code * scale of its block. The
last block of a dimension may be partial (`kv_a_proj_with_mqa` of R1 has 576 rows). Activations are scaled at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.formats.base import Output, require_matrix
from pipeline.formats.numerics import BF16, E4M3, E4M3_MAX, Array, Float32, decode_e4m3, encode_e4m3, row_strips

__all__ = ["FP8_BLOCK", "Fp8Block"]

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """See the module."""

    name: str = "fp8_block"
    quant_algo: str = "FP8_BLOCK_SCALES"
    group_size: int = BLOCK
    bits_per_weight: float = 8 + 32 / BLOCK**2
    tensor_scale: bool = False
    packing: tuple[int, int] = (1, 1)

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """Weight and block scales."""
        n, k = require_matrix(module, shape, 1, "FP8 with block scales")
        scales = (-(-n // BLOCK), -(-k // BLOCK))
        return Output("weight", "F8_E4M3", (n, k)), Output("weight_scale_inv", "F32", scales)

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Each block by its own amax / 448, as DeepSeek does; a zero block has scale 1."""
        n, k = weight.shape
        codes = np.empty((n, k), E4M3)
        scales = np.empty((-(-n // BLOCK), -(-k // BLOCK)), np.float32)
        for rows in row_strips((n, k), BLOCK):
            values = weight[rows].astype(np.float32)
            block = _block_max(np.abs(values)) / E4M3_MAX
            block[block == 0] = 1
            scales[rows.start // BLOCK : -(-rows.stop // BLOCK)] = block
            codes[rows] = encode_e4m3(values / _spread(block, values.shape))
        return {"weight": codes, "weight_scale_inv": scales}

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """code * scale, exact in float32 up to one rounding."""
        codes, scales = tensors["weight"], tensors["weight_scale_inv"]
        out = np.empty(codes.shape, np.float32)
        for rows in row_strips(codes.shape, BLOCK):
            block = scales[rows.start // BLOCK : -(-rows.stop // BLOCK)]
            np.multiply(decode_e4m3(codes[rows]), _spread(block, codes[rows].shape), out=out[rows])
        return out

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """448 times the largest block scale."""
        return float(E4M3_MAX * tensors["weight_scale_inv"].max())

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """From the codes alone: without the sign, E4M3 codes are ordered as their values are (0x7f, NaN, on top)."""
        codes, scales = tensors["weight"].view(np.uint8), tensors["weight_scale_inv"]
        tops = [_block_max(codes[rows] & 0x7F) for rows in row_strips(codes.shape, BLOCK)]
        values = decode_e4m3(np.concatenate(tops)) * np.abs(scales)
        return float(values.astype(BF16).astype(np.float32).max())


def _block_max(values: Array) -> Array:
    """[n, k] -> [ceil(n/128), ceil(k/128)]"""
    columns = np.maximum.reduceat(values, np.arange(0, values.shape[1], BLOCK), axis=1)
    return np.maximum.reduceat(columns, np.arange(0, values.shape[0], BLOCK), axis=0)


def _spread(block: Float32, shape: tuple[int, int]) -> Float32:
    """Block scales [n/128, k/128] -> one scale an element, [n, k]"""
    rows = np.repeat(block, BLOCK, axis=0)[: shape[0]]
    return np.repeat(rows, BLOCK, axis=1)[:, : shape[1]]


FP8_BLOCK = Fp8Block()
