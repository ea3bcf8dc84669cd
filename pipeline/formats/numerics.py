"""E4M3, E2M1, E8M0 and BF16 arithmetic in numpy, to the bit.

E4M3 (`float8_e4m3fn`): 1 sign, 4 exponent (bias 7), 3 mantissa bits; largest 448, smallest normal 2^-6, smallest
subnormal 2^-9; 0x7f and 0xff are NaN, there is no infinity. E2M1: the eight magnitudes of `E2M1_VALUES` and a sign
in bit 3. E8M0: the power of two 2^(code - 127); 0xff is NaN. Encoding rounds to nearest, ties to the even code (E8M0:
up), and saturates; NaN is the caller's to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BF16",
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3",
    "E4M3_MAX",
    "E4M3_TINY",
    "Array",
    "Float32",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "row_strips",
]

Array = NDArray
Float32 = NDArray[np.float32]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3_MAX = np.float32(448.0)
E4M3_TINY = np.float32(2.0**-9)
E2M1_MAX = np.float32(6.0)
E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)

_E4M3_TABLE = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
_E8M0_TABLE = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
_E2M1_TABLE = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
# One lookup gives both elements of a byte: [256, 2], low nibble first.
_E2M1_PAIRS = np.stack([_E2M1_TABLE[np.arange(256) & 15], _E2M1_TABLE[np.arange(256) >> 4]], axis=1)
# The upper end of each code's interval, and whether a value exactly there still rounds down (to an even code).
_E2M1_BOUNDS = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))

STRIP_ELEMENTS = 1 << 18


def row_strips(shape: tuple[int, ...], multiple: int = 1) -> Iterator[slice]:
    """Slices of rows that keep temporaries in the cache; each but the last holds a multiple of `multiple` rows."""
    rows = max(1, STRIP_ELEMENTS // max(1, shape[1]) // multiple) * multiple
    return (slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))


def encode_e4m3(values: Float32) -> Array:
    """Nearest E4M3, saturating at 448."""
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(E4M3)


def decode_e4m3(codes: Array) -> Float32:
    """E4M3 to float32; exact."""
    return _E4M3_TABLE[codes.view(np.uint8)]


def encode_e2m1(values: Float32) -> NDArray[np.uint8]:
    """Nearest E2M1 code of each value, in the low nibble, saturating at 6; -0.0 becomes +0."""
    size = np.abs(values)
    codes = np.zeros(values.shape, np.uint8)
    for bound, ties_down in _E2M1_BOUNDS:
        codes += size > bound if ties_down else size >= bound
    codes |= (values < 0).view(np.uint8) << 3
    return codes


def decode_e2m1(packed: NDArray[np.uint8]) -> Float32:
    """Bytes [..., K/2], low nibble first, to float32 [..., K]."""
    return _E2M1_PAIRS[packed].reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def encode_e8m0(values: Float32) -> NDArray[np.uint8]:
    """Code of the least power of two that is no smaller; 0 gives 2^-127."""
    mantissa, exponent = np.frexp(values)  # mantissa in [0.5, 1), so a power of two is 0.5 * 2^exponent
    codes = np.clip(exponent - (mantissa == 0.5), -127, 127) + 127
    return np.where(values > 0, codes, 0).astype(np.uint8)


def decode_e8m0(codes: NDArray[np.uint8]) -> Float32:
    """E8M0 to float32; exact."""
    return _E8M0_TABLE[codes]
