"""AutoAWQ's layout (version gemm), which vLLM, SGLang and transformers load; INT4 in groups only.

For a layer X [N, K], everything transposed: `qweight` I32 [K, N/8], eight outputs a word, of which the i-th lowest nibble
is output 0, 2, 4, 6, 1, 3, 5, 7; `qzeros` I32 [K/128, N/8], packed alike; `scales` F16 [K/128, N]. The weight is
(code - zero) * scale with unsigned codes. Written weights are symmetric: every zero point is 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from pipeline.formats.int4_awq import INT4_AWQ, ones
from pipeline.formats.numerics import Array
from pipeline.layouts.base import Field, Form, Shape, Table, Written
from pipeline.layouts.int4 import codes_of, packed_of, signed_zero_point, to_float32, unsigned_zero_point, unwords, words
from pipeline.layouts.patterns import excluded

__all__ = ["AUTOAWQ", "AutoAwq", "grouped"]

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUPS = (128, 32, 64)
"""Group sizes; the first is written, the others are read."""
Conversion = Callable[[Array], Array]


def grouped(size: int, store: Conversion, load: Conversion, codes: Field, *more: Field) -> tuple[Field, ...]:
    """The fields of AutoAWQ's and GPTQ's forms: codes, zero points with both ways of theirs, scales, and what GPTQ adds."""
    zeros = Field(
        name="qzeros", role="weight_zero_point", dtypes=("I32",), shape=lambda shape: (shape[1] // size, shape[0] // 8),
        store=store, load=load, make=lambda shape: store(np.zeros((shape[0], shape[1] // size), np.int8)),
    )  # fmt: skip
    scales = Field(
        name="scales", role="weight_scale", dtypes=("F16", "BF16", "F32"), shape=lambda shape: (shape[1] // size, shape[0]),
        store=lambda scales: np.ascontiguousarray(scales.astype(np.float16).T),
        load=lambda scales: to_float32(np.ascontiguousarray(scales.T)),
    )  # fmt: skip
    return codes, zeros, scales, *more


def _form(size: int) -> Form:
    codes = Field(
        name="qweight", role="weight", dtypes=("I32",), shape=lambda shape: (shape[1], shape[0] // 8),
        store=lambda packed: words(np.ascontiguousarray(codes_of(packed).T), ORDER),
        load=lambda packed: packed_of(unwords(packed, ORDER).T),
    )  # fmt: skip
    fields = grouped(size, _store_zeros, _load_zeros, codes)
    item = INT4_AWQ if size == INT4_AWQ.group_size else replace(INT4_AWQ, group_size=size)
    return Form(
        layout="autoawq", item=item, fields=fields, unpacked=_unpacked, implied={"pre_quant_scale": ones},
        written=size == GROUPS[0],
    )  # fmt: skip


def _store_zeros(signed: Array) -> Array:
    """I8 [N, groups] -> I32 [groups, N/8]"""
    return words(np.ascontiguousarray(unsigned_zero_point(signed).T), ORDER)


def _load_zeros(packed: Array) -> Array:
    return signed_zero_point(unwords(packed, ORDER).T)


def _unpacked(codes: Shape) -> Shape:
    return codes[1] * 8, codes[0]


@dataclass(frozen=True, slots=True)
class AutoAwq:
    """See the module."""

    name: str = "autoawq"
    reader: str = "vLLM, SGLang and transformers"
    forms: tuple[Form, ...] = tuple(_form(size) for size in GROUPS)
    scale_rounding: tuple[str, ...] = ("BF16", "F16")
    """Loaders hold scales in the model's BF16, files in F16: both without loss."""

    def tables(self, written: Iterable[Written], kv_cache: str) -> tuple[Table | None, Table | None]:
        """Loaders look for the entries of modules_to_not_convert anywhere in a layer's name."""
        matrices = list(written)
        if all(matrix.item is None for matrix in matrices):
            return None, None
        return {
            "quant_method": "awq", "bits": 4, "group_size": GROUPS[0], "zero_point": True, "version": "gemm",
            "modules_to_not_convert": [pattern.removesuffix("*") for pattern in excluded(matrices)],
        }, None  # fmt: skip


AUTOAWQ = AutoAwq()
