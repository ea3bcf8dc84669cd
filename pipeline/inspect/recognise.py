"""The format of a module's weight, from the names, types and shapes of its tensors.

Wider than what `convert` reads: a weight whose scales are odd, or that nothing here can dequantise, still gets a name.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.checkpoint.reader import TensorInfo
from pipeline.core.errors import ConfigError
from pipeline.layouts import MAIN_LEAVES, SCALE_LEAVES, Form, forms_like

__all__ = ["ALGORITHMS", "CT", "PLAIN", "SCALE_LEAVES", "UNKNOWN", "may_be", "recognise"]

UNKNOWN = "unknown"
PLAIN = ("bf16", "f16", "f32")
CT = "compressed-tensors"
_NAMES = {
    ("modelopt", "fp8_channel"): "fp8_per_channel", ("modelopt", "w4a16_nvfp4"): "nvfp4_weight_only",
    ("compressed_tensors", "fp8"): "fp8", ("compressed_tensors", "fp8_channel"): "fp8_per_channel",
    ("compressed_tensors", "w4a16_nvfp4"): f"{CT} nvfp4", ("compressed_tensors", "int4_awq"): f"{CT} int4",
    ("autoawq", "int4_awq"): "awq", ("gptq", "int4_awq"): "gptq",
}  # fmt: skip
"""Layout and format -> what it is called where that is neither the format's name nor `compressed-tensors` before it."""
ALGORITHMS = {
    "fp8_block": "FP8_BLOCK_SCALES",
    "fp8": "FP8",
    "fp8_per_channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "nvfp4_weight_only": "W4A16_NVFP4",
    "w4a8_nvfp4_fp8": "W4A8_NVFP4_FP8",
    "mxfp4": "W4A16_MXFP4",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "int8": "INT8",
    f"{CT} nvfp4": CT,
    f"{CT} mxfp4": CT,
    f"{CT} int4": CT,
    f"{CT} fp8_block": CT,
}
"""Format -> as checkpoints declare it."""
_SCHEMES = {
    "fp8_per_channel": ("fp8_channel",), f"{CT} fp8_block": ("fp8_block",), f"{CT} mxfp4": ("mxfp4",),
    f"{CT} nvfp4": ("nvfp4", "w4a16_nvfp4"), f"{CT} int4": ("int4_awq", "w4a8_awq"),
}  # fmt: skip
"""Format -> those that a config group of compressed-tensors may call it, where that is not its own name."""
Shape = tuple[int, ...]


def may_be(found: str, item: str) -> bool:
    """Whether tensors in the format `found` can be what a config group of compressed-tensors calls `item`."""
    return item in _SCHEMES.get(found, (found,))


def recognise(tensors: Mapping[str, TensorInfo]) -> tuple[str, Shape]:
    """Format, and the shape of the weight that is meant; `tensors` go by what follows the module's name."""
    leaf = next((leaf for leaf in MAIN_LEAVES if leaf in tensors), None)
    scales = SCALE_LEAVES & tensors.keys()
    if leaf is None:
        first = next(iter(tensors.values()))
        return (UNKNOWN, ()) if scales else (first.dtype.lower(), first.shape)
    main = tensors[leaf]
    if main.dtype in ("BF16", "F16", "F32") and not scales:
        return main.dtype.lower(), main.shape
    if main.dtype == "I8" and "weight_scale" in scales:
        return "int8", main.shape
    forms = forms_like(main.dtype, (leaf, *scales))
    form = next((form for form in forms if _fits(form, main, tensors)), forms[0] if forms else None)
    return (UNKNOWN, main.shape) if form is None else (_name(form), form.shape_of(main.shape))


def _fits(form: Form, main: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    try:
        return form.misfit("", tensors, form.shape_of(main.shape)) is None
    except ConfigError:
        return False


def _name(form: Form) -> str:
    own = form.item.name if form.layout == "modelopt" else f"{form.layout.replace('_', '-')} {form.item.name}"
    return _NAMES.get((form.layout, form.item.name), own)
