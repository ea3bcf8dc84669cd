"""The products around absorbed attention of R1's 128 heads, and of 16 of them, beside cuBLAS, which is the output's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, compiled, relative
from plugins.mla_absorb import op, reference, tactics

__all__ = ["rows"]

HEADS = (128, 16)
TOKENS = (1, 8, 32, 64, 128, 256, 1024, 4096)
WHY = "made for reading the weight once: beyond 64 tokens a CTA's tiles follow each other, and few heads are few CTAs"
WHY_FEW = "with the weight in the L2, where a layer of a model does not find it; torch.compile was not timed without"


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Both products, weights in L2 and (cold) not."""
    for heads in HEADS:
        kv_b = torch.randn(heads, 2 * op.NOPE, op.LATENT, device="cuda", dtype=torch.bfloat16) * op.LATENT**-0.5
        w_uk, w_uv = kv_b.split((op.NOPE, op.NOPE), 1)
        for tokens in TOKENS:
            yield _query(bench, torch.randn(tokens, heads, op.NOPE + op.ROPE, device="cuda", dtype=torch.bfloat16), w_uk)
            yield _output(bench, torch.randn(tokens, heads, op.LATENT, device="cuda", dtype=torch.bfloat16), w_uv)


def _query(bench: Bench, q: Tensor, w_uk: Tensor) -> dict[str, Any]:
    out, again = (q.new_full((*q.shape[:2], op.LATENT + op.ROPE), torch.nan) for _ in range(2))

    def bmm() -> Tensor:
        tactics.bmm_query(q, w_uk, again)
        return again

    def ours(overlap: bool) -> None:
        op.launch(q, w_uk, out, overlap)

    return _row(bench, "mla_absorb", (q, w_uk, out), ours, reference.absorb_query(q, w_uk), _eager_query, {"bmm": bmm})


def _eager_query(q: Tensor, w_uk: Tensor) -> Tensor:
    nope, rope = q.split((op.NOPE, op.ROPE), -1)
    return torch.cat((torch.einsum("tan,anl->tal", nope, w_uk), rope), -1)


def _output(bench: Bench, latent: Tensor, w_uv: Tensor) -> dict[str, Any]:
    out = latent.new_full((*latent.shape[:2], op.NOPE), torch.nan)

    def ours(_: bool) -> None:
        tactics.bmm_output(latent, w_uv, out)

    return _row(bench, "mla_absorb_output", (latent, w_uv, out), ours, reference.absorb_output(latent, w_uv), _eager_output, {})


def _eager_output(latent: Tensor, w_uv: Tensor) -> Tensor:
    return torch.einsum("tal,avl->tav", latent, w_uv).contiguous()


def _row(
    bench: Bench,
    plugin: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    ours: Call,
    wanted: Tensor,
    eager: Callable[[Tensor, Tensor], Tensor],
    peers: dict[str, Call],
) -> dict[str, Any]:
    x, weight, out = tensors
    return bench.row(
        plugin,
        {"heads": x.shape[1], "tokens": len(x)},
        ours,
        error=lambda: relative(out, wanted),
        eager=lambda: eager(x, weight),
        compiled=lambda: compiled(eager)(x, weight),
        peers=peers,
        right=lambda found: relative(found, wanted) < 5e-3,
        moved=2 * sum(tensor.numel() for tensor in tensors),
        flops=2 * len(x) * weight.numel(),
        cold=True,
        overlaps=bool(peers),
        why=WHY if len(x) > 64 else WHY_FEW,
    )
