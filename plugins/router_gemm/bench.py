"""The router's product beside cuBLAS, and TensorRT-LLM, sgl-kernel and vLLM, which have kernels up to 16 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, relative
from plugins.router_gemm import op

__all__ = ["rows"]

HIDDEN, EXPERTS, TOKENS = 7168, 256, (1, 2, 4, 8, 16, 32, 64)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """DeepSeek-R1's, with weights in L2 and (cold) not."""
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
        wanted, logits = x.double() @ weight.double().t(), torch.full((tokens, EXPERTS), torch.nan, device="cuda")
        yield bench.row(
            "router_gemm",
            {"model": "deepseek_r1", "tokens": tokens},
            lambda overlap, x=x, weight=weight, logits=logits: op.launch(x, weight, logits, overlap),
            error=lambda logits=logits, wanted=wanted: relative(logits, wanted),
            eager=lambda x=x, weight=weight: x.float() @ weight.float().t(),
            peers=_peers(x, weight),
            right=lambda found, wanted=wanted: relative(found, wanted) < 1e-5,
            moved=x.numel() * 2 + weight.numel() * 2 + wanted.numel() * 4,
            cold=True,
        )


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
