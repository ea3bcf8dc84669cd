"""Which implementation of the decoding attention is fastest where (`tactics.json`; see `plugins.tactics`), and those of others.

"flash_mla": DeepSeek's FlashMLA, where it can be imported, for BF16 caches in pages of 64. "sgl_flash_mla": sgl-kernel's, where
it is loaded, for FP8 caches in pages of 64. It multiplies in FP8, as ours does: queries (within 448) and weights are rounded to
E4M3, as the cache is. Against attention over the cache before that was rounded, its relative L2 error on an H200 was 1.03 to 1.48
times that of exact products in each of 24 cases (random, peaked and outlying channels; the cache's scale 1, or its largest / 448),
of 3 to 11 % where single channels did not dominate. `R1_PIPELINE_FP8_QUERIES=0` refuses both: then codes are multiplied in FP16.
flashinfer's needs a plan made on the host for every batch: an op cannot take it.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path

import torch
from torch import Tensor

from plugins.nvrtc import Source, aligned
from plugins.quantize.reference import FP8
from plugins.tactics import OURS, Table, importable, ours_alone, takes

__all__ = ["COMBINE", "TABLE", "THEIRS", "flash_mla", "present", "rounds_queries", "sgl_flash_mla"]

SIZES = "heads", "batch", "length"
NAMES = "flash_mla", "sgl_flash_mla"
TABLE = Table(Path(__file__).with_name("tactics.json"), "mla_decode", ("device", "cache"), SIZES, NAMES)
COMBINE = Source(Path(__file__).with_name("combine.cu"))
THREADS = 128
PAGE = 64
MOST = 448.0
SGL_OPS = ("get_mla_decoding_metadata_dense_fp8", 3), ("fwd_kvcache_mla_fp8", 11)
"""What is called of sgl-kernel, and the arguments of each."""


@functools.cache
def present(fp8: bool) -> tuple[str, ...]:
    """Implementations that can be used in this process for a cache of FP8 or BF16 in pages of 64."""
    if ours_alone():
        return (OURS,)
    if fp8:
        there = rounds_queries() and all(takes(torch.ops.sgl_kernel, *op) for op in SGL_OPS)
        return (OURS, "sgl_flash_mla") if there else (OURS,)
    return (OURS, "flash_mla") if _plans_by_itself() else (OURS,)


def rounds_queries() -> bool:
    """Whether an FP8 cache may be multiplied in FP8, with all that it is multiplied with."""
    return os.environ.get("R1_PIPELINE_FP8_QUERIES") != "0"


def _plans_by_itself() -> bool:
    """Whether there is a FlashMLA whose plan is made at the first call: older ones want lengths for it."""
    plan = getattr(importable("flash_mla"), "get_mla_metadata", None)
    if not inspect.isfunction(plan):  # what is not Python's may have no signature to ask for
        return False
    kinds = {each.kind for each in inspect.signature(plan).parameters.values()}
    return kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def flash_mla(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int, kv_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """FlashMLA as the op's out BF16 [B, T, A, latent] and lse F32 [B, T, A]; a kv_scale of 1 is the only one it knows."""
    import flash_mla as library

    schedule = library.get_mla_metadata()[0]
    rest = table, lengths, latent, schedule, None, scale, q.shape[1] > 1
    return _without_empty(*library.flash_mla_with_kvcache(q, cache.unsqueeze(2), *rest), lengths)


def sgl_flash_mla(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int, kv_scale: float
) -> tuple[Tensor, Tensor]:
    """sgl-kernel's FlashMLA for FP8 as the op's results."""
    library, rows = torch.ops.sgl_kernel, q.shape[1] * q.shape[2]
    schedule = library.get_mla_decoding_metadata_dense_fp8(lengths, rows, 1)
    scales = q.new_ones(1, dtype=torch.float32), q.new_full((1,), kv_scale, dtype=torch.float32)
    codes = q.clamp(-MOST, MOST).to(FP8)
    rest = latent, lengths, table, scale, q.shape[1] > 1, *schedule, *scales
    return _without_empty(*library.fwd_kvcache_mla_fp8(codes, cache.unsqueeze(2), *rest), lengths)


THEIRS = {"flash_mla": flash_mla, "sgl_flash_mla": sgl_flash_mla}


def _without_empty(out: Tensor, lse: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, T, A, latent], lse [B, A, T]: where a query sees no token, their sums are arbitrary and the logarithm inf."""
    (batch, tokens, heads, _), total = out.shape, lse.transpose(1, 2).contiguous()
    with torch.cuda.device(out.device):
        rest = aligned(lengths), out, total, tokens, heads
        COMBINE.module(AT_ONCE=2, GROUPS=1).launch("mla_clear", (batch * tokens, 1, 1), THREADS, *rest, overlap=True)
    return out, total
