"""R1's routed experts on one rank as torch ops: CUDA runs the kernels, CPU plain torch, shapes are known to `torch.export`.

    out = torch.ops.r1_pipeline.moe_fp8_block(x, indices, weights, gate_up, gate_up_scale, down, down_scale, first_expert,
                                              shared_gate_up, shared_down)
    out = torch.ops.r1_pipeline.moe_w4a16_nvfp4(x, indices, weights, gate_up, gate_up_scale, gate_up_scale_2,
                                                down, down_scale, down_scale_2, first_expert, shared_gate_up, shared_down)

x BF16 [T, H], indices I32 or I64 [T, K], weights F32 [T, K] -> BF16 [T, H]. The E experts here are numbers first_expert
and on; others add nothing (with expert parallelism the caller adds the ranks' results). Gate rows lie above up rows. A shared
expert may be added, BF16 [2S, H] and [H, S], in BF16 as eager torch would; in a CUDA graph it runs on another stream meanwhile.

    FP8 block   gate_up E4M3 [E, 2I, H], down E4M3 [E, H, I]; scales F32 [E, rows/128, columns/128]
    NVFP4       gate_up U8 [E, 2I, H/2], down U8 [E, H, I/2]; scales E4M3 [E, rows, columns/16], scales_2 F32 [E]

The kernels need sm_90, H and I of multiples of 128 (NVFP4: 256), at most 1024 experts and 32 of a token; other cases are computed
one expert after the other in plain torch. They ask the host nothing: a step can be captured in a graph, and gives the same bits
each time (but the sums of up to 8 tokens are cut by how many experts these choose together); space is taken for all pairs, which
may all be this rank's: 3 H + I bytes each (NVFP4: 4 H + 2 I).
FP8 goes through DeepGEMM's products where `tactics.json` has all of it measured faster and it is installed: on an H200 from
about 128 rows an expert on. gate and up are rounded to BF16 there on their way through memory.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.moe_grouped_gemm import launch, plain, shared, tactics
from plugins.moe_grouped_gemm.reference import Weights
from plugins.nvrtc import aligned
from plugins.quantize.reference import FP8, FP8_GROUP, NVFP4_GROUP
from plugins.tactics import OURS

__all__ = ["moe_fp8_block", "moe_permute", "moe_w4a16_nvfp4"]

WHOLE = torch.int32, torch.int64
"""Types of indices."""
LEAST, MOST = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max


@torch.library.custom_op("r1_pipeline::moe_permute", mutates_args=())
def moe_permute(indices: Tensor, experts: int, first_expert: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """indices [T, K] -> offsets I32 [E + 1], pairs I32 [T * K] by expert (-1 after the last), slots I32 [T * K] (-1: not ours)"""
    if indices.dim() != 2 or indices.dtype not in WHOLE or experts < 0:
        found = f"indices are {indices.dtype} {list(indices.shape)} of {experts} experts"
        raise ConfigError(f"{found}: they must be int32 (or int64) [T, K], of 0 or more.")
    if not indices.is_cuda or not 0 < experts <= launch.PERMUTE_THREADS or not indices.numel():
        return plain.permute(indices, experts, first_expert)
    with torch.cuda.device(indices.device):
        return launch.permute(_narrow(indices), experts, first_expert, launch.MOST_ROWS)[:3]


@torch.library.custom_op("r1_pipeline::moe_fp8_block", mutates_args=())
def moe_fp8_block(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    first_expert: int = 0,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """-> BF16 [T, H]"""
    matrices = (gate_up, gate_up_scale), (down, down_scale)
    return _experts(x, indices, weights, *matrices, first_expert, shared_gate_up, shared_down)


@torch.library.custom_op("r1_pipeline::moe_w4a16_nvfp4", mutates_args=())
def moe_w4a16_nvfp4(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    first_expert: int = 0,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """-> BF16 [T, H]"""
    matrices = (gate_up, gate_up_scale, gate_up_scale_2), (down, down_scale, down_scale_2)
    return _experts(x, indices, weights, *matrices, first_expert, shared_gate_up, shared_down)


def _experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    first_expert: int,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
) -> Tensor:
    _check_routes(x, indices, weights)
    (_check_nvfp4 if len(gate_up) == 3 else _check_fp8)(x, *gate_up, *down)
    everyones = _checked_shared(x, shared_gate_up, shared_down)
    if not launch.has_kernel(x, gate_up, indices.shape[1]):
        out = plain.experts(x, indices, weights, gate_up, down, first_expert)
        return out + shared.expert(x, *everyones) if everyones else out
    out = x.new_empty(x.shape)
    if not len(x):
        return out
    added = shared.beside(x, *everyones) if everyones else None
    matrices = (tuple(map(aligned, parts)) for parts in (gate_up, down))
    given = aligned(x), _narrow(indices), aligned(weights), *matrices, out, first_expert
    ours = functools.partial(launch.experts, *given, added=added)
    tactics.TABLE.attempt(_fastest(x, gate_up), functools.partial(ours, products=tactics.DEEP_GEMM), ours)
    return out


def _narrow(indices: Tensor) -> Tensor:
    """Indices as I32; numbers that it cannot hold become its last ones, which are no expert's, instead of others."""
    return indices if indices.dtype == torch.int32 else indices.clamp(LEAST, MOST).int()


def _fastest(x: Tensor, gate_up: Weights) -> str:
    """Of the implementations that can be used; ours alone takes NVFP4."""
    names = (OURS,) if len(gate_up) == 3 else tactics.present()
    return tactics.TABLE.choose((torch.cuda.get_device_name(x.device),), (len(gate_up[0]), len(x)), names)


@moe_permute.register_fake
def _(indices: Tensor, experts: int, first_expert: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    count = indices.shape[0] * indices.shape[1]
    return tuple(indices.new_empty((size,), dtype=torch.int32) for size in (experts + 1, count, count))


for _op in (moe_fp8_block, moe_w4a16_nvfp4):
    _op.register_fake(lambda x, *_: x.new_empty(x.shape))


def _check_routes(x: Tensor, indices: Tensor, weights: Tensor) -> None:
    if x.dim() != 2 or x.dtype != torch.bfloat16:
        raise ConfigError(f"x is {x.dtype} {list(x.shape)}: it must be bfloat16 [T, H].")
    types = indices.dtype in WHOLE and weights.dtype == torch.float32
    if not types or weights.dim() != 2 or len(weights) != len(x) or indices.shape != weights.shape:
        found = f"indices are {indices.dtype} {list(indices.shape)}, weights {weights.dtype} {list(weights.shape)}"
        raise ConfigError(f"{found}: they must be int32 (or int64) and float32, both [{len(x)}, K].")


def _check_fp8(x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> None:
    experts, hidden, width = _sizes(x, gate_up, down, FP8, 1)
    if hidden % FP8_GROUP or width % FP8_GROUP:
        raise ConfigError(f"Rows of {hidden} and {width} cannot be scaled in groups of {FP8_GROUP}: give multiples of it.")
    blocks, inner = hidden // FP8_GROUP, width // FP8_GROUP
    _check_scales("gate_up_scale", gate_up_scale, torch.float32, (experts, 2 * inner, blocks))
    _check_scales("down_scale", down_scale, torch.float32, (experts, blocks, inner))


def _check_nvfp4(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
) -> None:
    experts, hidden, width = _sizes(x, gate_up, down, torch.uint8, 2)
    if hidden % NVFP4_GROUP or width % NVFP4_GROUP:
        raise ConfigError(f"Rows of {hidden} and {width} cannot be scaled in groups of {NVFP4_GROUP}: give multiples of it.")
    _check_scales("gate_up_scale", gate_up_scale, FP8, (experts, 2 * width, hidden // NVFP4_GROUP))
    _check_scales("down_scale", down_scale, FP8, (experts, hidden, width // NVFP4_GROUP))
    _check_scales("gate_up_scale_2", gate_up_scale_2, torch.float32, (experts,))
    _check_scales("down_scale_2", down_scale_2, torch.float32, (experts,))


def _checked_shared(x: Tensor, gate_up: Tensor | None, down: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The shared expert's weights, if there are any."""
    if gate_up is None and down is None:
        return None
    if gate_up is None or down is None:
        raise ConfigError("The shared expert has one of two weights: give shared_gate_up and shared_down, or neither.")
    fits = gate_up.dim() == down.dim() == 2 and gate_up.shape == (2 * down.shape[1], x.shape[1]) and len(down) == x.shape[1]
    if not fits or {gate_up.dtype, down.dtype} != {torch.bfloat16}:
        found = f"The shared expert is {gate_up.dtype} {list(gate_up.shape)} and {down.dtype} {list(down.shape)}"
        raise ConfigError(f"{found}: it must be bfloat16 [2S, H] and [H, S] with H = {x.shape[1]}.")
    return gate_up, down


def _sizes(x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype, packed: int) -> tuple[int, int, int]:
    """E, H and I; `packed`: elements of a weight that share a byte."""
    hidden = x.shape[1]
    fits = gate_up.dim() == down.dim() == 3 and gate_up.shape == (len(down), 2 * packed * down.shape[2], hidden // packed)
    if not fits or down.shape[1] != hidden or {gate_up.dtype, down.dtype} != {dtype}:
        found = f"gate_up is {gate_up.dtype} {list(gate_up.shape)}, down {down.dtype} {list(down.shape)}"
        part = f"/{packed}" if packed > 1 else ""
        raise ConfigError(f"{found}: they must be {dtype}, [E, 2I, H{part}] and [E, H, I{part}] with H = {hidden}.")
    return len(gate_up), hidden, gate_up.shape[1] // 2


def _check_scales(name: str, scales: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if scales.dtype != dtype or scales.shape != shape:
        raise ConfigError(f"{name} is {scales.dtype} {list(scales.shape)}: it must be {dtype} {list(shape)}.")
