"""Attention of R1's 128 heads over prompts and chunks of them, beside FlashAttention-3, cuDNN and flashinfer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plugins.bench import Bench, Call, micros, relative
from plugins.mla_prefill import op, reference, tactics

__all__ = ["rows", "work"]

HEADS, SCALE = 128, 192**-0.5
SHAPES = (
    *((1, tokens, tokens) for tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    *((1, tokens, 4096) for tokens in (64, 128, 256, 512, 1024)),
    (1, 2048, 16384),
    (8, 512, 512),
    (16, 128, 128),
)
"""Sequences, and the queries and keys of each."""
FEW_HEADS = 2
"""Compared with the reference."""


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Sequences of one length; `kv_us` is ours on kv_b's product as it is."""
    for batch, tokens, context in SHAPES:
        yield _row(bench, batch, tokens, context)


def work(tokens: int, context: int, heads: int = HEADS) -> int:
    """Floating point operations of one sequence's attention."""
    seen = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    return 2 * heads * seen * (op.NOPE + op.ROPE + op.VALUES)


def _row(bench: Bench, batch: int, tokens: int, context: int) -> dict[str, Any]:
    q = torch.randn(batch * tokens, HEADS, op.NOPE + op.ROPE, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(batch * context, HEADS, op.NOPE + op.VALUES, device="cuda", dtype=torch.bfloat16)
    k_rope = torch.randn(batch * context, op.ROPE, device="cuda", dtype=torch.bfloat16)
    k, v = (x.contiguous() for x in reference.joined(q, kv, k_rope))
    ends = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    cu_q, cu_k = ends * tokens, ends * context
    few = slice(0, FEW_HEADS)
    first = [x[: tokens if x is q else context, few] for x in (q, k, v)]
    wanted, _ = reference.mla_prefill(*first, cu_q[:2], cu_k[:2], SCALE)
    out, lse = q.new_full((len(q), HEADS, op.VALUES), torch.nan), q.new_empty((HEADS, len(q)), dtype=torch.float32)

    def part(found: Tensor) -> Tensor:
        return found[:tokens, few]

    def ours_on_kv() -> None:
        parts = kv[..., : op.NOPE], k_rope.unsqueeze(1), kv[..., op.NOPE :]
        op.launch(q, *parts, cu_q, cu_k, out, lse, SCALE)

    inputs = q, k, v, cu_q, cu_k, SCALE
    row = bench.row(
        "mla_prefill",
        {"batch": batch, "tokens": tokens, "context": context},
        lambda overlap: op.launch(q, k[..., : op.NOPE], k[..., op.NOPE :], v, cu_q, cu_k, out, lse, SCALE, overlap),
        error=lambda: relative(part(out), wanted),
        eager=_eager(q, k, v, batch),
        peers=_peers(inputs, batch == 1 and tokens == context),
        right=lambda found: relative(part(found), wanted) < 1e-2,
        moved=2 * (q.numel() + k.numel() + v.numel() + out.numel()),
        flops=batch * work(tokens, context),
        calls=4,
    )
    return row | {"kv_us": micros(ours_on_kv, 4), "tflop_per_s": round(batch * work(tokens, context) / row["ours_us"] / 1e6)}


def _eager(q: Tensor, k: Tensor, v: Tensor, batch: int) -> Call:
    """torch's attention, by its own choice; a mask where queries are not all the keys."""
    parts = [x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v)]
    tokens, context = parts[0].shape[2], parts[1].shape[2]
    seen = torch.ones(tokens, context, dtype=torch.bool, device="cuda").tril(context - tokens)
    mask = {"is_causal": True} if tokens == context else {"attn_mask": seen}
    return lambda: scaled_dot_product_attention(*parts, scale=SCALE, **mask)


def _peers(inputs: tuple[Any, ...], alone: bool) -> dict[str, Call]:
    peers: dict[str, Call] = {"fa3": lambda: tactics.fa3(*inputs)[0], "flashinfer": _flashinfer(*inputs)}
    return peers | ({"cudnn": lambda: tactics.cudnn(*inputs)[0]} if alone else {})


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> Call:
    state: list[Any] = []

    def call() -> Tensor:
        import flashinfer

        if not state:
            space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend="fa3")
            kinds = {"causal": True, "sm_scale": scale, "q_data_type": q.dtype, "kv_data_type": k.dtype}
            wrapper.plan(cu_q, cu_k, HEADS, HEADS, q.shape[2], head_dim_vo=v.shape[2], **kinds)
            state.append(wrapper)
        return state[0].run(q, k, v)

    return call
