"""The one place that chooses between compiled kernels and the numpy reference; the bytes are the same.

All functions take the stored tensors of a linear layer, by what follows its module's name, or those of a strip of its
rows; a strip starts at a multiple of 128 rows, which no scale crosses. They are safe to call from several threads, and
the kernels release the GIL. What has no kernel, vectors or exact NVFP4 from float32 for instance, is computed in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline import native
from pipeline.formats.base import Format, amax_of, tensor_scale
from pipeline.formats.bf16 import Bf16
from pipeline.formats.fp8 import Fp8
from pipeline.formats.fp8_block import Fp8Block
from pipeline.formats.fp8_channel import Fp8Channel
from pipeline.formats.int4_awq import Int4Awq, scalars
from pipeline.formats.mxfp4 import Mxfp4
from pipeline.formats.mxfp8 import Mxfp8
from pipeline.formats.numerics import BF16, E4M3, E4M3_MAX, Array
from pipeline.formats.nvfp4 import Nvfp4
from pipeline.formats.nvfp4_search import REACH, last_code, unit_scale
from pipeline.formats.row_errors import RowErrors, row_errors

__all__ = ["NotFiniteError", "amax", "errors", "filled", "requantize", "sees_nan"]

Tensors = Mapping[str, Array]
Outputs = dict[str, Array]
_FLOATS = {BF16: "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}


class NotFiniteError(ValueError):
    """A weight is NaN."""


def sees_nan(source: Format, target: Format) -> bool:
    """Whether `requantize` refuses NaN itself, so that a quick `amax` is enough: from FP8 blocks to NVFP4."""
    return isinstance(source, Fp8Block) and isinstance(target, Nvfp4)


def requantize(
    source: Format,
    tensors: Tensors,
    target: Format,
    *,
    amax: float,
    input_scale: float,
    exact: bool = False,
    out: Tensors | None = None,
) -> Outputs:
    """From one format to another, by way of BF16 unless `exact`; `amax` is that of all layers fused with this one.

    `out` may give arrays to fill, by suffix, for any of the target's tensors; the result then holds these arrays.

    Raises:
        NotFiniteError: if a weight is NaN, where it `sees_nan`.
    """
    call = Call(target, amax, input_scale, exact, out or {})
    kernels, stored = native.kernels(), describe(source, tensors)
    if kernels is not None and stored is not None and _takes(source, tensors, target, exact):
        made = _by_kernel(kernels, stored, call, _shape(source, tensors))
        if made is not None:
            return made
    weight = source.dequantize(tensors)
    if sees_nan(source, target) and np.isnan(weight).any():
        raise NotFiniteError
    made = target.quantize(weight if exact else weight.astype(BF16), amax=amax, input_scale=input_scale)
    return filled(call.out, made)


def amax(source: Format, tensors: Tensors, *, exact: bool = False, quick: bool = False) -> float:
    """Largest magnitude of the weight, rounded to BF16 unless `exact`; NaN if any element is.

    `quick` may pass over FP8 blocks whose scale allows no larger magnitude, and so over a NaN in them.
    """
    kernels, stored = native.kernels(), describe(source, tensors)
    if kernels is not None and stored is not None:
        return float(kernels.amax(stored, exact, quick))
    return amax_of(source.dequantize(tensors)) if exact else source.amax(tensors)


def errors(source: Format, before: Tensors, target: Format, after: Tensors, limit: float) -> RowErrors:
    """Squared signal and error, largest error and clipped elements (|w| > limit) of each row of a converted weight."""
    kernels, wanted, got = native.kernels(), describe(source, before), describe(target, after)
    if kernels is None or wanted is None or got is None:
        return row_errors(source.dequantize(before), target.dequantize(after), limit)
    result = RowErrors.empty(_shape(source, before)[0])
    kernels.errors(wanted, got, limit, result.signal, result.noise, result.max_abs, result.clipped)
    return result


def filled(out: Tensors, made: Outputs) -> Outputs:
    """The arrays of `out` with what was made, by suffix; what was made where `out` has none."""
    given = {suffix: out[suffix] for suffix in made if suffix in out}
    for suffix, array in given.items():
        array[...] = made[suffix]
    return made | given


def describe(item: Format, tensors: Tensors) -> Any | None:
    """The tensors as kernels take them; None where they take no such."""
    weight = tensors["weight"]
    if native.kernels() is None or weight.ndim != 2 or weight.size == 0:
        return None
    layout = _FLOATS.get(weight.dtype) if isinstance(item, Bf16) else _LAYOUTS.get(type(item))
    if layout is None or (isinstance(item, Int4Awq) and (item.group_size != 128 or "weight_zero_point" in tensors)):
        return None
    arrays = {suffix: np.require(array, requirements=("C", "A")) for suffix, array in tensors.items()}
    options: dict[str, Any] = {}
    scale = arrays.get("weight_scale_inv", arrays.get("weight_scale"))
    if isinstance(item, Nvfp4):
        options = {"scale_2": float(arrays["weight_scale_2"].reshape(())), "group": item.group_size}
    elif isinstance(item, Fp8):
        options, scale = {"scale_2": float(arrays["weight_scale"].reshape(()))}, None
    elif isinstance(item, Int4Awq):
        options = {"factors": arrays["pre_quant_scale"]}
    return native.module().Tensor(layout, *_shape(item, tensors), arrays["weight"], scale, **options)


_LAYOUTS: dict[type, str] = {
    Fp8: "fp8", Fp8Block: "fp8_block", Fp8Channel: "fp8_channel",
    Nvfp4: "nvfp4", Mxfp4: "mxfp4", Mxfp8: "mxfp8", Int4Awq: "int4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """What `requantize` was asked for."""

    target: Format
    amax: float
    input_scale: float
    exact: bool
    out: Tensors

    def array(self, suffix: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The caller's array, or a new one."""
        given = self.out.get(suffix)
        if given is None:
            return np.empty(shape, dtype)
        if given.shape != shape or given.dtype != np.dtype(dtype):
            raise ValueError(f"out[{suffix!r}] is {given.dtype} {given.shape}, but must be {np.dtype(dtype)} {shape}")
        return given


def _shape(item: Format, tensors: Tensors) -> tuple[int, int]:
    """[N, K] of the weight that is meant."""
    (n, k), (along_n, along_k) = tensors["weight"].shape, item.packing
    return n * along_n, k * along_k


def _takes(source: Format, tensors: Tensors, target: Format, exact: bool) -> bool:
    """Whether the conversion has a kernel, which only depends on the source's numbers for FP8 blocks: their kernels take
    the order of codes for that of values, so scales must be finite and not negative."""
    if exact and tensors["weight"].dtype != BF16 and not (isinstance(source, Fp8Block) and isinstance(target, Nvfp4)):
        return False
    if isinstance(target, Int4Awq) and not _plain_int4(target):
        return False
    scales = tensors["weight_scale_inv"] if isinstance(source, Fp8Block) else np.zeros(1)
    return bool(np.isfinite(scales).all() and not np.signbit(scales).any())


def _plain_int4(item: Int4Awq) -> bool:
    return item.group_size == 128 and not item.scale_rounding


def _by_kernel(kernels: Any, stored: Any, call: Call, shape: tuple[int, int]) -> Outputs | None:
    """The target's tensors; None where there is no kernel for it or the shape does not fit."""
    make = _KERNELS.get(type(call.target))
    if make is None or shape[1] % (call.target.group_size or 1) or shape[0] % call.target.packing[0]:
        return None
    return make(kernels, stored, call, *shape)


def _bf16(kernels: Any, stored: Any, call: Call, n: int, k: int) -> Outputs:
    made = {"weight": call.array("weight", (n, k), BF16)}
    kernels.bf16(stored, made["weight"])
    return made


def _fp8(kernels: Any, stored: Any, call: Call, n: int, k: int) -> Outputs:
    scale = tensor_scale(call.amax, E4M3_MAX)
    made = {"weight": call.array("weight", (n, k), E4M3)}
    kernels.fp8(stored, scale, made["weight"])
    scalar = {"weight_scale": np.array(scale), "input_scale": np.array(call.input_scale, np.float32)}
    return made | filled(call.out, scalar)


def _fp8_channel(kernels: Any, stored: Any, call: Call, n: int, k: int) -> Outputs:
    made = {"weight": call.array("weight", (n, k), E4M3), "weight_scale": call.array("weight_scale", (n,), np.float32)}
    kernels.fp8_channel(stored, made["weight"], made["weight_scale"])
    return made


def _mxfp8(kernels: Any, stored: Any, call: Call, n: int, k: int) -> Outputs:
    made = {"weight": call.array("weight", (n, k), E4M3), "weight_scale": call.array("weight_scale", (n, k // 32), np.uint8)}
    kernels.mxfp8(stored, made["weight"], made["weight_scale"])
    return made


def _mxfp4(kernels: Any, stored: Any, call: Call, n: int, k: int) -> Outputs:
    made = {
        "weight": call.array("weight", (n, k // 2), np.uint8),
        "weight_scale": call.array("weight_scale", (n, k // 32), np.uint8),
    }
    kernels.mxfp4(stored, made["weight"], made["weight_scale"])
    return made


def _int4(kernels: Any, stored: Any, call: Call, n: int, k: int) -> Outputs:
    target = call.target
    assert isinstance(target, Int4Awq)
    made = {
        "weight": call.array("weight", (n // 2, k), np.uint8),
        "weight_scale": call.array("weight_scale", (n, k // 128), np.float32),
    }
    kernels.int4(stored, made["weight"], made["weight_scale"])
    rest = {"pre_quant_scale": np.ones(k, BF16)} | (scalars(call.amax, call.input_scale) if target.tensor_scale else {})
    return made | filled(call.out, rest)


def _nvfp4(kernels: Any, stored: Any, call: Call, n: int, k: int) -> Outputs:
    target = call.target
    assert isinstance(target, Nvfp4)
    scale_2 = target.scale_2(call.amax)
    made = {
        "weight": call.array("weight", (n, k // 2), np.uint8),
        "weight_scale": call.array("weight_scale", (n, k // target.group_size), E4M3),
    }
    how = native.module().Nvfp4(
        scale_2, group=target.group_size, exact=call.exact, search=target.search if call.amax else "amax", amax=call.amax,
        unit=unit_scale(target.largest), reach=REACH.get(target.search, 0), last_code=last_code(target.largest),
    )  # fmt: skip
    if not kernels.nvfp4(stored, how, made["weight"], made["weight_scale"]):
        raise NotFiniteError
    rest = {"weight_scale_2": np.array(scale_2)}
    if target.static_input:
        rest["input_scale"] = np.array(call.input_scale, np.float32)
    return made | filled(call.out, rest)


_KERNELS: dict[type, Callable[..., Outputs]] = {
    Bf16: _bf16, Fp8: _fp8, Fp8Channel: _fp8_channel, Mxfp8: _mxfp8, Mxfp4: _mxfp4, Int4Awq: _int4, Nvfp4: _nvfp4,
}  # fmt: skip
