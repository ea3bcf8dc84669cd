"""vLLM's Marlin kernels, which Hopper takes for NVFP4 experts there: the benchmark's peer of ours, on the same weights.

Weights are laid out as vLLM 0.20 does (`marlin_utils_fp4.py`, `marlin_utils_test.py`): 16 columns by 64 rows of codes to a
piece, in the order in which a warp's threads use them, and scales as S0E5M3, which are E4M3 without its sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.bench import Call
from plugins.moe_grouped_gemm import launch
from plugins.moe_grouped_gemm.reference import Weights
from plugins.nvrtc import processors
from plugins.quantize.reference import FP8

__all__ = ["experts", "packed", "product"]

FE2M1F = 2 | 1 << 8 | 1 << 16 | 1 << 49
"""vLLM's number of the type: 2 bits of exponent, 1 of mantissa, signed, all values finite."""
TILE, PIECE = 16, 64
"""Columns and rows of a piece."""
GLOBAL_UNIT, SCALE_UNIT, MOST_SCALE = 2.0**119, 2.0**7, 448
"""What codes and scales lack as BF16 and as S0E5M3."""
BLOCKS, FULL = (8, 16, 32, 48, 64), 0.9
"""Rows of a block; the first is taken that the average expert fills less than so far."""
BLOCKS_OF_A_PROCESSOR = 4
REST = True, False, True, False, -1, -1, -1
"""All columns are there, no atomics, sums in float32, no zero points; the library finds the tile."""


def packed(weights: Weights) -> Weights:
    """Codes U8 [E, rows, columns/2], scales E4M3 [E, rows, columns/16], F32 [E] -> as Marlin reads them."""
    codes, scales, scales_2 = weights
    factor = (MOST_SCALE / scales.float().max()).log2().floor().exp2()
    laid_out = torch.stack([_codes(each) for each in codes]), torch.stack([_scales(each, factor) for each in scales])
    return *laid_out, scales_2 * GLOBAL_UNIT / factor


def _codes(codes: Tensor) -> Tensor:
    """U8 [rows, columns/2], the lower half first -> I32 [columns/16, 2 rows]"""
    values = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).t()
    columns, rows = values.shape
    tiles = values.reshape(columns // TILE, TILE, rows // TILE, TILE).transpose(1, 2)
    words = tiles.reshape(-1, TILE * PIECE)[:, _order().to(codes.device)].view(columns // TILE, -1, 8).int()
    shifted = words << torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)
    return shifted.sum(2, dtype=torch.int32)


def _order() -> Tensor:
    """Of a piece's four tiles, which code is the n-th: those of a thread's four rows and columns, for two of them in turn."""
    lane, tile = torch.arange(32), torch.arange(4)
    steps = torch.tensor([0, 1, 8, 9]) * TILE
    one = (lane % 4 * 2 * TILE + lane // 4).view(32, 1, 1, 1) + torch.tensor([0, 8]).view(2, 1) + steps
    each = (one + tile.view(1, 4, 1, 1) * TILE * TILE).reshape(-1, 8)
    return each[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def _scales(scales: Tensor, factor: Tensor) -> Tensor:
    """E4M3 [rows, columns/16] -> S0E5M3 [columns/16, rows]"""
    order = torch.arange(PIECE, device=scales.device).view(8, 8).t().flatten()
    turned = scales.t().float().reshape(-1, PIECE)[:, order].view(-1, 4)[:, [0, 2, 1, 3]] * (factor * SCALE_UNIT)
    bits = torch.where(turned < 2, 0, turned).half().view(torch.int16) << 1
    return bits.view(torch.uint8)[:, 1::2].reshape(-1, len(scales)).contiguous().view(FP8)


def product(weights: Weights, rows: launch.Rows, count: int) -> Call:
    """`count` rows for each expert, as peers.py has them; weights are `packed`, rows in our kernel's order."""
    given = rows[0][: len(weights[0]) * count]
    given = given[:, launch.places(given.shape[1]).to(given.device)].contiguous()
    indices = torch.arange(len(weights[0]), device=given.device, dtype=torch.int32).repeat_interleave(count).view(-1, 1)
    routed, dummy = _routed(indices, len(weights[0])), torch.ones_like(indices, dtype=torch.float32)
    out, work = given.new_empty(len(given), weights[1].shape[2]), _workspace(given)
    return lambda: _multiply(given, weights, routed, dummy, out, work, scaled=False)


def experts(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Weights, down: Weights, everywhere: int) -> Call:
    """All of the op as vLLM calls it: of `everywhere` experts the first ones are here; both matrices `packed`."""
    here, (pairs, hidden), width = len(gate_up[0]), (indices.numel(), x.shape[1]), gate_up[1].shape[2] // 2
    both, inner, outer = (x.new_empty(pairs, size) for size in (2 * width, width, hidden))
    out, work, numbers = torch.empty_like(x), _workspace(x), torch.arange(everywhere, device=x.device, dtype=torch.int32)
    here_or_not = None if here == everywhere else torch.where(numbers < here, numbers, -1)

    def call() -> Tensor:
        routed = _routed(indices, here, here_or_not)
        _multiply(x, gate_up, routed, weights, both, work, scaled=False)
        torch.ops._C.silu_and_mul(inner, both)
        if here_or_not is not None:
            outer.zero_()
        _multiply(inner, down, routed, weights, outer, work, scaled=True)
        torch.ops._moe_C.moe_sum(outer.view(len(x), -1, hidden), out)
        return out

    return call


Routed = tuple[Tensor, Tensor, Tensor, int]
"""Pairs by expert, padded to whole blocks; experts of blocks; how many; rows of a block."""


def _routed(indices: Tensor, here: int, here_or_not: Tensor | None = None) -> Routed:
    """By vLLM's rule, which counts other ranks' pairs, too. `here_or_not`: I32 [all experts], their numbers here or -1."""
    pairs, everywhere = indices.numel(), here if here_or_not is None else len(here_or_not)
    block = next((block for block in BLOCKS if pairs / here / block < FULL), BLOCKS[-1])
    space = pairs + everywhere * (block - 1)
    space = min(pairs * block, space) if pairs < everywhere else space
    sizes = space, -(-space // block), 1
    found = [indices.new_empty(size, dtype=torch.int32) for size in sizes]
    torch.ops._moe_C.moe_align_block_size(indices, everywhere, block, *found, here_or_not)
    return *found, block


def _multiply(given: Tensor, weights: Weights, routed: Routed, factors: Tensor, out: Tensor, work: Tensor, scaled: bool) -> Tensor:
    """Rows times their experts' weights, with `scaled` times the pairs' factors too; rows of tokens are read once for each pair."""
    (codes, scales, scales_2), (*found, block), chosen = weights, routed, len(out) // len(given)
    matrix, form = (codes, None, scales, None, scales_2, None, None, None), (block, chosen, scaled, FE2M1F)
    sizes = len(given), scales.shape[2], given.shape[1]
    torch.ops._moe_C.moe_wna16_marlin_gemm(given, out, *matrix, work, *found, factors, *form, *sizes, *REST)
    return out


def _workspace(like: Tensor) -> Tensor:
    return torch.zeros(BLOCKS_OF_A_PROCESSOR * processors(like.device), device=like.device, dtype=torch.int32)
