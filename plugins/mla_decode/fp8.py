"""Decoding attention over an FP8 cache with products in FP8: queries and softmax weights are rounded to E4M3, too.

The kernel takes the shapes that `op.has_kernel` says. A query of a head has a power of two of its own, weights are times
2^8 when they are rounded: those below 2^-18 of the largest are lost (see `sm90_fp8.cu`). `op` has the other way, codes in FP16.

Hopper's FP8 products are added up in about 14 bits, rounded towards zero: 128 tokens are, further ones in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from plugins.nvrtc import Module, Source, tensor_map

__all__ = ["SOURCE", "Kernel", "kernel"]

SOURCE = Source(Path(__file__).with_name("sm90_fp8.cu"))
DIM, LATENT, BLOCK, WIDE = 576, 512, 64, 128
"""Of a row, of its values; tokens of a block; columns of a tile, of which the rope is half a one."""
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
