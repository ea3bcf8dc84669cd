"""Other libraries' grouped FP8 products for the benchmark, of `count` rows for each expert: [E * count, columns] lie side by side.

Each takes the weights' codes and scales and the rows' (`launch.Rows`), and gives a call that gives BF16 [..., height], the first
expert's first rows first. What a library wants in another layout is made once, outside of the call. Not here: sgl-kernel's
es_fp8_blockwise_scaled_grouped_mm, which took the same time. TensorRT-LLM's compiles itself from headers (`deep_gemm/`) that it
looks for in the include folder of what `pip show tensorrt_llm` finds; without them it refuses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plugins.bench import Call
from plugins.moe_grouped_gemm import launch
from plugins.moe_grouped_gemm.reference import Weights
from plugins.quantize.reference import FP8, FP8_GROUP

__all__ = ["PEERS"]

MASKED_ROWS = 128
"""Room of an expert at least, in DeepGEMM's masked layout."""
WORKSPACE = 64 << 20
TRTLLM_ALIGN = 32
"""An expert's scales begin at multiples of it."""


def _deep_gemm(weights: Weights, rows: launch.Rows, count: int) -> Call:
    import deep_gemm

    experts, height, columns = weights[0].shape
    space, used = max(count, MASKED_ROWS), experts * count
    codes = torch.zeros(experts, space, columns, device="cuda", dtype=torch.uint8)
    codes[:, :count] = rows[0][:used].view(torch.uint8).view(experts, count, columns)
    scales = torch.zeros(experts, columns // FP8_GROUP, space, device="cuda")
    scales[..., :count] = rows[1][:, :used].reshape(-1, experts, count).transpose(0, 1)
    out = torch.empty(experts, space, height, device="cuda", dtype=torch.bfloat16)
    counts = torch.full((experts,), count, device="cuda", dtype=torch.int32)
    given = (codes.view(FP8), scales.transpose(1, 2)), weights, out, counts, count

    def call() -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_masked(*given)
        return out

    return call


def _sgl(weights: Weights, rows: launch.Rows, count: int) -> Call:
    """CUTLASS, one problem an expert; scales of rows lie as the rows do."""
    codes, scales = weights
    experts, height, columns = codes.shape
    used = experts * count
    out = torch.empty(used, height, device="cuda", dtype=torch.bfloat16)
    given = rows[0][:used], codes.transpose(1, 2), rows[1][:, :used].t().contiguous(), scales.transpose(1, 2)
    inner, outer = (torch.full((experts,), width, device="cuda", dtype=torch.int64) for width in (columns, height))
    pointers, layouts = _empty(5, (experts,), torch.int64), _empty(2, (experts, 5), torch.int32)
    sizes = torch.tensor([[count, height, columns]] * experts, device="cuda", dtype=torch.int32)
    starts = torch.arange(0, used, count, device="cuda", dtype=torch.int32)
    workspace = torch.empty(WORKSPACE, device="cuda", dtype=torch.uint8)
    arguments = *pointers, *given, inner, inner, outer, *layouts, sizes, starts, workspace

    def call() -> Tensor:
        torch.ops.sgl_kernel.fp8_blockwise_scaled_grouped_mm(out, *arguments)
        return out

    return call


def _trtllm(weights: Weights, rows: launch.Rows, count: int) -> Call:
    """A fork of DeepGEMM for rows that lie side by side; each expert's scales begin at the last multiple that leaves room."""
    import trtllm_kernel  # noqa: F401  registers torch.ops.trtllm

    codes, scales = weights
    experts, used = len(codes), len(codes) * count
    offsets = torch.arange(experts + 1, device="cuda") * count
    starts = (offsets + torch.arange(experts + 1, device="cuda") * (TRTLLM_ALIGN - 1)) // TRTLLM_ALIGN * TRTLLM_ALIGN
    padded = torch.zeros(codes.shape[2] // FP8_GROUP, int(starts[-1]), device="cuda")
    padded[:, (starts[:-1, None] + torch.arange(count, device="cuda")).flatten()] = rows[1][:, :used]
    return lambda: torch.ops.trtllm.fp8_block_scaling_moe_gemm(rows[0][:used], codes, padded, scales, offsets)


def _empty(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(shape, device="cuda", dtype=dtype) for _ in range(count)]


PEERS: dict[str, Callable[[Weights, launch.Rows, int], Call]] = {
    "deep_gemm": _deep_gemm,
    "sgl": _sgl,
    "trtllm": _trtllm,
}
