"""Whether our kernel or cuBLAS is faster for queries (`tactics.json`; see `plugins.tactics`), and cuBLAS's forms without copies."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from plugins.tactics import OURS, Table, ours_alone

__all__ = ["TABLE", "bmm_output", "bmm_query", "present"]

TABLE = Table(Path(__file__).with_name("tactics.json"), "mla_absorb", ("device",), ("heads", "tokens"), ("bmm",))


def present() -> tuple[str, ...]:
    """Implementations that can be used: cuBLAS always."""
    return (OURS,) if ours_alone() else (OURS, "bmm")


def bmm_query(q: Tensor, w_uk: Tensor, query: Tensor) -> None:
    """q [T, A, N + R], w_uk [A, N, L] into query [T, A, L + R]: a batched product into its place, and a copy of the rest"""
    nope, latent = w_uk.shape[1:]
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=query[..., :latent].transpose(0, 1))
    query[..., latent:] = q[..., nope:]


def bmm_output(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    """latent [T, A, L], w_uv [A, V, L] into out [T, A, V]"""
    torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))

