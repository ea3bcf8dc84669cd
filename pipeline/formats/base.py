"""What a weight format is: the tensors it writes for one linear layer, and the arithmetic both ways.

A linear layer `X` of shape [N, K] is stored as `X.weight` and its scales; here they go by what follows `X.`
("weight", "weight_scale", ...). Formats are pure numpy and know nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.core.errors import ConfigError
from pipeline.formats.numerics import BF16, Array, Float32, row_strips

__all__ = ["Format", "Output", "amax_of", "dequantized_amax", "require_matrix", "tensor_scale"]


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that a format writes; `dtype` in safetensors' spelling."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]


class Format(Protocol):
    """One weight format."""

    name: str
    """As in the configuration: nvfp4."""
    quant_algo: str | None
    """As ModelOpt and TensorRT-LLM spell it: NVFP4; None is not quantised."""
    group_size: int | None
    """Weights that share a scale along K; None: one scale a tensor."""
    bits_per_weight: float
    """Stored bits a weight, scales included."""
    tensor_scale: bool
    """Whether one scale covers the whole tensor: layers that runtimes fuse must then have the same."""
    packing: tuple[int, int]
    """Weights in one stored element, along N and along K."""

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """What is written for a weight of `shape`; refuses shapes that the format cannot hold, naming `module`."""

    def quantize(self, weight: Array, *, amax: float, input_scale: float) -> dict[str, Array]:
        """Quantise a finite [N, K] weight in BF16 or float32. `amax` is that of all layers fused with this one."""

    def dequantize(self, tensors: Mapping[str, Array]) -> Float32:
        """The float32 [N, K] weight that the stored tensors stand for."""

    def limit(self, tensors: Mapping[str, Array]) -> float:
        """Largest magnitude that the tensors' scales can express."""

    def amax(self, tensors: Mapping[str, Array]) -> float:
        """Largest magnitude of the dequantised weight, rounded to BF16; NaN if any of it is."""


def require_matrix(module: str, shape: tuple[int, ...], multiple: int, name: str) -> tuple[int, int]:
    """The shape as (N, K), or an error that names the module."""
    if len(shape) != 2 or shape[1] % multiple or 0 in shape:
        raise ConfigError(
            f"{module}.weight has shape {list(shape)}, but {name} needs a matrix whose last dimension is a multiple "
            f"of {multiple}: keep this module class in another format."
        )
    return shape[0], shape[1]


def tensor_scale(amax: float, largest: float) -> np.float32:
    """The scale that takes `amax` to `largest`; 1 for a tensor of zeros."""
    scale = np.float32(amax) / np.float32(largest)
    return scale if scale > 0 else np.float32(1)


def amax_of(weight: Array) -> float:
    """Largest magnitude of a weight, strip by strip; NaN if any element is."""
    flat = weight.reshape(weight.shape[0], -1) if weight.ndim else weight.reshape(1, 1)
    return float(np.max([np.abs(flat[rows].astype(np.float32)).max(initial=0.0) for rows in row_strips(flat.shape)]))


def dequantized_amax(item: Format, tensors: Mapping[str, Array]) -> float:
    """Largest magnitude that the stored tensors stand for, rounded to BF16."""
    return float(np.abs(item.dequantize(tensors)).max(initial=0.0).astype(BF16))
