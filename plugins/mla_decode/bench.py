"""Latent attention of R1's 128 heads, and of the 16 that are a rank's of eight, beside FlashMLA and flashinfer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, compiled, micros, relative
from plugins.mla_decode import op, reference, tactics

__all__ = ["rows"]

HEADS, PAGE, SCALE = 128, 64, 192**-0.5
FEW_HEADS = 16
FP8 = "a pair of blocks is a CTA's least; queries are rounded in the kernel, and a second one joins float32 parts"
FEW = "a pair of blocks is a CTA's least, and a second kernel joins float32 parts; plans made before, once a step, are not counted"
MANY = "128 of 132 multiprocessors work: theirs cut sequences to fill all, by a plan made before, once a step, and not counted"
QUARTER = "16 heads fill a quarter of a tile's rows; plans made before, once a step, are not counted"
SGL_SEQUENCES = 4096
"""So many end its process."""
MOST_FEW = 64
"""Sequences; from here on their tiles are a wave of CTAs."""
SHAPES = (
    *((batch, 256) for batch in (1, 16, 64, 256, 1024, 4096)),
    *((batch, 1024) for batch in (1, 16, 64, 128)),
    *((batch, 4096) for batch in (1, 8, 32, 64, 128)),
    (256, 2048),
    *((batch, 16384) for batch in (1, 16)),
)
FEW_HEADS_SHAPES = (16, 1024), (1, 4096), (64, 4096)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """One query a sequence, all of one length, the pages of the cache in random order. FP8: `exact_us` with codes multiplied in
    FP16, `error_of_exact` how many times the error of exact products (of the cache's rounding, too) ours has, and `shortfall` what
    sums of one sign lack, `peer_shortfall` sgl's."""
    for fp8 in (False, True):
        for heads, shapes in ((HEADS, SHAPES), (FEW_HEADS, FEW_HEADS_SHAPES)):
            for batch, length in shapes:
                yield _row(bench, heads, batch, length, fp8)


def _row(bench: Bench, heads: int, batch: int, length: int, fp8: bool) -> dict[str, Any]:
    pages = length // PAGE
    q = torch.randn(batch, 1, heads, op.DIM, device="cuda", dtype=torch.bfloat16)
    latents = torch.randn(batch * pages, PAGE, op.DIM, device="cuda", dtype=torch.bfloat16)
    cache = latents.to(op.FP8) if fp8 else latents
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    few = slice(0, 4)
    wanted, _ = reference.mla_decode(q[few], cache, table[few], lengths[few], SCALE, op.LATENT)
    out, lse = q.new_full((*q.shape[:3], op.LATENT), torch.nan), torch.empty(q.shape[:3], device="cuda")

    flops = 2 * batch * heads * length * (op.DIM + op.LATENT)
    row = bench.row(
        "mla_decode",
        {"heads": heads, "batch": batch, "tokens": batch, "length": length, "cache": "fp8" if fp8 else "bf16"},
        lambda overlap: op.launch(q, cache, table, lengths, out, lse, SCALE, overlap=overlap),
        error=lambda: relative(out[few], wanted),
        eager=lambda: _eager(q, cache, table),
        compiled=lambda: compiled(_eager)(q, cache, table),
        peers=_peers(q, cache, table, lengths),
        right=lambda found: relative(found.view(out.shape)[few], wanted) < (0.1 if fp8 else 1e-2),
        moved=cache.numel() * cache.element_size() + (q.numel() + out.numel()) * 2,
        flops=flops // (2 if fp8 else 1),
        calls=10,
        turns=3,
        why=QUARTER if heads < HEADS else FP8 if fp8 else FEW if batch < MOST_FEW else MANY,
    )
    row |= {"tflop_per_s": round(flops / row["ours_us"] / 1e6)}
    if not fp8:
        return row
    whole, _ = reference.mla_decode(q[few], latents, table[few], lengths[few], SCALE, op.LATENT)
    call = functools.partial(op.launch, q, cache, table, lengths, out, lse, SCALE)
    errors = {exact: relative((call(exact=exact), out[few])[1], whole) for exact in (False, True)}
    times = {"exact_us": micros(lambda: call(exact=True), 10)}
    row |= times | {"error_of_exact": round(errors[False] / errors[True], 3)}
    return row | _shortfalls("sgl_planned" in row["peers"], q, latents, table, lengths)


def _shortfalls(beside: bool, q: Tensor, latents: Tensor, table: Tensor, lengths: Tensor) -> dict[str, float]:
    """Parts of the whole, of values of mean 1 under scores that differ little."""
    q, latents, few = q * 0.1, latents.clone(), slice(0, 4)
    latents[..., : op.LATENT].mul_(0.5).add_(1)
    cache = latents.to(op.FP8)
    wanted, _ = reference.mla_decode(q[few], cache, table[few], lengths[few], SCALE, op.LATENT)
    found = {"shortfall": op.mla_decode(q, cache, table, lengths, SCALE, op.LATENT)[0]}
    if beside:
        found["peer_shortfall"] = _sgl_planned(q, cache, table, lengths)().view(found["shortfall"].shape)
    return {name: round(float((1 - out[few] / wanted).mean()), 5) for name, out in found.items()}


def _eager(q: Tensor, cache: Tensor, table: Tensor) -> Tensor:
    rows = cache.bfloat16()[table.long()].flatten(1, 2)
    weights = (q[:, 0] @ rows.transpose(1, 2) * SCALE).softmax(-1)
    return weights @ rows[..., : op.LATENT]


def _peers(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> dict[str, Call]:
    """As an op can call them, and `planned`: what is the same for all layers of a step was made before and is not counted."""
    paged = q, cache, table, lengths
    rest = SCALE, op.LATENT
    if cache.dtype == op.FP8:
        return {"sgl_planned": _sgl_planned(*paged)} if len(q) < SGL_SEQUENCES else {}
    planned = {"flash_mla_planned": _flash_mla_planned(*paged), "flashinfer": _flashinfer(*paged)}
    return {"flash_mla": lambda: tactics.flash_mla(*paged, *rest)[0]} | planned


def _flash_mla_planned(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Call:
    """The first call makes the plan."""
    state: list[Any] = []

    def call() -> Tensor:
        import flash_mla as library

        if not state:
            state.append(library.get_mla_metadata()[0])
        return library.flash_mla_with_kvcache(q, cache.unsqueeze(2), table, lengths, op.LATENT, state[0], None, SCALE, False)[0]

    return call


def _sgl_planned(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Call:
    """Queries are in FP8 already."""
    state: list[Any] = []

    def call() -> Tensor:
        library = torch.ops.sgl_kernel
        if not state:
            schedule = library.get_mla_decoding_metadata_dense_fp8(lengths, q.shape[1] * q.shape[2], 1)
            state.extend((q.to(op.FP8), *schedule, *(torch.ones(1, device="cuda") for _ in range(2))))
        codes, *rest = state
        return library.fwd_kvcache_mla_fp8(codes, cache.unsqueeze(2), op.LATENT, lengths, table, SCALE, False, *rest)[0]

    return call


def _flashinfer(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Call:
    state: list[Any] = []
    latent = op.LATENT

    def call() -> Tensor:
        import flashinfer

        if not state:
            space = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(space, backend="fa3")
            begins = torch.arange(len(q) + 1, dtype=torch.int32, device="cuda")
            sizes = q.shape[2], latent, op.DIM - latent, PAGE, False, SCALE, torch.bfloat16, torch.bfloat16
            wrapper.plan(begins, begins * table.shape[1], table.flatten(), lengths, *sizes)
            parts = q[:, 0, :, :latent], q[:, 0, :, latent:], cache[..., :latent], cache[..., latent:]
            state.extend((wrapper, [part.contiguous() for part in parts]))
        return state[0].run(*state[1])

    return call
