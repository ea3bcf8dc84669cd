"""The router's logits as a torch op: one kernel up to 64 tokens on sm_90 and later, else cuBLAS; CPU runs the reference.

    logits = torch.ops.r1_pipeline.router_gemm(x, weight)

x BF16 [N, H], weight BF16 [E, H] -> F32 [N, E], without a cast of either. The kernel needs H to be a multiple of 256 and E of 32,
as in DeepSeek-V3/R1 and Kimi-K2 (7168; 256 and 384) and GLM-4.5 (5120; 160); its sums go in one fixed order.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.nvrtc import Source, aligned
from plugins.router_gemm import reference

__all__ = ["router_gemm"]

SOURCE = Source(Path(__file__).with_name("kernel.cu"))
MAX_TOKENS = 64
SPLIT = 8
"""CTAs of a cluster, which share the sum over H."""
CHUNK = 32
FEW_TOKENS, FEW_THREADS = 2, 128
"""Up to these tokens a CTA an expert, without tensor cores, is faster."""
WIDE, WIDE_WARPS, WIDE_DEPTH = 1024, 16, 4
"""From these experts on, up to 16 tokens, CTAs need not share the sum over H; chunks that a warp has on their way."""


@torch.library.custom_op("r1_pipeline::router_gemm", mutates_args=(), device_types="cuda")
def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """BF16 x [N, H] and weight [E, H] -> logits F32 [N, E]."""
    _check(x, weight)
    if not has_kernel(x, weight):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    logits = _output(x, weight)
    if len(x):
        launch(aligned(x), aligned(weight), logits)
    return logits


def launch(x: Tensor, weight: Tensor, logits: Tensor, overlap: bool = False) -> None:
    """The kernel alone, from and into `aligned` tensors; logits may be BF16 [N, E] too.

    `overlap`: load weights while the kernel before it on the stream still runs.
    """
    (tokens, hidden), experts = x.shape, weight.shape[0]
    shape = {"HIDDEN": hidden, "EXPERTS": experts, "BF16_OUT": int(logits.dtype == torch.bfloat16)}
    if tokens <= FEW_TOKENS and hidden % (FEW_THREADS * 8) == 0 and not is_wide(tokens, hidden, experts):
        with torch.cuda.device(x.device):
            module = SOURCE.module(TOKENS=tokens, **shape)
            module.launch("router_gemm_few", (experts, 1, 1), FEW_THREADS, x, weight, logits, overlap=overlap)
        return
    name, macros, grid, threads = variant(tokens, hidden, experts)
    with torch.cuda.device(x.device):
        SOURCE.module(**macros, **shape).launch(name, grid, threads, x, weight, logits, tokens, overlap=overlap)


def is_wide(tokens: int, hidden: int, experts: int) -> bool:
    """Whether CTAs that share nothing are the fastest."""
    return experts >= WIDE and tokens <= 16 and hidden % (WIDE_WARPS * CHUNK) == 0


def variant(
    tokens: int, hidden: int, experts: int, expert_tiles: int = 0
) -> tuple[str, dict[str, int], tuple[int, int, int], int]:
    """Kernel, macros, grid and threads for up to so many tokens; `expert_tiles`: of 16 experts a CTA, 0 for the fastest."""
    token_tiles = next(tiles for tiles in (1, 2, 4, 8) if tokens <= 8 * tiles)
    if is_wide(tokens, hidden, experts):
        macros = {"WARPS": WIDE_WARPS, "DEPTH": WIDE_DEPTH, "TOKEN_TILES": token_tiles}
        return "router_gemm_wide", macros, (experts // 16, 1, 1), 32 * WIDE_WARPS
    most_warps, fastest = (7, 2) if token_tiles < 8 else (4, 1)
    expert_tiles, chunks = expert_tiles or fastest, hidden // SPLIT // CHUNK
    warps = next(count for count in range(most_warps, 0, -1) if chunks % count == 0)
    macros = {"SPLIT": SPLIT, "WARPS": warps, "TOKEN_TILES": token_tiles, "EXPERT_TILES": expert_tiles}
    return "router_gemm", macros, (SPLIT, experts // (16 * expert_tiles), 1), 32 * warps


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes this shape on this device."""
    return fits(len(x), *weight.shape[::-1]) and torch.cuda.get_device_capability(x.device) >= (9, 0)


def fits(tokens: int, hidden: int, experts: int) -> bool:
    """Whether there is a kernel of this shape, for sm_90 and later."""
    return hidden % (SPLIT * CHUNK) == 0 and experts % 32 == 0 and tokens <= MAX_TOKENS


@router_gemm.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _output(x, weight)


@router_gemm.register_kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    _check(x, weight)
    return reference.router_gemm(x, weight)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or {x.dtype, weight.dtype} != {torch.bfloat16}:
        found = f"x is {x.dtype} {list(x.shape)} and weight {weight.dtype} {list(weight.shape)}"
        raise ConfigError(f"{found}: they must be bfloat16 [N, H] and [E, H].")


def _output(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
