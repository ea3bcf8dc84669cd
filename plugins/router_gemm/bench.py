"""The router's product beside cuBLAS, and TensorRT-LLM, sgl-kernel and vLLM, which have kernels up to 16 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, compiled, reading_us, relative
from plugins.router_gemm import op

__all__ = ["rows"]

HIDDEN, EXPERTS, TOKENS = 7168, 256, (1, 2, 4, 8, 16, 32, 48, 64, 256, 1024, 4096)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """DeepSeek-R1's, with weights in L2 and (cold) not; beyond 64 tokens the op takes cuBLAS. `read_us`: the weights' loads."""
    weight = torch.randn(EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    least = {"read_us": reading_us(weight), "read_cold_us": reading_us(weight, flush=True)}
    for tokens in TOKENS:
        yield _row(bench, torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16), weight) | least


def _row(bench: Bench, x: Tensor, weight: Tensor) -> dict[str, Any]:
    wanted, kernel = x.double() @ weight.double().t(), len(x) <= op.MAX_TOKENS
    logits = torch.full((len(x), EXPERTS), torch.nan, device="cuda")

    def ours(overlap: bool) -> None:
        nonlocal logits
        if kernel:
            op.launch(x, weight, logits, overlap)
        else:
            logits = op.router_gemm(x, weight)

    return bench.row(
        "router_gemm",
        {"model": "deepseek_r1", "tokens": len(x)},
        ours,
        error=lambda: relative(logits, wanted),
        eager=lambda: _eager(x, weight),
        compiled=lambda: compiled(_eager)(x, weight),
        peers=_peers(x, weight),
        right=lambda found: relative(found, wanted) < 1e-5,
        moved=x.numel() * 2 + weight.numel() * 2 + wanted.numel() * 4,
        flops=2 * len(x) * weight.numel(),
        cold=True,
        overlaps=kernel,
        why="64 CTAs read the weights from 2 tokens on, theirs are 256: enough for the L2, few for memory"
        if kernel
        else "it is cuBLAS",
    )


def _eager(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().t()


def _peers(x: Tensor, weight: Tensor) -> dict[str, Call]:
    out = torch.empty(len(x), len(weight), device="cuda")

    def trtllm() -> Tensor:
        import trtllm_kernel  # noqa: F401  registers torch.ops.trtllm

        return torch.ops.trtllm.dsv3_router_gemm_op(x, weight.t(), None, torch.float32)

    def sgl() -> Tensor:
        torch.ops.sgl_kernel.dsv3_router_gemm(out, x, weight)
        return out

    def vllm() -> Tensor:
        torch.ops._moe_C.dsv3_router_gemm(out, x, weight)
        return out

    small = {"trtllm": trtllm, "sgl": sgl, "vllm": vllm} if len(x) <= 16 else {}
    return {"cublas": lambda: torch.mm(x, weight.t(), out_dtype=torch.float32)} | small
