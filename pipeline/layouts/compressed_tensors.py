"""The layout of llm-compressor and the compressed-tensors library, which vLLM loads.

Per format of a layer X [N, K]:

    nvfp4, w4a16_nvfp4  weight_packed U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_global_scale F32 [1] =
                        1 / weight_scale_2, and for nvfp4 input_global_scale F32 [1] = 1 / input_scale. Readers divide
                        by it, so float32 weights may differ from the canonical ones in the last bit
    fp8, fp8_channel    weight F8_E4M3, weight_scale F32 [1] or [N, 1], for fp8 also input_scale F32 [1]
    fp8_block           weight F8_E4M3, weight_scale F32 [N/128, K/128]
    mxfp8               weight F8_E4M3, weight_scale U8 [N, K/32]
    mxfp4               weight_packed U8 [N, K/2], weight_scale U8 [N, K/32]
    int4_awq, w4a8_awq  weight_packed I32 [N, K/8], weight_scale BF16 [N, K/128], weight_shape I64 [2]. Loaders hold scales
                        in BF16, so they are rounded to it before codes are computed. The activations of w4a8_awq get
                        their scale at run time. weight_zero_point I32 [N/8, K/128] is read

llm-compressor stores float scales in the type of the model, often BF16: they are read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.core.errors import ConfigError
from pipeline.formats import FORMATS, Format
from pipeline.formats.int4_awq import INT4_AWQ, ones
from pipeline.formats.numerics import Array
from pipeline.layouts.base import Field, Form, Shape, Table, Written
from pipeline.layouts.int4 import codes_of, packed_of, signed_zero_point, to_bf16, to_float32, unwords, words
from pipeline.layouts.patterns import as_regex, exclude_patterns

__all__ = ["COMPRESSED_TENSORS", "CompressedTensors", "scheme_of"]

VERSION = "0.20.1"
"""Of the library whose schema is written."""
FLOATS = ("F32", "BF16", "F16")
MTP_LAYER = re.compile(r"(model\\.layers\\.\d+\\.)")
GROUPS = (128, 32, 64)
"""Group sizes of INT4; the first is written, the others are read."""


def _reciprocal(array: Array) -> Array:
    with np.errstate(divide="ignore", over="ignore"):
        return np.float32(1) / array


def _stored_reciprocal(array: Array) -> Array:
    if not np.isfinite(found := _reciprocal(array)).all():
        raise ConfigError(
            f"A tensor-wide scale is {float(array.reshape(())):.3g}, whose reciprocal, which compressed-tensors stores, is beyond "
            f"float32: a weight that small is as good as zero; set it to zero, or quant.layout=modelopt."
        )
    return found


def _same_shape(shape: Shape) -> Shape:
    return shape


def _one(shape: Shape) -> Shape:
    return (1,)


def _by_group(size: int) -> Any:
    return lambda shape: (shape[0], shape[1] // size)


def _half(shape: Shape) -> Shape:
    return shape[0], shape[1] // 2


CODES8 = Field(name="weight", role="weight", dtypes=("F8_E4M3",), shape=_same_shape)
CODES4 = Field(name="weight_packed", role="weight", dtypes=("U8",), shape=_half)
GLOBAL = Field(
    name="weight_global_scale", role="weight_scale_2", dtypes=("F32",), shape=_one, store=_stored_reciprocal, load=_reciprocal
)
INPUT_GLOBAL = replace(GLOBAL, name="input_global_scale", role="input_scale")
INPUT = Field(name="input_scale", role="input_scale", dtypes=FLOATS, shape=_one, load=to_float32)
MX_SCALE = Field(
    name="weight_scale", role="weight_scale", dtypes=("U8", "F8_E8M0"), shape=_by_group(32), load=lambda array: array.view(np.uint8)
)
BLOCK_SCALE = Field(name="weight_scale", role="weight_scale", dtypes=("F8_E4M3",), shape=_by_group(16))


def _scale(shape: Any, role: str = "weight_scale") -> Field:
    return Field(name="weight_scale", role=role, dtypes=FLOATS, shape=shape, load=to_float32)


def _form(name: str, *fields: Field, written: bool = True) -> Form:
    return Form(layout="compressed_tensors", item=FORMATS[name], fields=fields, written=written)


def _weight_shape(shape: Shape) -> Array:
    return np.array(shape, np.int64)


def _zero_points(packed: Array) -> Array:
    """I32 [N/8, groups], packed along N -> I8 [N, groups]"""
    return signed_zero_point(unwords(np.ascontiguousarray(packed.T)).T)


def _int4(item: Format, group: int, zero_points: bool) -> Form:
    fields = [
        Field(name="weight_packed", role="weight", dtypes=("I32",), shape=lambda shape: (shape[0], shape[1] // 8),
              store=lambda packed: words(codes_of(packed)), load=lambda packed: packed_of(unwords(packed))),
        Field(name="weight_scale", role="weight_scale", dtypes=("BF16", "F16", "F32"), shape=_by_group(group),
              store=to_bf16, load=to_float32),
        Field(name="weight_shape", dtypes=("I64", "I32"), shape=lambda shape: (2,), make=_weight_shape),
    ]  # fmt: skip
    if zero_points:
        shape = lambda shape: (shape[0] // 8, shape[1] // group)  # noqa: E731
        fields.append(
            Field(name="weight_zero_point", role="weight_zero_point", dtypes=("I32",), shape=shape, load=_zero_points)
        )
    return Form(
        layout="compressed_tensors", item=item, fields=tuple(fields), implied={"pre_quant_scale": ones},
        unpacked=lambda shape: (shape[0], shape[1] * 8), written=not zero_points and group == GROUPS[0],
    )  # fmt: skip


FORMS = (
    _form("nvfp4", CODES4, BLOCK_SCALE, GLOBAL, INPUT_GLOBAL),
    _form("w4a16_nvfp4", CODES4, BLOCK_SCALE, GLOBAL),
    _form("fp8", CODES8, _scale(_one), INPUT),
    _form("fp8", CODES8, _scale(_one), written=False),
    _form("fp8_channel", CODES8, _scale(lambda shape: (shape[0], 1))),
    _form("fp8_block", CODES8, _scale(lambda shape: (-(-shape[0] // 128), -(-shape[1] // 128)), "weight_scale_inv")),
    _form("mxfp8", CODES8, MX_SCALE),
    _form("mxfp4", CODES4, MX_SCALE),
    *(_int4(replace(INT4_AWQ, group_size=size) if size != INT4_AWQ.group_size else INT4_AWQ, size, zero)
      for zero in (False, True) for size in GROUPS),
    _int4(FORMATS["w4a8_awq"], GROUPS[0], False),
)  # fmt: skip


def _weights(bits: int, kind: str, strategy: str, group: int | None = None, **more: Any) -> Table:
    return {"num_bits": bits, "type": kind, "symmetric": True, "group_size": group, "strategy": strategy, "dynamic": False} | more


E4M3_SCALES = {"scale_dtype": "torch.float8_e4m3fn"}
E8M0_SCALES = {"scale_dtype": "torch.uint8"}
MINMAX = {"observer": "static_minmax"}
NVFP4 = _weights(4, "float", "tensor_group", 16, **E4M3_SCALES)
MXFP8 = _weights(8, "float", "group", 32, **E8M0_SCALES)
PER_TENSOR = _weights(8, "float", "tensor")
PER_TOKEN = _weights(8, "float", "token", dynamic=True)
INT4 = _weights(4, "int", "group", 128)
SCHEMES: dict[str, tuple[str, Table, Table | None]] = {
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, NVFP4 | {"dynamic": "local"} | MINMAX),
    "w4a16_nvfp4": ("nvfp4-pack-quantized", NVFP4, None),
    "fp8": ("float-quantized", PER_TENSOR, PER_TENSOR | MINMAX),
    "fp8_channel": ("float-quantized", _weights(8, "float", "channel"), PER_TOKEN),
    "fp8_block": (
        "float-quantized", _weights(8, "float", "block", block_structure=[128, 128]),
        _weights(8, "float", "group", 128, dynamic=True),
    ),
    "mxfp8": ("mxfp8-quantized", MXFP8, MXFP8 | {"dynamic": True}),
    "mxfp4": ("mxfp4-pack-quantized", _weights(4, "float", "group", 32, **E8M0_SCALES), None),
    "int4_awq": ("pack-quantized", INT4, None),
    "w4a8_awq": ("pack-quantized", INT4, PER_TOKEN),
}  # fmt: skip
"""Format -> the library's name of the packing, and its schemes of weights and activations."""


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """See the module."""

    name: str = "compressed_tensors"
    reader: str = "vLLM and transformers"
    forms: tuple[Form, ...] = FORMS
    scale_rounding: tuple[str, ...] = ("BF16",)

    def tables(self, written: Iterable[Written], kv_cache: str) -> tuple[Table | None, Table | None]:
        """A config group for each format; what is not quantised is listed under `ignore`."""
        matrices = list(written)
        modules = {matrix.module: matrix.item.name for matrix in matrices if matrix.item is not None}
        if not modules:
            return None, None
        names = sorted(set(modules.values()))
        packings = sorted({SCHEMES[name][0] for name in names})
        mtp = {matrix.module for matrix in matrices if matrix.mtp}
        plain = {matrix.module for matrix in matrices if matrix.item is None}
        targets = {name: _targets(modules, plain, mtp, name) for name in names} if len(names) > 1 else {names[0]: ["Linear"]}
        return {
            "quant_method": "compressed-tensors",
            "format": packings[0] if len(packings) == 1 else "mixed-precision",
            "config_groups": {f"group_{i}": _group(name, targets[name]) for i, name in enumerate(names)},
            "ignore": _patterns(plain, modules.keys(), mtp),
            "kv_cache_scheme": _weights(8, "float", "tensor") if kv_cache == "fp8" else None,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "version": VERSION,
        }, None


def scheme_of(group: Table) -> str | None:
    """The format that a config group of the library describes; None: none that is known here."""
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    for name, (_, wanted, coded) in SCHEMES.items():
        if _alike(weights, wanted) and (activations is None) == (coded is None) and _alike(activations or {}, coded or {}):
            return name
    return None


def _alike(one: Table, two: Table) -> bool:
    """In what decides how weights are stored or activations coded."""
    return all(one.get(key) == two.get(key) for key in ("num_bits", "type", "strategy", "group_size", "dynamic"))


def _group(name: str, targets: list[str]) -> Table:
    packing, weights, activations = SCHEMES[name]
    scheme = {"weights": weights, "input_activations": activations, "output_activations": None, "format": packing}
    return {"targets": targets} | scheme


def _targets(modules: dict[str, str], plain: set[str], mtp: set[str], name: str) -> list[str]:
    mine = {module for module, item in modules.items() if item == name}
    return _patterns(mine, plain | (modules.keys() - mine), mtp)


def _patterns(wanted: Iterable[str], others: Iterable[str], mtp: set[str]) -> list[str]:
    """Expressions that match `wanted` and none of `others`. vLLM keeps the decoder block of an MTP layer in `mtp_block`."""
    wanted, others = set(wanted), set(others)
    usual = [as_regex(pattern) for pattern in exclude_patterns(wanted - mtp, others)]
    late = [MTP_LAYER.sub(r"\1(mtp_block\\.)?", as_regex(pattern)) for pattern in exclude_patterns(wanted & mtp, others)]
    return [f"re:{expression}" for expression in sorted({*usual, *late})]


COMPRESSED_TENSORS = CompressedTensors()
