"""Attention of R1's 128 heads, and of 16 of them, over prompts and chunks, beside FlashAttention-3, cuDNN and flashinfer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, compiled, relative
from plugins.mla_prefill import op, reference, tactics

__all__ = ["rows", "work"]

HEADS, SCALE = 128, 192**-0.5
SHAPES = (
    *((1, tokens, tokens) for tokens in (1, 8, 64, 128, 256, 512, 1024, 2048, 4096)),
    *((1, tokens, 4096) for tokens in (64, 256, 512, 1024)),
    (1, 256, 1024),
    (1, 2048, 16384),
    (8, 512, 512),
    (16, 128, 128),
)
"""Sequences, and the queries and keys of each."""
FEW_HEADS = 16
"""A rank's of eight."""
FEW_HEADS_SHAPES = (1, 512, 512), (1, 4096, 4096), (1, 512, 4096)
MOST_JOINED = 4096
"""Keys on kv_b's product."""
COMPARED = 2
"""Heads that are compared with the reference."""
MUCH = 10**11
"""Floating point operations from which on fewer calls are enough."""
CHUNKS = "made for kv_b's product, of which heads share the rope (mla_prefill_kv); flashinfer's plan, made before, is not counted"
SHORT = "made for many queries: it takes 9 us however few there are; flashinfer's plan, made before, is not counted"
FEW = "no sequence is split: few heads of few queries are few CTAs, many queries' pieces uneven; flashinfer's plan is not counted"
LONG = "flashinfer's plan, made on the host before, is not counted; runs differ by more than this"


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Sequences of one length: on keys and values (`mla_prefill`), and on kv_b's product as it is (`mla_prefill_kv`)."""
    for heads, shapes in ((HEADS, SHAPES), (FEW_HEADS, FEW_HEADS_SHAPES)):
        for shape in shapes:
            case = Case(heads, *shape)
            yield case.on_keys_and_values(bench)
            if shape[2] <= MOST_JOINED:
                yield case.on_the_product(bench)


def work(tokens: int, context: int, heads: int = HEADS) -> int:
    """Floating point operations of one sequence's attention."""
    seen = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    return 2 * heads * seen * (op.NOPE + op.ROPE + op.VALUES)


class Case:
    """`batch` sequences' random queries, and keys and values in both forms."""

    def __init__(self, heads: int, batch: int, tokens: int, context: int) -> None:
        self.shape = {"heads": heads, "batch": batch, "tokens": tokens, "context": context}
        self.q = torch.randn(batch * tokens, heads, op.NOPE + op.ROPE, device="cuda", dtype=torch.bfloat16)
        self.kv = torch.randn(batch * context, heads, op.NOPE + op.VALUES, device="cuda", dtype=torch.bfloat16)
        self.k_rope = torch.randn(batch * context, op.ROPE, device="cuda", dtype=torch.bfloat16)
        ends = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        self.rest = ends * tokens, ends * context, SCALE
        self.out = self.q.new_full((len(self.q), heads, op.VALUES), torch.nan)
        self.lse = self.q.new_empty((heads, len(self.q)), dtype=torch.float32)
        self.first = slice(0, tokens), slice(0, COMPARED)
        k, v = (x[:context, self.first[1]] for x in self.joined())
        self.wanted, _ = reference.mla_prefill(self.q[self.first], k, v, *(x[:2] for x in self.rest[:2]), SCALE)

    def joined(self) -> tuple[Tensor, Tensor]:
        """k and v, of which v is a view."""
        return reference.joined(self.q, self.kv, self.k_rope)

    def on_keys_and_values(self, bench: Bench) -> dict[str, Any]:
        """Their row."""
        _, batch, tokens, context = self.shape.values()
        k, v = (x.contiguous() for x in self.joined())
        inputs = self.q, k, v, batch
        peers = _peers((self.q, k, v, *self.rest), batch == 1 and tokens == context)
        keys = k[..., : op.NOPE], k[..., op.NOPE :], v
        fused = (lambda: compiled(_eager)(*inputs)) if tokens == context > 1 else None
        return self._row(bench, "mla_prefill", keys, lambda: _eager(*inputs), peers, (k, v), fused)

    def on_the_product(self, bench: Bench) -> dict[str, Any]:
        """Its row; what others need for it is within their time."""
        parts = self.kv[..., : op.NOPE], self.k_rope.unsqueeze(1), self.kv[..., op.NOPE :]
        peers = {"fa3": lambda: tactics.fa3(self.q, *self.joined(), *self.rest)[0]}

        def eager() -> Tensor:
            return _eager(self.q, *self.joined(), self.shape["batch"])

        return self._row(bench, "mla_prefill_kv", parts, eager, peers, (self.kv, self.k_rope))

    def _row(
        self,
        bench: Bench,
        plugin: str,
        keys: tuple[Tensor, ...],
        eager: Call,
        peers: dict[str, Call],
        read: tuple[Tensor, ...],
        fused: Call | None = None,
    ) -> dict[str, Any]:
        flops = self.shape["batch"] * work(self.shape["tokens"], self.shape["context"], self.shape["heads"])
        row = bench.row(
            plugin,
            self.shape,
            lambda overlap: op.launch(self.q, *keys, *self.rest[:2], self.out, self.lse, SCALE, overlap),
            error=lambda: relative(self.out[self.first], self.wanted),
            eager=eager,
            compiled=fused,
            peers=peers,
            right=lambda found: relative(found[self.first], self.wanted) < 1e-2,
            moved=2 * sum(x.numel() for x in (self.q, self.out, *read)),
            flops=flops,
            calls=2 if flops > MUCH else 10,
            turns=3,
            why=_why(**self.shape),
        )
        return row | {"tflop_per_s": round(flops / row["ours_us"] / 1e6)}


def _why(heads: int, batch: int, tokens: int, context: int) -> str:
    """Ours loses, where it does."""
    if heads < HEADS:
        return FEW
    if tokens < context:
        return CHUNKS
    return SHORT if tokens <= op.ROWS else LONG


def _eager(q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
    """Two products and a softmax, in BF16."""
    queries, keys, values = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    tokens, context = queries.shape[2], keys.shape[2]
    unseen = torch.ones(tokens, context, dtype=torch.bool, device=q.device).triu(context - tokens + 1)
    return (queries @ keys.transpose(2, 3) * SCALE).masked_fill(unseen, -torch.inf).softmax(-1) @ values


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
            wrapper.plan(cu_q, cu_k, q.shape[1], q.shape[1], q.shape[2], head_dim_vo=v.shape[2], **kinds)
            state.append(wrapper)
        return state[0].run(q, k, v)

    return call
