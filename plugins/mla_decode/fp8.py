"""Decoding attention over an FP8 cache with products in FP8: queries and softmax weights are rounded to E4M3, too.

The kernel takes the shapes that `op.has_kernel` says. A query of a head has a power of two of its own, weights are times
2^8 when they are rounded: those below 2^-18 of the largest are lost (see `sm90_fp8.cu`). `op` has the other way, codes in FP16.

Hopper's FP8 products are added up in about 14 bits, rounded towards zero. Of values of one sign, a sum over a CTA's piece of a
sequence falls short: in `scripts/model_fp8_adder.py`, not measured yet, by 0.5 % of 512 tokens, 1.4 of 1,024, 7 of 4,096, 25 of
16,384. So `op` cuts sequences into pieces of `MOST_PAIRS` at most, joined in float32, unless the user asks otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from plugins.nvrtc import Module, Source, tensor_map

__all__ = ["MOST_PAIRS", "SOURCE", "Kernel", "kernel"]

SOURCE = Source(Path(__file__).with_name("sm90_fp8.cu"))
DIM, LATENT, BLOCK, WIDE = 576, 512, 64, 128
"""Of a row, of its values; tokens of a block; columns of a tile, of which the rope is half a one."""
MOST_PAIRS = 8
"""Of blocks, of a piece that is multiplied in FP8 if nothing else is asked for: 1,024 tokens."""
THREADS, SHARED = 512, 5 * 64 * DIM + 2 * 128 * BLOCK + 2048 + 1024
"""Threads of a CTA; bytes of queries, four blocks of keys, two of weights, what belongs to rows and barriers, their alignment."""


class Kernel(NamedTuple):
    """What the launch of a decoding kernel needs beside the arguments that all of them have."""

    module: Module
    name: str
    threads: int
    shared: int
    """Bytes."""
    own: tuple[Any, ...]
    """Its first arguments."""


def kernel(q: Tensor, cache: Tensor) -> Kernel:
    """That of `aligned` BF16 q [B, T, A, 576] and E4M3 cache [pages, page, 576]."""
    matrix = cache.view(-1, DIM)
    maps = tensor_map(matrix, BLOCK, WIDE, True), tensor_map(matrix, BLOCK, DIM - LATENT, True)
    return Kernel(SOURCE.module(HEADS=q.shape[2], PAGE=cache.shape[1]), "mla_decode_fp8", THREADS, SHARED, (*maps, q))
