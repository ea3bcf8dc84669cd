"""Which implementation of the decoding attention is fastest where (`tactics.json`; see `plugins.tactics`), and those of others.

"flash_mla": DeepSeek's FlashMLA, where it can be imported, for BF16 caches in pages of 64. FP8 caches are ours alone: sgl-kernel's
kernel, which multiplies in FP8 as well, makes its plan in each call of an op, and ends the process at 4,096 sequences (it was
among these until commit fc22e09). flashinfer's needs a plan made on the host for every batch: an op cannot take it.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

import torch
from torch import Tensor

from plugins.nvrtc import Source, aligned
from plugins.tactics import OURS, Table, importable, ours_alone

__all__ = ["COMBINE", "TABLE", "THEIRS", "flash_mla", "present"]

SIZES = "heads", "batch", "length"
TABLE = Table(Path(__file__).with_name("tactics.json"), "mla_decode", ("device", "cache"), SIZES, ("flash_mla",))
COMBINE = Source(Path(__file__).with_name("combine.cu"))
THREADS = 128
PAGE = 64


@functools.cache
def present() -> tuple[str, ...]:
    """Implementations that can be used in this process for a BF16 cache in pages of 64."""
    return (OURS, "flash_mla") if not ours_alone() and _plans_by_itself() else (OURS,)


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


THEIRS = {"flash_mla": flash_mla}


def _without_empty(out: Tensor, lse: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, T, A, latent], lse [B, A, T]: where a query sees no token, their sums are arbitrary and the logarithm inf."""
    (batch, tokens, heads, _), total = out.shape, lse.transpose(1, 2).contiguous()
    with torch.cuda.device(out.device):
        rest = aligned(lengths), out, total, tokens, heads
        COMBINE.module(AT_ONCE=2, GROUPS=1).launch("mla_clear", (batch * tokens, 1, 1), THREADS, *rest, overlap=True)
    return out, total
