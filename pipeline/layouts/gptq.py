"""GPTQ's layout, which vLLM, SGLang and transformers load; INT4 in groups only.

For a layer X [N, K], transposed: `qweight` I32 [K/8, N], eight inputs a word, the first in the lowest nibble; `qzeros`
I32 [K/128, N/8], eight outputs a word, each zero point minus one; `scales` F16 [K/128, N]; `g_idx` I32 [K], the group of
each input, without which they are in order. That is checkpoint format "gptq"; "gptq_v2" does not take one off the zero
points, and is told apart only where all of them are 8. Written weights are symmetric, with inputs in order; weights with
another order are refused when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from pipeline.core.errors import ConfigError
from pipeline.formats.int4_awq import INT4_AWQ, ones
from pipeline.formats.numerics import Array
from pipeline.layouts.autoawq import GROUPS, grouped
from pipeline.layouts.base import Field, Form, Shape, Table, Written
from pipeline.layouts.int4 import codes_of, packed_of, signed_zero_point, unsigned_zero_point, unwords, words
from pipeline.layouts.patterns import as_regex, excluded

__all__ = ["GPTQ", "Gptq"]


def _store_zeros(signed: Array) -> Array:
    """I8 [N, groups] -> I32 [groups, N/8]"""
    return words(np.ascontiguousarray(((unsigned_zero_point(signed) - np.uint8(1)) & 15).T))


def _load_zeros(packed: Array) -> Array:
    stored = unwords(packed).T
    return signed_zero_point(stored if (stored == 8).all() else (stored + 1) & 15)


def _in_order(canonical: dict[str, Array]) -> dict[str, Array]:
    groups = canonical.pop("g_idx")
    if (np.diff(groups) < 0).any() or np.ptp(np.bincount(groups)) != 0:
        raise ConfigError(
            "A GPTQ weight has its inputs in the order of activations (desc_act, a g_idx that is not 0, ..., 0, 1, ...), "
            "which is not read here: quantise it with desc_act=false."
        )
    return canonical


def _form(size: int, ordered: bool) -> Form:
    codes = Field(
        name="qweight", role="weight", dtypes=("I32",), shape=lambda shape: (shape[1] // 8, shape[0]),
        store=lambda packed: np.ascontiguousarray(words(codes_of(packed)).T),
        load=lambda packed: packed_of(unwords(np.ascontiguousarray(packed.T))),
    )  # fmt: skip
    order = Field(
        name="g_idx", role="g_idx", dtypes=("I32",), shape=lambda shape: (shape[1],),
        make=lambda shape: np.arange(shape[1], dtype=np.int32) // np.int32(size),
    )  # fmt: skip
    item = INT4_AWQ if size == INT4_AWQ.group_size else replace(INT4_AWQ, group_size=size)
    fields = grouped(size, _store_zeros, _load_zeros, codes, *((order,) if ordered else ()))
    return Form(
        layout="gptq", item=item, fields=fields, unpacked=_unpacked, implied={"pre_quant_scale": ones},
        finish=_in_order if ordered else None, written=size == GROUPS[0] and ordered,
    )  # fmt: skip


def _unpacked(codes: Shape) -> Shape:
    return codes[1], codes[0] * 8


@dataclass(frozen=True, slots=True)
class Gptq:
    """See the module."""

    name: str = "gptq"
    reader: str = "vLLM, SGLang and transformers"
    forms: tuple[Form, ...] = tuple(_form(size, ordered) for ordered in (True, False) for size in GROUPS)
    scale_rounding: tuple[str, ...] = ("BF16", "F16")

    def tables(self, written: Iterable[Written], kv_cache: str) -> tuple[Table | None, Table | None]:
        """What is not quantised is named as GPTQModel does: a `dynamic` rule that begins with `-:`."""
        matrices = list(written)
        if all(matrix.item is None for matrix in matrices):
            return None, None
        return {
            "quant_method": "gptq", "bits": 4, "group_size": GROUPS[0], "desc_act": False, "sym": True, "lm_head": False,
            "checkpoint_format": "gptq", "dynamic": {f"-:{as_regex(pattern)}": {} for pattern in excluded(matrices)},
        }, None  # fmt: skip


GPTQ = Gptq()
