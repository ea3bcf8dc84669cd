"""Hidden states on their way to other ranks: in their own type, or in NVFP4, 3.6 times fewer bytes than BF16.

TensorRT's collectives take neither FP4 nor FP8 tensors, so a row [H] travels as INT8 [9 H / 16]: the E2M1 codes of 16 elements in
8 bytes, the even element in the low nibble, then the E4M3 scales' bytes, each less 128. The bytes are computed by elementwise
layers in float32, so this builds for SM80 and up. They are those of `plugins.fp4_allgather` ("nvfp4"), but for codes of a negative
zero.

The scale of the whole tensor must be the same on all ranks, so it is none of the tokens' own: the calibrated input_scale of the
experts, where their weights have one, and then experts in NVFP4 compute the same as without this, because they would round tokens
to these very values. Else the largest magnitude that an RMSNorm can give, sqrt(H) times its largest weight, over 2688.

Shape legend: N tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.spec import FP4_BLOCK as BLOCK
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.plugins import offered
from pipeline.formats.numerics import E4M3, Array, decode_e2m1

__all__ = ["LARGEST", "pack", "travel", "unpack"]

LARGEST = 2688.0
"""6 * 448: the largest code times the largest scale."""
CODES = ((0.0, 2.0, 2.0), (2.0, 2.0, 1.0), (4.0, 2.0, 0.5))
"""E2M1 as a line in pieces: from where, how wide, codes for each unit; within a piece codes are evenly spaced."""
SCALES = ((0.0, 2.0**-5, 2.0**9), *((2.0**e, 2.0**e, 2.0 ** (3 - e)) for e in range(-5, 8)), (2.0**8, 192.0, 2.0**-5))
"""E4M3 in the same way, up to its 448."""
Pieces = tuple[tuple[float, float, float], ...]


def travel(net: Graph, spec: Spec, x: Tensor, scale: Tensor | None, way: Callable[[Graph, Spec, Tensor], Tensor]) -> Tensor:
    """x [N, H] through the collective `way`, packed where `scale` is given."""
    if scale is None:
        return way(net, spec, x)
    ours = _kernels(net, spec)
    with net.scope("pack"):
        packed = ours[0](x, scale)[0] if ours else pack(net, x, scale)
    packed = way(net, spec, packed)
    with net.scope("unpack"):
        return ours[1](packed, scale)[0] if ours else unpack(net, packed, scale, spec.arch.hidden_size, x.dtype)


def _kernels(net: Graph, spec: Spec) -> tuple[Callable[..., list[Tensor]], Callable[..., list[Tensor]]] | None:
    """Both ends as plugins, or neither: their bytes are codes and scales themselves, without the 128 less."""
    if spec.dtype != "bfloat16":
        return None
    size = spec.arch.hidden_size
    there, back = (offered(net, name, [(-1, columns), (1, 1, 1)])
                   for name, columns in (("nvfp4_pack", size), ("nvfp4_unpack", size * 9 // 16)))  # fmt: skip
    return (there, back) if there and back else None


def pack(net: Graph, x: Tensor, scale: Tensor) -> Tensor:
    """[N, H] and the scale of the whole tensor, float32 [1, 1, 1] -> INT8 [N, 9 H / 16]."""
    blocks, size = net.reshape(net.float32(x), (-1, x.shape[1] // BLOCK, BLOCK)), x.shape[1]
    wanted = net.mul(net.reduce(net.abs(blocks), "MAX", 2), _reciprocal(net, net.scale(scale, 6)))
    wanted = net.select(net.less(net.scalar(0, wanted), wanted), wanted, net.scalar(1, wanted))  # a block of zeros has the scale 1
    wanted = net.maximum(wanted, net.scalar(2.0**-9, wanted))
    scale_bytes = _steps(net, wanted, SCALES)
    values = net.mul(blocks, _reciprocal(net, net.mul(_lookup(net, scale_bytes, _E4M3_VALUES), scale)))
    values = net.reshape(values, (-1, size, 1))
    signs = net.select(net.less(values, net.scalar(0, values)), net.scalar(8, values), net.scalar(0, values))
    codes = net.reshape(net.add(_steps(net, net.abs(values), CODES), signs), (-1, size // 2, 2))
    low_and_high = net.constant(np.array([1, 16], np.float32).reshape(1, 1, 2))
    code_bytes = net.reduce(net.mul(codes, low_and_high), "SUM", 2, keep=False)
    whole = net.concat([code_bytes, net.reshape(scale_bytes, (-1, size // BLOCK))], 1)
    return net.cast(net.sub(whole, net.scalar(128, whole)), net.trt.DataType.INT8)


def unpack(net: Graph, packed: Tensor, scale: Tensor, size: int, dtype: object) -> Tensor:
    """INT8 [N, 9 size / 16] -> [N, size]."""
    whole = net.cast(packed, net.trt.DataType.INT32)
    whole = net.add(whole, net.scalar(128, whole))
    pairs = net.gather(net.constant(_PAIRS), net.last(whole, 0, size // 2))
    blocks = net.reshape(pairs, (-1, size // BLOCK, BLOCK))
    scales = net.gather(net.constant(_E4M3_VALUES), net.last(whole, size // 2, size // 2 + size // BLOCK))
    scales = net.mul(net.reshape(scales, (-1, size // BLOCK, 1)), scale)
    return net.reshape(net.cast(net.mul(blocks, scales), dtype), (-1, size))


def _reciprocal(net: Graph, a: Tensor) -> Tensor:
    return net.div(net.scalar(1, a), a)


def _steps(net: Graph, value: Tensor, pieces: Pieces) -> Tensor:
    """Values [N, M, 1] of 0 and more, rounded to the nearest step, ties to even -> the step's number, in float32.

    A piece that lies below the value gives all of its steps, one above it none: the sum of whole numbers is exact.
    """
    starts, widths, slopes = (net.constant(np.array(each, np.float32).reshape(1, 1, -1)) for each in zip(*pieces, strict=True))
    inside = net.minimum(net.maximum(net.sub(value, starts), net.constant(np.zeros((1, 1, 1), np.float32))), widths)
    return net.reduce(net.round(net.mul(inside, slopes)), "SUM", 2)


def _lookup(net: Graph, numbers: Tensor, table: Array) -> Tensor:
    """table[numbers], of whole numbers in float32."""
    return net.gather(net.constant(table), net.cast(numbers, net.trt.DataType.INT32))


_BYTES = np.arange(256, dtype=np.uint8)
_E4M3_VALUES = np.nan_to_num(_BYTES.view(E4M3).astype(np.float32))
_PAIRS = decode_e2m1(_BYTES[:, None])
