"""ModelOpt's layout, which TensorRT-LLM loads: canonical tensors as they are; DeepSeek's own FP8 blocks are part of it.

`config.json` has `quantization_config`, `hf_quant_config.json` is ModelOpt's own file; loaders read one or the other,
so they agree. A checkpoint whose linear layers are all in DeepSeek's FP8 blocks, or all in BF16, has no second file,
which is how TensorRT-LLM expects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.formats import FORMATS, Format
from pipeline.formats.int4_awq import ones
from pipeline.layouts.base import Field, Form, Shape, Table, Written
from pipeline.layouts.patterns import excluded

__all__ = ["AWQ_FIELDS", "MODELOPT", "PRODUCER", "ModelOpt"]

# Loaders recognise the layout by the producer's name; the version is that whose layout is written.
PRODUCER = {"name": "modelopt", "version": "0.47.0+r1.pipeline"}
FP8_BLOCK_CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}
AWQ_FIELDS = {"has_zero_point": False, "pre_quant_scale": True}
CODINGS = {"fp8": (8, True), "nvfp4": (4, True), "w4a16_nvfp4": (4, False)}
"""Formats for which ModelOpt writes config_groups -> bits, and whether activations are coded too."""


def _as_stored(shape: Shape) -> Shape:
    return shape


def _pb_wo() -> Form:
    """FP8_2D_BLOCKWISE_WEIGHT_ONLY: block scales of rank 4, which nothing else calls weight_scale."""
    scale = Field(
        name="weight_scale", role="weight_scale_inv", dtypes=("F32",),
        shape=lambda shape: (-(-shape[0] // 128), 1, -(-shape[1] // 128), 1),
    )  # fmt: skip
    weight = Field(name="weight", role="weight", dtypes=("F8_E4M3",), shape=_as_stored)
    return Form(layout="modelopt", item=FORMATS["fp8_block"], fields=(weight, scale), written=False)


def _fp8_weight_only() -> Form:
    """FP8 without an activation scale: also what FP8_2D_BLOCKWISE_WEIGHT_ONLY makes of matrices that its blocks do not fill."""
    weight = Field(name="weight", role="weight", dtypes=("F8_E4M3",), shape=_as_stored)
    scale = Field(name="weight_scale", role="weight_scale", dtypes=("F32",), shape=lambda shape: ())
    return Form(layout="modelopt", item=FORMATS["fp8"], fields=(weight, scale), written=False)


def _fused_awq() -> Form:
    """AWQ whose factors went into the norm before the layer, so that none are stored."""
    fields = (
        Field(name="weight", role="weight", dtypes=("U8",), shape=lambda shape: (shape[0] // 2, shape[1])),
        Field(name="weight_scale", role="weight_scale", dtypes=("F32",), shape=lambda shape: (shape[0], shape[1] // 128)),
    )
    return Form(layout="modelopt", item=FORMATS["int4_awq"], fields=fields, implied={"pre_quant_scale": ones}, written=False)


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """See the module."""

    name: str = "modelopt"
    reader: str = "TensorRT-LLM, vLLM and SGLang"
    forms: tuple[Form, ...] = (
        *(Form(layout="modelopt", item=item) for item in FORMATS.values()), _pb_wo(), _fp8_weight_only(), _fused_awq(),
    )  # fmt: skip
    scale_rounding: tuple[str, ...] = ()

    def tables(self, written: Iterable[Written], kv_cache: str) -> tuple[Table | None, Table | None]:
        """Both tables, from one truth."""
        matrices = list(written)
        quantised = {matrix.module: matrix.item for matrix in matrices if matrix.item is not None}
        formats = sorted({item.name for item in quantised.values()})
        if not formats:
            return None, None
        if formats == ["fp8_block"] and all(matrix.item for matrix in matrices if matrix.linear):
            return dict(FP8_BLOCK_CONFIG), None
        truth = _quantization(quantised, excluded(matrices))
        own = truth | {"kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None}
        return _inline(formats, truth, kv_cache), {"producer": PRODUCER, "quantization": own}


def _quantization(quantised: Mapping[str, Format], excluded: list[str]) -> Table:
    """Algorithm and modules, as both files spell them."""
    layers = {module: _algo(item) for module, item in sorted(quantised.items())}
    first = next(iter(layers.values()))
    if all(layer == first for layer in layers.values()):
        return first | {"exclude_modules": excluded}
    return {"quant_algo": "MIXED_PRECISION", "exclude_modules": excluded, "quantized_layers": layers}


def _algo(item: Format) -> Table:
    table: Table = {"quant_algo": item.quant_algo} | ({"group_size": item.group_size} if item.group_size else {})
    return table | (AWQ_FIELDS if str(item.quant_algo).endswith("_AWQ") else {})


def _inline(formats: list[str], truth: Table, kv_cache: str) -> Table:
    """The form of config.json: `ignore` for `exclude_modules`, and how weights and activations are coded."""
    if formats == ["fp8_block"]:
        return FP8_BLOCK_CONFIG | {"modules_to_not_convert": truth["exclude_modules"]}
    table = {name: value for name, value in truth.items() if name != "exclude_modules"}
    table |= {"quant_method": "modelopt", "producer": PRODUCER, "ignore": truth["exclude_modules"]}
    if kv_cache == "fp8":
        table["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if len(formats) == 1 and formats[0] in CODINGS:
        table["config_groups"] = {"group_0": _config_group(*CODINGS[formats[0]], truth.get("group_size"))}
    return table


def _config_group(bits: int, activations: bool, group_size: int | None) -> Table:
    coding: Table = {"dynamic": False, "num_bits": bits, "type": "float"}
    coding |= {"group_size": group_size} if group_size else {}
    return ({"input_activations": coding} if activations else {}) | {"weights": coding, "targets": ["Linear"]}


MODELOPT = ModelOpt()
