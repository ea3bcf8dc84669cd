"""The kernels in a row: permute, gather (and quantise), gate+up, down, each token's sum. Nothing is asked of the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from plugins.moe_grouped_gemm.reference import Weights
from plugins.nvrtc import Source, aligned, processors, tensor_map
from plugins.quantize.reference import FP8, FP8_GROUP

__all__ = [
    "ALIGN", "MOST_ROWS", "Products", "Route", "experts", "finalize", "gather", "has_kernel", "most_rows", "permute", "places",
    "product", "rows", "swiglu", "variant",
]  # fmt: skip

KERNEL = Source(Path(__file__).with_name("sm90_kernel.cu"))
ROUTE = Source(Path(__file__).with_name("route.cu"))
MOST_ROWS = 128
"""Rows of activations of a tile."""
FEW_ROWS, LEAST_ROWS = 64, 8
"""Of a tile of NVFP4 that leaves space for a third stage of weights; of tiles of so few tokens that CTAs may be without work."""
STAGES_AND_RESIDENT = {
    False: {MOST_ROWS: (4, 1), LEAST_ROWS: (6, 1)},
    True: {MOST_ROWS: (2, 1), FEW_ROWS: (3, 1), LEAST_ROWS: (2, 2)},
}
"""NVFP4 or not, rows of a tile -> stages of weights of a CTA, and CTAs of a multiprocessor: what fits, and was the fastest."""
LEAST_SCALES = 32
"""Of rows that a copy takes: what it writes begins at a multiple of 128 bytes in each stage."""
PART = 2 * 4 * 256
"""Sums of a CTA that shares a tile: both halves, four of each consumer."""
ALIGN = {False: 4, True: 1}
"""Where an expert's slots may begin, NVFP4 or not: the copy engine takes scales from multiples of 16 bytes on."""
CTAS = {False: 2, True: 1}
"""Of a cluster, which share what they read."""
COLUMNS = {False: 128, True: 256}
"""What rows must be multiples of."""
PERMUTE_THREADS, GATHER_THREADS, PRODUCT_THREADS = 1024, 256, 384
MOST_CHOSEN = 32
"""Experts of a token."""
RESIDENT = 8
"""Blocks of GATHER_THREADS on a multiprocessor."""
HALF, BOX, MORE = 128, 8, 32
"""Rows of weights, and of activations, that one copy takes."""
Rows = tuple[Tensor, Tensor | None]
"""Activations, and the scales of FP8 ones."""


class Route(NamedTuple):
    """What `moe_permute` finds."""

    offsets: Tensor
    pairs: Tensor
    slots: Tensor
    work: Tensor
    """I32 [1 + tiles, 4]"""
    ends: Tensor
    """I32 [E]: the slot after an expert's last row."""
    arrivals: Tensor
    """I32 [PERMUTE_THREADS]: zeros, by which CTAs that share a tile count themselves."""
    most: int
    """Rows of a tile."""


class Products(NamedTuple):
    """Gate and up, SwiGLU, and down, by some library."""

    most: int
    """Rows of one of its tiles."""
    align: int
    """Where an expert's slots may begin."""
    both: Callable[[Rows, Weights, Weights, Route], Tensor]
    """Gathered rows, both matrices, and the route -> BF16 [slots, H]"""


def has_kernel(x: Tensor, gate_up: Weights, top_k: int) -> bool:
    """Whether the kernels take these sizes on this device."""
    unit, hidden, width = COLUMNS[len(gate_up) == 3], x.shape[1], gate_up[0].shape[1] // 2
    sizes = hidden % unit == 0 and width % unit == 0 and 0 < len(gate_up[0]) <= PERMUTE_THREADS and 0 < top_k <= MOST_CHOSEN
    return x.is_cuda and sizes and torch.cuda.get_device_capability(x.device) == (9, 0)


def experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    out: Tensor,
    first: int = 0,
    overlap: bool = False,
    added: Callable[[], Tensor] | None = None,
    products: Products | None = None,
) -> None:
    """x BF16 [T, H], indices I32 and weights F32 [T, K] -> out BF16 [T, H]; all but indices `aligned`.

    `overlap`: let the first kernel start while the one before it on the stream still runs. `added`: asked at the end for rows
    BF16 [T, H] that are added to the result. `products`: others than ours.
    """
    nvfp4 = len(gate_up) == 3
    products = products or Products(most_rows(nvfp4, len(x), indices.numel(), len(gate_up[0])), ALIGN[nvfp4], _both)
    with torch.cuda.device(x.device):
        route = permute(indices, len(gate_up[0]), first, products.most, products.align, overlap)
        outer = products.both(gather(x, route, indices.shape[1], nvfp4), gate_up, down, route)
        finalize(outer, weights, route.slots, out, added() if added else None)


def _both(gathered: Rows, gate_up: Weights, down: Weights, route: Route) -> Tensor:
    """Our products."""
    like, slots = gathered[0], len(route.pairs)
    inner = rows(like, slots, gate_up[0].shape[1] // 2, len(gate_up) == 3)
    product(gate_up, gathered, route, inner)
    outer = like.new_empty((slots, down[0].shape[1]), dtype=torch.bfloat16)
    product(down, inner, route, (outer, None))
    return outer


def most_rows(nvfp4: bool, tokens: int, pairs: int, experts: int) -> int:
    """Rows of a tile: few of few tokens, and of NVFP4 where an expert cannot expect more, even if all pairs are this rank's."""
    if tokens <= LEAST_ROWS:
        return LEAST_ROWS
    return FEW_ROWS if nvfp4 and pairs <= FEW_ROWS * experts else MOST_ROWS


def permute(indices: Tensor, experts: int, first: int, most: int, align: int = 1, overlap: bool = False) -> Route:
    """indices I32 [T, K] -> the pairs by expert, from a multiple of `align` on, and tiles of at most `most` of an expert's"""
    count = indices.numel()
    capacity = (count + (align - 1) * min(count, experts)) // align * align
    sizes = (experts + 1,), (capacity,), (count,), (1 + min(count, experts + count // most), 4), (experts,), (PERMUTE_THREADS,)
    route = Route(*(indices.new_empty(size) for size in sizes), most)
    module = ROUTE.module(HIDDEN=FP8_GROUP, TOP_K=1)
    arguments = aligned(indices), *route[:-1], count, capacity, experts, first, most, align
    module.launch("moe_permute", (1, 1, 1), PERMUTE_THREADS, *arguments, overlap=overlap)
    return route


def gather(x: Tensor, route: Route, top_k: int, nvfp4: bool) -> Rows:
    """The rows of the pairs' tokens: E4M3 [slots, H] and scales F32 [H/128, slots], or BF16 [slots, H] in the kernel's order."""
    out, scales = rows(x, len(route.pairs), x.shape[1], nvfp4)
    module, given = ROUTE.module(HIDDEN=x.shape[1], TOP_K=top_k), (x, route.pairs, route.work)
    if scales is None:
        module.launch("moe_gather_bf16", _round(route), GATHER_THREADS, *given, out, overlap=True)
    else:
        module.launch("moe_gather_fp8", _round(route), GATHER_THREADS, *given, out, scales, scales.shape[1], overlap=True)
    return out, scales


def swiglu(both: Tensor, route: Route) -> Rows:
    """Gate and up BF16 [slots, 2I] -> silu(gate) * up, E4M3 [slots, I] and scales F32 [I/128, slots]"""
    slots, width = len(both), both.shape[1] // 2
    out, scales = rows(both, slots, width, False)
    module = ROUTE.module(HIDDEN=width, TOP_K=1)
    arguments = both, route.pairs, route.work, out, scales, scales.shape[1]
    module.launch("moe_swiglu_fp8", _round(route), GATHER_THREADS, *arguments, overlap=True)
    return out, scales


def _round(route: Route) -> tuple[int, int, int]:
    """Blocks that share the slots: as many as run at once."""
    return min(len(route.pairs), RESIDENT * processors(route.pairs.device)), 1, 1


def product(weights: Weights, values: Rows, route: Route, out: Rows, overlap: bool = True) -> None:
    """Rows times their experts' weights: down's into `out` BF16 [slots, H], gate's and up's as what the next product takes.

    `overlap`: weights are loaded while the kernel before on the stream still runs; what that one waited for includes `route`.
    """
    (codes, scales, *rest), (given, given_scales), (result, result_scales) = weights, values, out
    columns, swiglu = given.shape[1], codes.shape[1] != result.shape[1]
    nvfp4 = given_scales is None
    boxes = (tensor_map(given, height, 128 // given.element_size(), True) for height in (BOX, MORE))
    moved = tensor_map(codes.flatten(0, 1), HALF, 128, True), *boxes
    third = tensor_map(scales.flatten(0, 1), HALF, 16) if nvfp4 else tensor_map(given_scales, 1, max(route.most, LEAST_SCALES))
    macros = variant(nvfp4, swiglu, columns, result.shape[1], route.most)
    written = result, (result if result_scales is None else result_scales), 0 if result_scales is None else result_scales.shape[1]
    ctas = processors(result.device) // 2 * 2 * macros["RESIDENT"]
    parts = result.new_empty((ctas if route.most == LEAST_ROWS else 0, PART), dtype=torch.float32)
    arguments = *moved, third, (rest[0] if nvfp4 else scales), route.work, *written, parts, route.arrivals
    how = {"overlap": overlap, "shared": _shared_bytes(nvfp4, route.most)}
    KERNEL.module(**macros).launch("moe_product", (ctas, 1, 1), PRODUCT_THREADS, *arguments, **how)


def variant(nvfp4: bool, swiglu: bool, columns: int, rows: int, most: int) -> dict[str, int]:
    """The product's macros."""
    stages, resident = STAGES_AND_RESIDENT[nvfp4][most]
    form = {"NVFP4": int(nvfp4), "SWIGLU": int(swiglu), "CTAS": CTAS[nvfp4], "RESIDENT": resident, "STAGES": stages}
    return form | {"COLUMNS": columns, "ROWS": rows, "MOST": most}


def _shared_bytes(nvfp4: bool, most: int) -> int:
    """Of stages, a tile's largest magnitudes, barriers, and their alignment."""
    weights, activations = 2 * 16384, 128 * most
    stages, _ = STAGES_AND_RESIDENT[nvfp4][most]
    stage = weights + (4096 + 4 * activations if nvfp4 else activations + 4 * max(most, LEAST_SCALES))
    return stages * stage + 9 * most * 4 + 1152


def finalize(outer: Tensor, weights: Tensor, slots: Tensor, out: Tensor, added: Tensor | None = None) -> None:
    """`plain.finalize`, plus `added`, into out BF16 [T, H]; outer BF16 [slots, H].

    Each token gathers its rows, in the order of its experts: the same bits each time. Atomics that scatter rows would add float32
    in the order of arrival, need out in float32 (twice the bytes) and a pass of zeros before and of rounding after.
    """
    tokens, hidden = out.shape
    module = ROUTE.module(HIDDEN=hidden, TOP_K=weights.shape[1])
    grid = tokens, -(-hidden // (8 * GATHER_THREADS)), 1
    arguments = outer, weights, slots, ctypes.c_void_p() if added is None else added, out
    alone = added is None  # else two kernels come before it, and both are awaited whole
    module.launch("moe_finalize", grid, GATHER_THREADS, *arguments, overlap=alone)


def places(columns: int) -> Tensor:
    """Where the NVFP4 kernel has each column of activations."""
    k = torch.arange(columns)
    return k // 256 * 256 + k // 8 % 8 * 32 + k % 4 * 8 + k // 64 % 4 * 2 + k // 4 % 2


def rows(like: Tensor, count: int, columns: int, nvfp4: bool) -> Rows:
    """Space for activations and, for FP8, their scales, a column a row, padded to 16 bytes."""
    if nvfp4:
        return like.new_empty((count, columns)), None
    scales = like.new_empty((columns // FP8_GROUP, -(-count // 4) * 4), dtype=torch.float32)
    return like.new_empty((count, columns), dtype=FP8), scales
