"""The product 7168 -> 2112 beside cuBLAS, TensorRT-LLM and sgl-kernel; norms, RoPE and cache write; and both in a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from plugins.bench import Bench, Call, compiled, relative
from plugins.fused_qkv_a import op, reference
from plugins.router_gemm import op as gemm

__all__ = ["rows"]

HIDDEN, Q, LATENT, ROPE = 7168, 1536, 512, 64
COLUMNS = Q + LATENT + ROPE
TOKENS = (1, 8, 16, 32, 64, 256, 1024, 4096)
SLOTS, POSITIONS, EPS = 65536, 4096, 1e-6
TURNS = 3


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Both kernels alone and one after the other, weights in L2 and (cold) not."""
    weight = torch.randn(COLUMNS, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        yield _product(bench, x, weight)
        for fp8 in (False, True):
            yield _tail(bench, linear(x, weight), fp8)
        yield _both(bench, x, weight)


def _product(bench: Bench, x: Tensor, weight: Tensor) -> dict[str, Any]:
    wanted, out = x.double() @ weight.double().t(), x.new_full((len(x), COLUMNS), torch.nan)
    return bench.row(
        "qkv_a_gemm",
        {"tokens": len(x)},
        lambda overlap: _multiply(x, weight, out, overlap),
        error=lambda: relative(out, wanted),
        eager=lambda: linear(x, weight),
        compiled=lambda: compiled(linear)(x, weight),
        peers=_peers(x, weight),
        right=lambda found: relative(found, wanted) < 5e-3,
        moved=(x.numel() + weight.numel() + out.numel()) * 2,
        flops=2 * len(x) * weight.numel(),
        cold=True,
        overlaps=len(x) <= op.FEW_TOKENS,
        turns=TURNS,
        why="" if len(x) <= op.FEW_TOKENS else "it is cuBLAS",
    )


def _multiply(x: Tensor, weight: Tensor, out: Tensor, overlap: bool) -> None:
    """What the op takes: beyond a few tokens cuBLAS."""
    if len(x) <= op.FEW_TOKENS:
        gemm.launch(x, weight, out, overlap)
    else:
        torch.mm(x, weight.t(), out=out)


def _peers(x: Tensor, weight: Tensor) -> dict[str, Call]:
    out = x.new_empty((len(x), COLUMNS))

    def trtllm() -> Tensor:
        import trtllm_kernel  # noqa: F401  registers torch.ops.trtllm

        return torch.ops.trtllm.dsv3_fused_a_gemm_op(x, weight.t(), None, torch.bfloat16)

    def sgl() -> Tensor:
        torch.ops.sgl_kernel.dsv3_fused_a_gemm(out, x, weight.t())
        return out

    def vllm() -> Tensor:
        torch.ops._C.dsv3_fused_a_gemm(out, x, weight.t())
        return out

    small = {"trtllm": trtllm, "sgl": sgl, "vllm": vllm} if len(x) <= 16 else {}
    return {"cublas": lambda: linear(x, weight)} | small


def _inputs(tokens: int, fp8: bool) -> tuple[Tensor, ...]:
    """q_norm, kv_norm, cos_sin, positions, slots, cache"""
    norms = (torch.randn(size, device="cuda").bfloat16() for size in (Q, LATENT))
    angles = torch.randn(POSITIONS, ROPE // 2, device="cuda")
    positions = torch.randint(POSITIONS, (tokens,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(SLOTS, device="cuda")[:tokens]
    cache = torch.zeros(SLOTS, LATENT + ROPE, device="cuda", dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    return *norms, torch.cat((angles.cos(), angles.sin()), 1), positions, slots, cache


def _tail(bench: Bench, qkv: Tensor, fp8: bool) -> dict[str, Any]:
    inputs, q_a = _inputs(len(qkv), fp8), qkv.new_full((len(qkv), Q), torch.nan)
    *fixed, cache = inputs
    wanted_cache = cache.clone()
    wanted = reference.tail(qkv, *fixed, wanted_cache, 1.0, EPS)

    def error() -> float:
        return max(relative(q_a, wanted), relative(cache, wanted_cache))

    row_bytes = (LATENT + ROPE) * cache.element_size()
    return bench.row(
        "norm_rope_cache",
        {"tokens": len(qkv), "cache": "fp8" if fp8 else "bf16"},
        lambda overlap: op.launch(qkv, *inputs, q_a, 1.0, EPS, overlap),
        error=error,
        eager=lambda: _eager_tail(qkv, *inputs),
        compiled=None if fp8 else lambda: compiled(_eager_tail)(qkv, *inputs),
        peers={},
        right=lambda _: True,
        moved=(qkv.numel() + q_a.numel()) * 2 + len(qkv) * (row_bytes + ROPE * 4 + 12),
        cold=True,
    )


def _eager_tail(
    qkv: Tensor, q_norm: Tensor, kv_norm: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> Tensor:
    """As an engine without the kernel would; a boolean mask of slots cannot be captured."""
    q, latent, k_rope = qkv.split((Q, LATENT, ROPE), dim=-1)
    row = torch.cat((reference.norm(latent, kv_norm, EPS), reference.rotate(k_rope, cos_sin[positions.long()])), dim=-1)
    cache.view(torch.uint8).index_copy_(0, slots, row.to(cache.dtype).view(torch.uint8))
    return reference.norm(q, q_norm, EPS)


def _both(bench: Bench, x: Tensor, weight: Tensor) -> dict[str, Any]:
    inputs, q_a = _inputs(len(x), False), x.new_empty((len(x), Q))
    *fixed, cache = inputs
    wanted = reference.tail(linear(x, weight), *fixed, cache.clone(), 1.0, EPS)
    qkv = x.new_empty((len(x), COLUMNS))

    def ours(overlap: bool) -> None:
        _multiply(x, weight, qkv, overlap)
        op.launch(qkv, *inputs, q_a, 1.0, EPS, overlap)

    moved = (x.numel() + weight.numel() + 2 * qkv.numel()) * 2
    return bench.row(
        "fused_qkv_a",
        {"tokens": len(x)},
        ours,
        error=lambda: relative(q_a, wanted),
        eager=lambda: _eager_tail(linear(x, weight), *inputs),
        compiled=lambda: compiled(_eager_tail)(linear(x, weight), *inputs),
        peers={},
        right=lambda _: True,
        moved=moved,
        flops=2 * len(x) * weight.numel(),
        cold=True,
    )
