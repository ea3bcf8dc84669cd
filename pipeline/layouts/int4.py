"""INT4 codes between the canonical packing and words of eight: what the INT4 forms of three layouts share.

Canonical: U8 [N/2, K], row 2i in the low nibble, two's complement, -8 to 7. Words: I32, eight nibbles, the first in the
lowest bits unless an order says otherwise, unsigned, so that 8 stands for 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.formats.numerics import BF16, Array

__all__ = [
    "IN_ORDER", "codes_of", "packed_of", "signed_zero_point", "to_bf16", "to_float32", "unsigned_zero_point",
    "unwords", "words",
]  # fmt: skip

IN_ORDER = tuple(range(8))
SIGN = 8
"""Added to, or, the same for four bits, exclusive-ored with a code, to make it unsigned."""


def codes_of(packed: Array) -> Array:
    """Canonical U8 [N/2, K] -> unsigned codes [N, K], one a byte."""
    codes = np.empty((packed.shape[0] * 2, packed.shape[1]), np.uint8)
    codes[0::2], codes[1::2] = packed & 15, packed >> 4
    codes ^= SIGN
    return codes


def packed_of(codes: Array) -> Array:
    """The inverse of `codes_of`."""
    signed = codes ^ SIGN
    return signed[0::2] | (signed[1::2] << 4)


def words(codes: Array, order: Sequence[int] = IN_ORDER) -> Array:
    """Codes [R, C] -> I32 [R, C/8]; the i-th lowest nibble of a word is the order[i]-th of its eight codes."""
    eights = codes.reshape(codes.shape[0], -1, 8)[:, :, list(order)]
    return np.ascontiguousarray(eights[..., 0::2] | (eights[..., 1::2] << 4)).view("<i4")[..., 0]


def unwords(packed: Array, order: Sequence[int] = IN_ORDER) -> Array:
    """The inverse of `words`."""
    bytes_ = np.ascontiguousarray(packed).view(np.uint8).reshape(*packed.shape, 4)
    codes = np.empty((*packed.shape, 8), np.uint8)
    codes[..., list(order[0::2])], codes[..., list(order[1::2])] = bytes_ & 15, bytes_ >> 4
    return codes.reshape(packed.shape[0], -1)


def signed_zero_point(unsigned: Array) -> Array:
    """Unsigned zero points -> what is subtracted from a signed code."""
    return unsigned.astype(np.int8) - np.int8(SIGN)


def unsigned_zero_point(signed: Array) -> Array:
    """The inverse of `signed_zero_point`."""
    return (signed + np.int8(SIGN)).view(np.uint8)


def to_float32(array: Array) -> Array:
    """Exact."""
    return array.astype(np.float32, copy=False)


def to_bf16(array: Array) -> Array:
    """Exact for what was rounded to BF16 before it was used."""
    return array.astype(BF16)

