"""The products around absorbed attention of R1's 128 heads, and of 16 of them, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, relative
from plugins.mla_absorb import op, reference, tactics

__all__ = ["rows"]

HEADS = (128, 16)
TOKENS = (1, 8, 32, 64, 128, 256, 1024)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Both products, weights in L2 and (cold) not."""
    for heads in HEADS:
        kv_b = torch.randn(heads, 2 * op.NOPE, op.LATENT, device="cuda", dtype=torch.bfloat16) * op.LATENT**-0.5
        w_uk, w_uv = kv_b.split((op.NOPE, op.NOPE), 1)
        for tokens in TOKENS:
            q = torch.randn(tokens, heads, op.NOPE + op.ROPE, device="cuda", dtype=torch.bfloat16)
            latent = torch.randn(tokens, heads, op.LATENT, device="cuda", dtype=torch.bfloat16)
            query = q.new_full((tokens, heads, op.LATENT + op.ROPE), torch.nan)
            out = q.new_full((tokens, heads, op.NOPE), torch.nan)
            yield _row(bench, "query", q, w_uk, query, reference.absorb_query(q, w_uk), _eager_query(q, w_uk))
            yield _row(bench, "output", latent, w_uv, out, reference.absorb_output(latent, w_uv), _eager_output(latent, w_uv))


def _row(bench: Bench, product: str, x: Tensor, weight: Tensor, out: Tensor, wanted: Tensor, eager: Call) -> dict[str, Any]:
    again = torch.empty_like(out)

    def bmm() -> Tensor:
        tactics.BMM[product](x, weight, again)
        return again

    return bench.row(
        "mla_absorb",
        {"heads": x.shape[1], "tokens": len(x), "product": product},
        lambda overlap: op.launch(x, weight, out, overlap),
        error=lambda: relative(out, wanted),
        eager=eager,
        peers={"bmm": bmm},
        right=lambda found: relative(found, wanted) < 5e-3,
        moved=2 * (x.numel() + weight.numel() + out.numel()),
        flops=2 * len(x) * weight.numel(),
        cold=True,
    )


def _eager_query(q: Tensor, w_uk: Tensor) -> Call:
    nope, rope = q.split((op.NOPE, op.ROPE), -1)
    return lambda: torch.cat((torch.einsum("tan,anl->tal", nope, w_uk), rope), -1)


def _eager_output(latent: Tensor, w_uv: Tensor) -> Call:
    return lambda: torch.einsum("tal,avl->tav", latent, w_uv).contiguous()
