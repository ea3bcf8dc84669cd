"""The format of a module's weight, from the names, types and shapes of its tensors.

Wider than what `convert` reads: also what other tools write, so that it can be named instead of called garbage.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from pipeline.checkpoint.reader import TensorInfo

__all__ = ["ALGORITHMS", "PLAIN", "SCALE_LEAVES", "UNKNOWN", "recognise"]

UNKNOWN = "unknown"
PLAIN = ("bf16", "f16", "f32")
SCALE_LEAVES = frozenset(
    {"weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale", "weight_global_scale", "input_global_scale",
     "pre_quant_scale", "scales", "qzeros", "g_idx", "weight_zero_point", "weight_shape"}
)  # fmt: skip
ALGORITHMS = {
    "fp8_block": "FP8_BLOCK_SCALES",
    "fp8": "FP8",
    "fp8_per_channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "nvfp4_weight_only": "W4A16_NVFP4",
    "mxfp4": "MXFP4",
    "int4_awq": "W4A16_AWQ",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "int8": "INT8",
    "compressed-tensors nvfp4": "compressed-tensors",
    "compressed-tensors mxfp4": "compressed-tensors",
    "compressed-tensors int4": "compressed-tensors",
    "compressed-tensors fp8_block": "compressed-tensors",
}
"""Format -> as checkpoints declare it."""
_E8M0 = ("U8", "F8_E8M0")
Shape = tuple[int, ...]


def recognise(tensors: Mapping[str, TensorInfo]) -> tuple[str, Shape]:
    """Format, and the shape of the weight that is meant; `tensors` go by what follows the module's name."""
    if "qweight" in tensors:
        return _int4_packed(tensors["qweight"], tensors)
    if "weight_packed" in tensors:
        return _compressed(tensors["weight_packed"], tensors)
    if "weight" in tensors:
        return _weight(tensors["weight"], tensors)
    if SCALE_LEAVES & tensors.keys():
        return UNKNOWN, ()
    first = next(iter(tensors.values()))
    return first.dtype.lower(), first.shape


def _weight(weight: TensorInfo, tensors: Mapping[str, TensorInfo]) -> tuple[str, Shape]:
    scales = SCALE_LEAVES & tensors.keys()
    if weight.dtype in ("BF16", "F16", "F32") and not scales:
        return weight.dtype.lower(), weight.shape
    if weight.dtype == "F8_E4M3" and "weight_scale_inv" in scales:
        return "fp8_block", weight.shape
    if "weight_scale" not in scales:
        return UNKNOWN, weight.shape
    scale = tensors["weight_scale"]
    if weight.dtype == "F8_E4M3":
        return _fp8(scale), weight.shape
    if weight.dtype == "I8":
        return "int8", weight.shape
    if weight.dtype == "U8":
        return _four_bits(weight, scale, scales)
    return UNKNOWN, weight.shape


def _fp8(scale: TensorInfo) -> str:
    if scale.dtype in _E8M0:
        return "mxfp8"
    if prod(scale.shape) == 1:
        return "fp8"
    matrix = len(scale.shape) == 2 and scale.shape[1] > 1
    return "compressed-tensors fp8_block" if matrix else "fp8_per_channel"


def _four_bits(weight: TensorInfo, scale: TensorInfo, scales: frozenset[str]) -> tuple[str, Shape]:
    doubled = (*weight.shape[:-1], weight.shape[-1] * 2) if weight.shape else ()
    if scale.dtype == "F8_E4M3" and "weight_scale_2" in scales:
        return "nvfp4" if "input_scale" in scales else "nvfp4_weight_only", doubled
    if scale.dtype in _E8M0:
        return "mxfp4", doubled
    if scale.dtype in ("F32", "BF16") and len(weight.shape) == 2 == len(scale.shape):
        return "int4_awq", (weight.shape[0] * 2, weight.shape[1])  # ModelOpt packs pairs of output channels
    return UNKNOWN, weight.shape


def _int4_packed(packed: TensorInfo, tensors: Mapping[str, TensorInfo]) -> tuple[str, Shape]:
    """GPTQ packs eight inputs into an I32 [in/8, out], AWQ eight outputs into an I32 [in, out/8]."""
    scales = tensors.get("scales")
    if packed.dtype != "I32" or len(packed.shape) != 2 or scales is None or len(scales.shape) != 2:
        return UNKNOWN, packed.shape
    rows, columns = packed.shape
    if "g_idx" in tensors or columns == scales.shape[1]:
        return "gptq", (columns, rows * 8)
    return "awq", (columns * 8, rows)


def _compressed(packed: TensorInfo, tensors: Mapping[str, TensorInfo]) -> tuple[str, Shape]:
    scale = tensors.get("weight_scale")
    if scale is None or len(packed.shape) != 2:
        return UNKNOWN, packed.shape
    rows, columns = packed.shape
    if packed.dtype == "I32":
        return "compressed-tensors int4", (rows, columns * 8)
    if scale.dtype == "F8_E4M3":
        return "compressed-tensors nvfp4", (rows, columns * 2)
    return ("compressed-tensors mxfp4" if scale.dtype in _E8M0 else UNKNOWN), (rows, columns * 2)
