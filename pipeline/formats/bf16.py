"""BF16: not quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from pipeline.formats.base import Output, amax_of
from pipeline.formats.numerics import BF16, Array, Float32

__all__ = ["BF16_FORMAT", "Bf16"]


@dataclass(frozen=True, slots=True)
class Bf16:
    """See the module. Reads any floating type (a plain weight of a checkpoint), writes BF16."""

    name: str = "bf16"
    quant_algo: None = None
    group_size: None = None
    bits_per_weight: float = 16.0
    tensor_scale: bool = False
    packing: tuple[int, int] = (1, 1)

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """The weight alone."""
        return (Output("weight", "BF16", tuple(shape)),)

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Round to BF16."""
        return {"weight": weight.astype(BF16)}

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """Widen to float32."""
        return tensors["weight"].astype(np.float32)

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """BF16 has float32's range."""
        return inf

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """Largest magnitude, in BF16."""
        return float(np.float32(amax_of(tensors["weight"])).astype(BF16))


BF16_FORMAT = Bf16()
