"""W4A16_AWQ: 4-bit integers with a float32 scale for every 128 of them, in ModelOpt's and TensorRT-LLM's layout.

`weight` U8 [N/2, K], packed along OUT: row 2i in the low nibble, row 2i + 1 in the high one, two's complement.
`weight_scale` F32 [N, K/128] = group amax / 7, 1 for a group of zeros. `pre_quant_scale` BF16 [K] is what AWQ found
to multiply the activations with; without calibration it is 1, and stored all the same, because loaders ask for it.
The weight that is meant is int4 * weight_scale * pre_quant_scale.

Other tools' weights may come with `weight_zero_point` I8 [N, K/128], which is subtracted from the code; none is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.core.errors import ConfigError
from pipeline.formats.base import Output, dequantized_amax, require_matrix, tensor_scale
from pipeline.formats.numerics import BF16, E4M3_MAX, Array, Float32, row_strips

__all__ = ["INT4_AWQ", "Int4Awq", "ones"]

GROUP = 128
INT4_MAX = np.float32(7)
_SIGNED = np.array([*range(8), *range(-8, 0)], np.float32)
_ROUNDINGS = {"BF16": BF16, "F16": np.dtype(np.float16)}


@dataclass(frozen=True, slots=True)
class Int4Awq:
    """See the module."""

    name: str = "int4_awq"
    quant_algo: str = "W4A16_AWQ"
    group_size: int = GROUP
    bits_per_weight: float = 4 + 32 / GROUP
    tensor_scale: bool = False
    """With it (W4A8_AWQ) `weight_scale_2` and `input_scale` are stored too."""
    packing: tuple[int, int] = (2, 1)
    scale_rounding: tuple[str, ...] = ()
    """Types to which scales are rounded, one after the other, before codes are computed; they are stored as F32 here."""

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """Packed codes, group scales, the activations' factors, and for FP8 activations the two scalars."""
        n, k = require_matrix(module, shape, self.group_size, self.quant_algo)
        if n % 2:
            raise ConfigError(
                f"{module}.weight has {n} rows, but {self.quant_algo} packs them two by two: keep this module class in "
                f"another format."
            )
        tensors = (
            Output("weight", "U8", (n // 2, k)),
            Output("weight_scale", "F32", (n, k // self.group_size)),
            Output("pre_quant_scale", "BF16", (k,)),
        )
        scalars = (Output("weight_scale_2", "F32", ()), Output("input_scale", "F32", ()))
        return (*tensors, *scalars) if self.tensor_scale else tensors

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Each group by its own amax / 7, nearest integer, ties to even."""
        n, k = weight.shape
        packed, scales = np.empty((n // 2, k), np.uint8), np.empty((n, k // self.group_size), np.float32)
        for rows in row_strips((n, k), 2):
            codes, scales[rows] = self._quantize_strip(weight[rows].astype(np.float32))
            packed[rows.start // 2 : rows.stop // 2] = codes[0::2] | (codes[1::2] << 4)
        stored = {"weight": packed, "weight_scale": scales, "pre_quant_scale": ones((n, k))}
        return stored | (scalars(amax, input_scale) if self.tensor_scale else {})

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """(int4 - weight_zero_point) * weight_scale * pre_quant_scale"""
        packed, scales, zeros = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
        factors = tensors["pre_quant_scale"].astype(np.float32)
        out = np.empty((scales.shape[0], packed.shape[1]), np.float32)
        for rows in row_strips(out.shape, 2):
            half = packed[rows.start // 2 : rows.stop // 2]
            out[rows][0::2], out[rows][1::2] = _SIGNED[half & 15], _SIGNED[half >> 4]
            if zeros is not None:
                out[rows] -= np.repeat(zeros[rows].astype(np.float32), self.group_size, axis=1)
            out[rows] *= np.repeat(scales[rows], self.group_size, axis=1)
            out[rows] *= factors
        return out

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """7 times the largest scale; 15 times it with zero points."""
        zeros = tensors.get("weight_zero_point")
        top = np.float32(15) if zeros is not None and zeros.any() else INT4_MAX
        return float(top * tensors["weight_scale"].max() * tensors["pre_quant_scale"].astype(np.float32).max())

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """Largest dequantised magnitude, in BF16."""
        return dequantized_amax(self, tensors)

    def _quantize_strip(self, values: Float32) -> tuple[Array, Array]:
        """[n, K] -> nibbles [n, K], group scales [n, K/128]"""
        groups = values.reshape(values.shape[0], -1, self.group_size)
        scales = np.abs(groups).max(axis=-1) / INT4_MAX
        for name in self.scale_rounding:
            scales = scales.astype(_ROUNDINGS[name]).astype(np.float32)
        scales[scales == 0] = 1
        codes = np.clip(np.rint(groups / scales[..., None]), -8, 7).astype(np.int8)
        return codes.reshape(values.shape).view(np.uint8) & 15, scales


def ones(shape: tuple[int, ...]) -> Array:
    """The pre_quant_scale that changes nothing, for a weight [N, K]."""
    return np.ones(shape[1], BF16)


def scalars(amax: float, input_scale: float) -> dict[str, Array]:
    """Kernels turn weights into FP8 by weight_scale / weight_scale_2, so the largest must land on 448."""
    return {"weight_scale_2": np.array(tensor_scale(amax, E4M3_MAX)), "input_scale": np.array(input_scale, np.float32)}


INT4_AWQ = Int4Awq()
