#!/usr/bin/env python3
"""By how much Hopper's FP8 products may fall short in a long sum: a model of their adder, on the CPU.

    python scripts/model_fp8_adder.py

An instruction adds 32 products to the accumulator, all aligned to the largest and cut off 13 bits below it (DeepSeek-V3's report,
section 3.3.2, says that about 14 bits are kept; and FlashAttention 3 lost long contexts by it: https://github.com/Dao-AILab/flash-attention/pull/2250).
Printed for pieces of an attention over so many tokens: values of mean 1 and standard deviation 0.5, scores of standard deviation 1
in base 2, both in E4M3, weights up to 2^8.75. The adder itself was not measured here.
"""

from __future__ import annotations

import sys

import numpy as np
from ml_dtypes import float8_e4m3fn

__all__ = ["shortfall"]

BITS, PRODUCTS, LARGEST, ROWS = 13, 32, 2.0**8.75, 64
TOKENS = 128, 512, 1024, 2048, 4096, 16384


def main() -> int:
    """A line a length."""
    for tokens in TOKENS:
        print(f"{tokens:6,d} tokens  {shortfall(tokens):6.2%}")
    return 0


def shortfall(tokens: int, seed: int = 0) -> float:
    """Mean over rows of what the model's sum lacks of the exact one."""
    random = np.random.default_rng(seed)
    weights = coded(np.minimum(2 ** random.normal(5, 1, (ROWS, tokens)), LARGEST))
    products = weights * coded(random.normal(1, 0.5, (ROWS, tokens)))
    total = np.zeros((ROWS, 1))
    for begin in range(0, tokens, PRODUCTS):
        addends = np.concatenate((total, products[:, begin : begin + PRODUCTS]), axis=1)
        unit = 2 ** (np.floor(np.log2(np.abs(addends).max(1, keepdims=True))) - BITS)
        total = (np.trunc(addends / unit) * unit).sum(1, keepdims=True)
    return float(np.mean(1 - total[:, 0] / products.sum(1)))


def coded(values: np.ndarray) -> np.ndarray:
    """Rounded to E4M3."""
    return values.astype(float8_e4m3fn).astype(np.float64)


if __name__ == "__main__":
    sys.exit(main())
