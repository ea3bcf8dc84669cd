"""The router's logits as a torch op: a kernel up to 64 tokens on sm_90 and later, else cuBLAS; CPU runs the reference.

    logits = torch.ops.r1_pipeline.router_gemm(x, weight)

x BF16 [N, H], weight BF16 [E, H] -> F32 [N, E], without a cast of either. The kernel needs H to be a multiple of 256 and E of 32,
as in DeepSeek-V3/R1 and Kimi-K2 (7168; 256 and 384) and GLM-4.5 (5120; 160); its sums go in one fixed order.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.nvrtc import Source, aligned, tensor_map
from plugins.router_gemm import reference

__all__ = ["check", "fits", "has_kernel", "launch", "many_forms", "many_variant", "rounded", "router_gemm", "variant"]

SOURCE = Source(Path(__file__).with_name("kernel.cu"))
MANY = Source(Path(__file__).with_name("sm90_many.cu"))
MAX_TOKENS, MANY_TOKENS = 64, 16
"""Beyond the second, the kernel of Hopper alone, where it fits."""
CHUNK = 32
"""Elements of H that a warp takes at a time."""
MOST_SPLIT = 8
WARPS_AND_DEPTH = {1: (4, 7), 2: (4, 7), 4: (7, 4), 8: (4, 3)}
WIDE_WARPS_AND_DEPTH = {1: (14, 4), 2: (8, 4), 4: (7, 2), 8: (4, 2)}
"""Tiles of 8 tokens -> warps of a CTA, at most, and chunks that each has on their way: the fastest on an H200."""
ONE_TURNS = 4
"""Loads of a row that a thread has on their way: one token is faster without tensor cores."""
MANY_COLUMNS, MANY_THREADS, TILE_BYTES, MOST_OWN = 64, 128, 1024, 1152
"""Of the kernel for many tokens: elements of H of a tile, threads, alignment of tiles, a CTA's share of H that fits."""


class Form(NamedTuple):
    """Of the kernel for many tokens: tokens at most, CTAs of a cluster, tiles of 8 experts of a group at most, groups at most."""

    tokens: int
    cluster: int
    tiles: int
    groups: int

    def of_experts(self, experts: int) -> int:
        """Groups, a cluster each."""
        return -(-experts // 8 // self.tiles)


MANY_FORMS = Form(48, 16, 5, 7), Form(MAX_TOKENS, 8, 4, 15)
"""The fastest on an H200, which has multiprocessors of their own for so many groups."""
EXPERT_TILES = 1, 2
"""Of 16 experts a CTA: forms among which TensorRT and `gemm_tactics` choose by time."""
WIDE = 1024
"""From these experts on, two CTAs that share a sum over H fill the chip; else it takes eight."""


@torch.library.custom_op("r1_pipeline::router_gemm", mutates_args=(), device_types="cuda")
def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """BF16 x [N, H] and weight [E, H] -> logits F32 [N, E]."""
    check(x, weight)
    if not has_kernel(x, weight):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    logits = _output(x, weight)
    if len(x):
        launch(aligned(x), aligned(weight), logits)
    return logits


def launch(x: Tensor, weight: Tensor, logits: Tensor, overlap: bool = False, tiles: int = 0) -> None:
    """The kernel alone, from and into `aligned` tensors; logits may be BF16 [N, E] too.

    `overlap`: load weights while the kernel before it on the stream still runs. `tiles`: `variant`'s `expert_tiles`.
    """
    (tokens, hidden), experts = x.shape, weight.shape[0]
    shape = {"HIDDEN": hidden, "EXPERTS": experts, "BF16_OUT": int(logits.dtype == torch.bfloat16)}
    threads = hidden // (8 * ONE_TURNS)
    with torch.cuda.device(x.device):
        if tokens == 1 and experts < WIDE and threads % 32 == 0 and threads <= 256:
            module = SOURCE.module(THREADS=threads, **shape)
            module.launch("router_gemm_one", (experts, 1, 1), threads, x, weight, logits, overlap=overlap)
        elif not (tokens > MANY_TOKENS and logits.dtype == torch.float32 and _launch_many(x, weight, logits, overlap)):
            name, macros, grid, threads = variant(tokens, hidden, experts, tiles)
            SOURCE.module(**macros, **shape).launch(name, grid, threads, x, weight, logits, tokens, overlap=overlap)


def _launch_many(x: Tensor, weight: Tensor, logits: Tensor, overlap: bool) -> bool:
    """Whether the kernel for many tokens fits the shape and the current GPU; if so it is launched."""
    experts, hidden = weight.shape
    for form in many_forms(len(x), hidden, experts) if torch.cuda.get_device_capability() == (9, 0) else ():
        macros, grid, shared = many_variant(form, len(x), hidden, experts)
        module = MANY.module(**macros)
        if module.clusters("router_gemm_many", MANY_THREADS, shared):
            maps = tensor_map(x, macros["ROWS"], MANY_COLUMNS), tensor_map(weight, 8 * form.tiles, MANY_COLUMNS)
            module.launch("router_gemm_many", grid, MANY_THREADS, *maps, logits, len(x), overlap=overlap, shared=shared)
            return True
    return False


def rounded(tokens: int) -> int:
    """Rows that the kernel for many tokens is compiled for."""
    return -(-tokens // 8) * 8


def many_forms(tokens: int, hidden: int, experts: int) -> list[Form]:
    """Those of the kernel for many tokens that take the shape, the fastest first."""
    return [
        form for form in MANY_FORMS
        if tokens <= form.tokens and experts < WIDE and form.of_experts(experts) <= form.groups
        and hidden % (MANY_COLUMNS * form.cluster) == 0 and hidden // form.cluster <= MOST_OWN
    ]  # fmt: skip


def many_variant(form: Form, tokens: int, hidden: int, experts: int) -> tuple[dict[str, int], tuple[int, int, int], int]:
    """Macros, grid and bytes of dynamic shared memory; instructions read 64 rows of a tile."""
    rows, columns, groups = rounded(tokens), 8 * form.tiles, form.of_experts(experts)
    shared = hidden // form.cluster * (rows + columns) * 2 + max(0, 64 - rows - columns) * 128 + TILE_BYTES
    macros = {"HIDDEN": hidden, "EXPERTS": experts, "ROWS": rows, "SPLIT": form.cluster, "GROUPS": groups, "TILES": form.tiles}
    return macros, (groups * form.cluster, 1, 1), shared


def variant(tokens: int, hidden: int, experts: int, expert_tiles: int = 0) -> tuple[str, dict[str, int], tuple[int, int, int], int]:
    """Kernel, macros, grid and threads for up to so many tokens; `expert_tiles`: of 16 experts a CTA, 0 for the fastest."""
    token_tiles, expert_tiles = next(tiles for tiles in (1, 2, 4, 8) if tokens <= 8 * tiles), expert_tiles or 2
    wide = experts >= WIDE
    split, (most_warps, depth) = (2, WIDE_WARPS_AND_DEPTH[token_tiles]) if wide else (MOST_SPLIT, WARPS_AND_DEPTH[token_tiles])
    chunks = hidden // split // CHUNK
    warps = next(count for count in range(most_warps, 0, -1) if chunks % count == 0)
    macros = {"TOKEN_TILES": token_tiles, "EXPERT_TILES": expert_tiles, "SPLIT": split, "WARPS": warps, "STREAMED": int(wide)}
    grid = split * experts // (16 * expert_tiles), 1, 1
    return "router_gemm", macros | {"DEPTH": min(depth, chunks // warps)}, grid, 32 * warps


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes this shape on this device."""
    return fits(len(x), *weight.shape[::-1]) and torch.cuda.get_device_capability(x.device) >= (9, 0)


def fits(tokens: int, hidden: int, experts: int) -> bool:
    """Whether there is a kernel of this shape, for sm_90 and later."""
    return hidden % (MOST_SPLIT * CHUNK) == 0 and experts % 32 == 0 and tokens <= MAX_TOKENS


@router_gemm.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _output(x, weight)


@router_gemm.register_kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    check(x, weight)
    return reference.router_gemm(x, weight)


def check(x: Tensor, weight: Tensor) -> None:
    """ConfigError unless these are BF16 [N, H] and [E, H]."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or {x.dtype, weight.dtype} != {torch.bfloat16}:
        found = f"x is {x.dtype} {list(x.shape)} and weight {weight.dtype} {list(weight.shape)}"
        raise ConfigError(f"{found}: they must be bfloat16 [N, H] and [E, H].")


def _output(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
