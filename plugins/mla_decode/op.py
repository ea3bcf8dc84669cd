"""Latent attention over a paged cache as a torch op: CUDA runs the fastest implementation there is, CPU the reference.

    out, lse = torch.ops.r1_pipeline.mla_decode(q, cache, table, lengths, scale, 512, kv_scale)

q BF16 [B, T, A, 576] (absorbed: latent | rope), cache BF16 or E4M3 [pages, page, 576] (times kv_scale), table I32 [B, P], lengths
I32 [B], each P * page at most (not asked of the device), T queries a sequence of which the last is at its last token -> out BF16
[B, T, A, 512], lse F32 [B, T, A] (natural logarithm; -inf: no token). An FP8 cache is multiplied in FP8 (`fp8`), queries and
softmax weights rounded to E4M3 as the cache is; `R1_PIPELINE_FP8_QUERIES=0` has it multiplied in FP16, which has all of its
values, in 1.1 to 1.9 times the time. For a BF16 cache another library's kernel is taken where it is present and was measured to
be faster (`tactics`).

The kernels need sm_90 (they are wgmma and TMA through and through), D = 576, L = 512, pages of a multiple of 64 tokens, and a
multiple of 64 heads or fewer than 64; other cases are computed page by page in plain torch. A sequence is split among CTAs so
that the chip is full (`splits`); a second kernel joins them. Only `table` bounds the work, so a step can be captured in a graph.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.mla_decode import fp8, reference, tactics
from plugins.mla_decode.fp8 import BLOCK, DIM, LATENT
from plugins.nvrtc import Source, aligned, processors, tensor_map
from plugins.quantize.reference import FP8
from plugins.tactics import OURS

__all__ = ["mla_decode"]

SOURCE = Source(Path(__file__).with_name("sm90_kernel.cu"))
THREADS, SHARED = 384, 3 * 9 * 8192 + 1024 + 128 + 1024
"""Threads of a CTA; bytes of its queries, two blocks of keys, row sums and barriers, and their alignment."""
START, JOIN, PART = 1.2, 0.5, 0.023
"""What starting a piece of work, joining up to 32 parts of a row, and another 64 rows' part cost, in pairs of blocks (of BF16 on an
H200, 3 to 4 us; fitted to a sweep of splits at 18 shapes, FP8's too)."""
JOINED_AT_ONCE, MOST_GROUPS = 8, 4
"""Parts of a row that a group of the joining kernel's threads reads at a time; groups."""


@torch.library.custom_op("r1_pipeline::mla_decode", mutates_args=(), device_types="cuda")
def mla_decode(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int, kv_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """-> out BF16 [B, T, A, latent], lse F32 [B, T, A]"""
    _check(q, cache, table, lengths, scale, latent, kv_scale)
    if not q.numel() or not has_kernel(q, cache, latent):
        return _plain(q, cache, table, lengths, scale, latent, kv_scale)
    q, cache, table, lengths = (aligned(tensor) for tensor in (q, cache, table, lengths))
    given, name = (q, cache, table, lengths), _fastest(q, cache, table, kv_scale)
    rest = scale, latent, kv_scale
    return tactics.TABLE.attempt(name, lambda: tactics.THEIRS[name](*given, *rest), lambda: _ours(*given, *rest))


def _ours(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int, kv_scale: float
) -> tuple[Tensor, Tensor]:
    """The kernels' results."""
    out, lse = _outputs(q, latent)
    launch(q, cache, table, lengths, out, lse, scale, kv_scale, exact=_exact())
    return out, lse


def _exact() -> bool:
    """Whether the user wants no rounding but the cache's."""
    return os.environ.get("R1_PIPELINE_FP8_QUERIES") == "0"


def launch(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    kv_scale: float = 1.0,
    splits: int | None = None,
    overlap: bool = False,
    exact: bool = False,
) -> None:
    """The kernels alone, from and into `aligned` tensors.

    `overlap`: let the first start while the kernel before it on the stream still runs. `exact`: no FP8 but the cache's.
    """
    batch, tokens, heads, _ = q.shape
    tiles, rows = tokens * max(1, heads // BLOCK), batch * tokens * heads
    splits = splits or _splits(q, cache, table)
    part, part_lse = (out, lse) if splits == 1 else _parts(q.device, rows, splits)
    scales = float(scale * kv_scale / math.log(2)), float(kv_scale)
    with torch.cuda.device(q.device):
        kernel = fp8.kernel(q, cache) if cache.dtype == FP8 and not exact else _kernel(q, cache)
        arguments = *kernel.own, table, lengths, part, part, part_lse, table.shape[1], tokens, splits, batch, *scales
        grid = min(tiles * splits * batch, processors(q.device)), 1, 1
        kernel.module.launch(kernel.name, grid, kernel.threads, *arguments, overlap=overlap, shared=kernel.shared)
        if splits > 1:
            macros, threads = joining(splits)
            joiner = tactics.COMBINE.module(**macros)
            joiner.launch("mla_combine", (rows, 1, 1), threads, part, part_lse, out, lse, splits, overlap=True)


def _kernel(q: Tensor, cache: Tensor) -> fp8.Kernel:
    """That of BF16 and FP16 products."""
    module = SOURCE.module(HEADS=q.shape[2], PAGE=cache.shape[1], FP8=int(cache.dtype == FP8))
    maps = tensor_map(q.view(-1, DIM), BLOCK), tensor_map(cache.view(-1, DIM), BLOCK)
    return fp8.Kernel(module, "mla_decode", THREADS, SHARED, (*maps, cache))


def _splits(q: Tensor, cache: Tensor, table: Tensor) -> int:
    """Of a sequence as long as its table is wide."""
    (batch, tokens, heads, _), pairs = q.shape, -(-table.shape[1] * cache.shape[1] // (2 * BLOCK))
    return best_splits(batch * tokens * max(1, heads // BLOCK), pairs, processors(q.device), min(heads, BLOCK))


@functools.cache
def best_splits(tiles: int, pairs: int, processors: int, rows: int = BLOCK) -> int:
    """CTAs a sequence's heads are split among, so that all waves of `tiles`, and joining their `rows`, take least."""

    def cost(splits: int) -> float:
        waves, joins = -(-tiles * splits // processors), -(-splits // (JOINED_AT_ONCE * MOST_GROUPS))
        joining = JOIN * joins + PART * tiles * splits * rows / BLOCK
        return waves * (-(-pairs // splits) + START) + (joining if splits > 1 else 0)

    return min(range(1, max(1, min(pairs, processors)) + 1), key=cost)


def joining(splits: int) -> tuple[dict[str, int], int]:
    """What the kernel that joins so many parts is compiled for, and its threads a row."""
    wanted = (JOINED_AT_ONCE, splits), (MOST_GROUPS, -(-splits // JOINED_AT_ONCE))
    at_once, groups = (min(most, 1 << (count - 1).bit_length()) for most, count in wanted)
    return {"AT_ONCE": at_once, "GROUPS": groups}, groups * LATENT // 4


def has_kernel(q: Tensor, cache: Tensor, latent: int) -> bool:
    """Whether the kernel takes these shapes on this device, and has a page to read."""
    heads, even = q.shape[2], len(cache) > 0 and cache.shape[1] % BLOCK == 0
    shapes = q.shape[3] == DIM and latent == LATENT and even and (heads % BLOCK == 0 or heads < BLOCK)
    return shapes and torch.cuda.get_device_capability(q.device) == (9, 0)


def _fastest(q: Tensor, cache: Tensor, table: Tensor, kv_scale: float) -> str:
    """Of the implementations that take these shapes, the measured choice."""
    page = cache.shape[1]
    if cache.dtype == FP8 or page != tactics.PAGE or not table.shape[1] or kv_scale != 1:  # FlashMLA cannot be told of a scale
        return OURS
    same = torch.cuda.get_device_name(q.device), "bf16"
    sizes = q.shape[2], q.shape[0] * q.shape[1], table.shape[1] * page
    return tactics.TABLE.choose(same, sizes, tactics.present())


@mla_decode.register_fake
def _(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int, *_: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, latent)


@mla_decode.register_kernel("cpu")
def _plain(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int, kv_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    _check(q, cache, table, lengths, scale, latent, kv_scale)
    out, lse = reference.mla_decode(q, cache, table, lengths, scale, latent, kv_scale)
    return out.bfloat16(), lse.float()


def _parts(device: torch.device, rows: int, splits: int) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, splits, LATENT, device=device), torch.empty(rows, splits, device=device)


def _check(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int, kv_scale: float
) -> None:
    if q.dim() != 4 or cache.dim() != 3 or not cache.shape[1] or q.shape[3] != cache.shape[2] or q.dtype != torch.bfloat16:
        found = f"q is {q.dtype} {list(q.shape)}, cache {cache.dtype} {list(cache.shape)}"
        raise ConfigError(f"{found}: they must be bfloat16 [B, T, A, D] and [pages, page, D].")
    if cache.dtype not in (torch.bfloat16, FP8):
        raise ConfigError(f"cache is {cache.dtype}: it must be bfloat16 or float8_e4m3fn.")
    whole = (table.dtype, lengths.dtype) == (torch.int32, torch.int32)
    if not whole or table.dim() != 2 or len(table) != len(q) or lengths.shape != (len(q),):
        found = f"table is {table.dtype} {list(table.shape)}, lengths {lengths.dtype} {list(lengths.shape)}"
        raise ConfigError(f"{found}: they must be int32 [{len(q)}, P] and [{len(q)}].")
    if not 0 < latent <= q.shape[3]:
        raise ConfigError(f"The first {latent} columns of {q.shape[3]} cannot be values: give 1 to {q.shape[3]}.")
    if not (scale > 0 and kv_scale > 0):
        raise ConfigError(f"The softmax scale {scale} and the cache's {kv_scale} must be above 0.")


def _outputs(q: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], latent)), q.new_empty(q.shape[:3], dtype=torch.float32)
