"""Matrix products with quantised weights: what each format of `pipeline.formats` becomes in TensorRT.

    bf16          one product
    fp8           activations by the static input_scale; an FP8 product (SM89 and up)
    fp8_channel   a scale a token found at run time and a scale a row, both multiplied in afterwards; an FP8 product
    fp8_block     weights dequantised in blocks of 128x128 into a copy in BF16 at run time: TensorRT has no kernel for it
    nvfp4         activations quantised at run time; an FP4 product (SM100 and up)
    w4a16_nvfp4   weights dequantised at run time
    int4_awq      fused into the product; group scales rounded to BF16, as TensorRT demands scales in the product's type
    others        dequantised to BF16 when the engine is built

A weight may be a stack [E, N, K] of experts. Their tensor-wide scales differ, so they are multiplied into the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.formats.numerics import E4M3, E4M3_MAX, Array

__all__ = ["BUILT_AS", "NATIVE", "Named", "Stored", "linear", "repack_int4", "shared_scale"]

BUILT_AS = {
    "bf16": "BF16 product",
    "fp8": "FP8 product, static activation scale",
    "fp8_channel": "FP8 product, activation scale a token",
    "fp8_block": "emulated: dequantised to BF16 at run time, BF16 product and activations",
    "nvfp4": "FP4 product, activations quantised at run time",
    "w4a16_nvfp4": "dequantised to BF16 at run time, BF16 product",
    "int4_awq": "INT4 weights in a BF16 product, group scales rounded to BF16",
}
NATIVE = tuple(BUILT_AS)
"""Formats that stay as they are in the engine."""
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter that is not quantised, by the name of its tensor."""

    name: str
    value: Array


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight as the engine holds it."""

    name: str
    """Of its module."""
    format: str
    tensors: Mapping[str, Array]
    """As `Format.outputs` names them; of a stack, with a leading dimension of experts."""
    shape: tuple[int, ...]
    """[N, K], or [E, N, K]"""

    @property
    def stacked(self) -> bool:
        """Whether it is one weight an expert."""
        return len(self.shape) == 3


def linear(net: Graph, x: Tensor, weight: Stored) -> Tensor:
    """x [..., K] times the weight's transpose, in the type of x; x must have the rank of a stack."""
    return _LOWERINGS[weight.format](net, x, weight)


def _lifted(x: Tensor, weight: Stored) -> tuple[int, ...]:
    """The weight's shape with the rank of x."""
    return (1,) * (len(x.shape) - len(weight.shape)) + weight.shape


def _plain(net: Graph, x: Tensor, weight: Stored) -> Tensor:
    values = weight.tensors["weight"].reshape(_lifted(x, weight))
    return net.matmul(x, net.constant(_as(net, values, x), f"{weight.name}.weight"), transpose=True)


def _as(net: Graph, values: Array, x: Tensor) -> Array:
    """In the type of x; no copy where it is."""
    return values.astype(net.numpy[x.dtype], copy=False)


def _unit(net: Graph) -> Tensor:
    return net.constant(np.array(1, np.float32))


def _rescaled(net: Graph, y: Tensor, factors: list[Tensor]) -> Tensor:
    """y times float32 factors, rounded once."""
    wide = net.float32(y)
    for factor in factors:
        wide = net.mul(wide, factor)
    return net.cast(wide, y.dtype)


def _leaf(net: Graph, weight: Stored, leaf: str, shape: tuple[int, ...]) -> Tensor:
    """One of the weight's tensors, by its own name."""
    return net.constant(weight.tensors[leaf].reshape(shape), f"{weight.name}.{leaf}")


def _tensor_scale(net: Graph, x: Tensor, weight: Stored, leaf: str) -> tuple[Tensor, list[Tensor]]:
    """A tensor-wide scale as the factor of a dequantisation, or of a stack as one of the product."""
    if not weight.stacked:
        return _leaf(net, weight, leaf, ()), []
    return _unit(net), [_leaf(net, weight, leaf, (-1, *(1,) * (len(x.shape) - 1)))]


def shared_scale(net: Graph, *weights: Stored) -> Tensor:
    """The activations' static scale; experts see the same ones, so the largest of theirs. TensorRT wants it at build time."""
    return net.constant(np.array(max(weight.tensors["input_scale"].max() for weight in weights), np.float32))


def _fp8(net: Graph, x: Tensor, weight: Stored) -> Tensor:
    kinds = net.trt.DataType
    static = shared_scale(net, weight)
    activations = net.dequantize(net.quantize(x, static, kinds.FP8), static, x.dtype)
    scale, after = _tensor_scale(net, x, weight, "weight_scale")
    codes = _leaf(net, weight, "weight", _lifted(x, weight))
    y = net.matmul(activations, net.dequantize(codes, scale, x.dtype), transpose=True)
    return _rescaled(net, y, after) if after else y


def _fp8_channel(net: Graph, x: Tensor, weight: Stored) -> Tensor:
    kinds, one = net.trt.DataType, _unit(net)
    wide = net.float32(x)
    largest = net.reduce(net.abs(wide), "MAX", len(x.shape) - 1)
    token_scale = net.maximum(net.scale(largest, 1 / float(E4M3_MAX)), net.scalar(1e-12, largest))
    activations = net.dequantize(net.quantize(net.div(wide, token_scale), one, kinds.FP8), one, x.dtype)
    shape = _lifted(x, weight)
    codes = net.dequantize(_leaf(net, weight, "weight", shape), one, x.dtype)
    rows = _leaf(net, weight, "weight_scale", (*shape[:-2], 1, shape[-2]))
    return _rescaled(net, net.matmul(activations, codes, transpose=True), [token_scale, rows])


def _fp8_block(net: Graph, x: Tensor, weight: Stored) -> Tensor:
    shape = _lifted(x, weight)
    num_rows = weight.shape[-2]
    short = -num_rows % BLOCK
    codes = weight.tensors["weight"]
    if short:  # kv_a_proj_with_mqa of R1 has 576 rows; TensorRT wants whole blocks
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-2], short, codes.shape[-1]), E4M3)], axis=-2)
    scales = _leaf(net, weight, "weight_scale_inv", (*shape[:-2], *weight.tensors["weight_scale_inv"].shape[-2:]))
    block = (*(1,) * (len(shape) - 2), BLOCK, BLOCK)
    whole = net.constant(codes.reshape(*shape[:-2], *codes.shape[-2:]), f"{weight.name}.weight")
    y = net.matmul(x, net.dequantize(whole, scales, x.dtype, block=block), transpose=True)
    return net.last(y, 0, num_rows) if short else y


def _fp4_weight(net: Graph, x: Tensor, weight: Stored) -> tuple[Tensor, list[Tensor]]:
    shape = _lifted(x, weight)
    scale, after = _tensor_scale(net, x, weight, "weight_scale_2")
    block_scales = _leaf(net, weight, "weight_scale", (*shape[:-1], shape[-1] // 16))
    packed = weight.tensors["weight"].reshape(*shape[:-1], shape[-1] // 2)
    codes = net.packed_constant(packed, net.trt.DataType.FP4, shape, f"{weight.name}.weight")
    return net.dequantize(codes, net.dequantize(block_scales, scale, x.dtype), x.dtype), after


def _w4a16_nvfp4(net: Graph, x: Tensor, weight: Stored) -> Tensor:
    values, after = _fp4_weight(net, x, weight)
    y = net.matmul(x, values, transpose=True)
    return _rescaled(net, y, after) if after else y


def _nvfp4(net: Graph, x: Tensor, weight: Stored) -> Tensor:
    static = shared_scale(net, weight)
    codes, block_scales = net.quantize_fp4(x, static)
    return _w4a16_nvfp4(net, net.dequantize(codes, net.dequantize(block_scales, static, x.dtype), x.dtype), weight)


def _int4_awq(net: Graph, x: Tensor, weight: Stored) -> Tensor:
    shape = _lifted(x, weight)
    factors = weight.tensors["pre_quant_scale"]
    if np.any(factors != 1):
        x = net.mul(x, net.constant(_as(net, factors.reshape(*shape[:-2], 1, shape[-1]), x), f"{weight.name}.pre_quant_scale"))
    scales = net.constant(_as(net, weight.tensors["weight_scale"].reshape(*shape[:-1], -1), x), f"{weight.name}.weight_scale")
    packed = weight.tensors["weight"].reshape(*shape[:-1], shape[-1] // 2)
    codes = net.packed_constant(packed, net.trt.DataType.INT4, shape, f"{weight.name}.weight")
    return net.matmul(x, net.dequantize(codes, scales, x.dtype), transpose=True)


def repack_int4(packed: Array) -> Array:
    """Codes packed two rows a byte [N/2, K] -> two columns a byte [N, K/2], the even one in the low nibble."""
    rows = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, packed.shape[1])
    return rows[:, 0::2] | (rows[:, 1::2] << 4)


_LOWERINGS: dict[str, Callable[[Graph, Tensor, Stored], Tensor]] = {
    "bf16": _plain, "fp8": _fp8, "fp8_channel": _fp8_channel, "fp8_block": _fp8_block, "nvfp4": _nvfp4,
    "w4a16_nvfp4": _w4a16_nvfp4, "int4_awq": _int4_awq,
}  # fmt: skip
assert tuple(_LOWERINGS) == NATIVE
