"""The routing as a torch op: CUDA runs one kernel, CPU the reference, and shapes are known to `torch.export`.

    weights, indices = torch.ops.r1_pipeline.topk_router(logits, bias, 8, 4, 8, 2.5, True)

Chosen experts equal the reference's wherever two choices differ by more than float32 rounding (the kernel's sigmoid is
within 2 ulp), and exact ties go to the lowest index. Biases must be finite. The kernel is compiled for each configuration; it
needs experts to be a multiple of 32, `n_group` a power of two up to 32, and the kept groups to hold a multiple of 32 experts,
as those of DeepSeek-V3/R1 (256, 8, 4), Kimi-K2 (384, 1, 1) and GLM-4.5 (160 or 128, 1, 1) do; others run the reference.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.nvrtc import Source, aligned
from plugins.topk_router.reference import route

__all__ = ["topk_router"]

SOURCE, RANKED = Source(Path(__file__).with_name("kernel.cu")), Source(Path(__file__).with_name("ranked.cu"))
RANKED_FORM = 256, 8, 4, 8
"""Experts, groups, groups kept, experts chosen of DeepSeek-V3 and R1, for which the second is."""
WARPS = 4
"""Tokens a block: the fastest, or as fast as any, from 1 to 16384 tokens on an H200."""
MAX_EXPERTS = 1024


@torch.library.custom_op("r1_pipeline::topk_router", mutates_args=(), device_types="cuda")
def topk_router(
    logits: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    scale: float,
    norm_topk_prob: bool = True,
) -> tuple[Tensor, Tensor]:
    """Router logits [N, E] and bias [E] -> weights F32 [N, top_k], best first, and indices I32 [N, top_k]."""
    _check(logits, bias, n_group, topk_group, top_k)
    if not has_kernel(logits.shape[1], n_group, topk_group, top_k):
        return _reference(logits, bias, n_group, topk_group, top_k, scale, norm_topk_prob)
    out = _outputs(logits, top_k)
    if len(logits):
        launch(aligned(logits.float()), aligned(bias.float()), *out, n_group, topk_group, top_k, scale, norm_topk_prob)
    return out


def launch(
    logits: Tensor,
    bias: Tensor,
    weights: Tensor,
    indices: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    scale: float,
    norm_topk_prob: bool = True,
    overlap: bool = False,
) -> None:
    """The kernel alone, from and into `aligned` tensors of the kernel's types.

    `overlap`: let it start while the kernel before it on the stream still runs.
    """
    tokens, experts = logits.shape
    form = experts, n_group, topk_group, top_k
    with torch.cuda.device(logits.device):
        module = source(*form).module(**macros(*form, norm_topk_prob))
        grid = (-(-tokens // WARPS), 1, 1)
        module.launch("topk_router", grid, 32 * WARPS, logits, bias, weights, indices, tokens, float(scale), overlap=overlap)


def source(experts: int, n_group: int, topk_group: int, top_k: int) -> Source:
    """The kernel of a configuration that has one."""
    return RANKED if (experts, n_group, topk_group, top_k) == RANKED_FORM else SOURCE


def macros(experts: int, n_group: int, topk_group: int, top_k: int, norm_topk_prob: bool) -> dict[str, int]:
    """What the kernel is compiled with."""
    return {"EXPERTS": experts, "GROUPS": n_group, "KEPT": topk_group, "TOP_K": top_k, "NORMALIZE": int(norm_topk_prob)}


def has_kernel(experts: int, n_group: int, topk_group: int, top_k: int) -> bool:
    """Whether the kernel can be compiled for this configuration."""
    candidates = experts // n_group * topk_group
    even = experts % 32 == 0 and n_group in (1, 2, 4, 8, 16, 32) and candidates % 32 == 0
    return even and experts <= MAX_EXPERTS and top_k <= min(32, candidates) and (experts > n_group or n_group == 1)


@topk_router.register_fake
def _(
    logits: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    scale: float,
    norm_topk_prob: bool = True,
) -> tuple[Tensor, Tensor]:
    return _outputs(logits, top_k)


@topk_router.register_kernel("cpu")
def _reference(
    logits: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    scale: float,
    norm_topk_prob: bool = True,
) -> tuple[Tensor, Tensor]:
    _check(logits, bias, n_group, topk_group, top_k)
    weights, indices = route(logits, bias, n_group, topk_group, top_k, scale, norm_topk_prob)
    return weights, indices.int()


def _check(logits: Tensor, bias: Tensor, n_group: int, topk_group: int, top_k: int) -> None:
    experts = logits.shape[-1]
    if logits.dim() != 2 or bias.shape != (experts,) or logits.device != bias.device:
        found = f"logits {list(logits.shape)} on {logits.device}, bias {list(bias.shape)} on {bias.device}"
        raise ConfigError(f"{found}: they must be [N, E] and [E] on one device.")
    if experts % n_group or not 0 < topk_group <= n_group or not 0 < top_k <= experts // n_group * topk_group:
        raise ConfigError(f"{topk_group} of {n_group} groups of {experts} experts cannot give {top_k} experts a token.")


def _outputs(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
