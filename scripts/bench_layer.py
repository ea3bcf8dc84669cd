#!/usr/bin/env python3
"""One decoder layer of DeepSeek-R1 at its real size, decoding, with one optimisation more on each line: what each is worth here.

    python scripts/bench_layer.py [--quick] [--json FILE]

A layer is both norms, latent attention (128 heads, absorbed, paged cache) and 256 routed experts, 8 a token, and the shared one;
weights are random BF16 (24 GB), all on one GPU. Each line is the layer in a CUDA graph but for the first, which is eager:

    eager             plain torch: three products for q_a, latent and rope; gathered cache; 18 operations to route
    graph             the same, captured
    mla_decode        attention straight from the pages
    topk_router       one kernel to route
    router_gemm       BF16 logits' product into FP32, without casts
    horizontal        one product 7168 -> 2112 for three
    norm_rope_cache   both norms, RoPE and the cache's write in one kernel
    streams           the shared expert beside the routed ones

`us` is the median of graph replays (eager: of wall clock), `gain` the line before over this one; `error` is relative to eager.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.bench import relative  # noqa: E402
from plugins.fused_qkv_a import op as qkv  # noqa: E402
from plugins.fused_qkv_a import reference as plain  # noqa: E402
from plugins.mla_decode import op as mla  # noqa: E402
from plugins.router_gemm import op as gemm  # noqa: E402
from plugins.timing import clocked, graph_seconds, machine  # noqa: E402
from plugins.topk_router import op as router  # noqa: E402
from plugins.topk_router.reference import route  # noqa: E402

STEPS = ("eager", "graph", "mla_decode", "topk_router", "router_gemm", "horizontal", "norm_rope_cache", "streams")
HIDDEN, Q, LATENT, ROPE, HEADS, NOPE, VALUE = 7168, 1536, 512, 64, 128, 128, 128
EXPERTS, TOP_K, WIDTH, ROUTING, EPS, PAGE = 256, 8, 2048, (8, 4, 8, 2.5), 1e-6, 64
SCALE = (NOPE + ROPE) ** -0.5
BATCHES, LENGTH = (1, 8, 32, 128), 4096


def main() -> int:
    """Every batch, every line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batches 1 and 32")
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this benchmark needs one.")
    layer, rows = Layer(), []
    for batch in (1, 32) if options.quick else BATCHES:
        for row in measured(layer, batch):
            rows.append(row)
            print("{batch:4d} {step:16s} {us:9.1f} us  gain {gain:5.2f}  error {error:.1e}".format(**row), flush=True)
            if options.json:
                result = {"rows": rows, "context": LENGTH, "weights": "random BF16", **machine()}
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def measured(layer: Layer, batch: int) -> Iterator[dict[str, Any]]:
    """A row a step; each has all steps before it."""
    state = State(batch)
    x = torch.randn(batch, HIDDEN, device="cuda", dtype=torch.bfloat16)
    wanted = layer(x, state, frozenset())
    before = None
    for count, step in enumerate(STEPS):
        on = frozenset(STEPS[: count + 1])
        error = relative(layer(x, state, on), wanted)
        call = lambda on=on: layer(x, state, on)  # noqa: E731
        seconds = clocked(call) if step == "eager" else graph_seconds([call] * 2, replays=10)
        us = round(seconds * 1e6, 2)
        yield {"batch": batch, "step": step, "us": us, "gain": round((before or us) / us, 3), "error": error}
        before = us


class State:
    """Sequences of LENGTH tokens, of which the last is being decoded, in a paged cache."""

    def __init__(self, batch: int) -> None:
        pages = LENGTH // PAGE
        self.table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
        self.lengths = torch.full((batch,), LENGTH, device="cuda", dtype=torch.int32)
        self.cache = torch.randn(batch * pages, PAGE, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        self.positions = self.lengths - 1
        self.slots = self.table[:, -1].long() * PAGE + PAGE - 1
        angles = torch.arange(LENGTH, device="cuda").unsqueeze(1) * 1e4 ** -torch.linspace(0, 1, ROPE // 2, device="cuda")
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)


class Layer:
    """The weights, and the layer with the steps of `on`."""

    def __init__(self) -> None:
        self.input_norm, self.post_norm, self.q_norm, self.kv_norm = (ones(size) for size in (HIDDEN, HIDDEN, Q, LATENT))
        self.qkv_a, self.q_b = weight(Q + LATENT + ROPE, HIDDEN), weight(HEADS * (NOPE + ROPE), Q)
        self.w_uk, self.w_uv = weight(HEADS, NOPE, LATENT), weight(HEADS, VALUE, LATENT)
        self.o = weight(HIDDEN, HEADS * VALUE)
        self.router, self.bias = weight(EXPERTS, HIDDEN), torch.randn(EXPERTS, device="cuda") / 10
        self.gate_up, self.down = weight(EXPERTS, 2 * WIDTH, HIDDEN), weight(EXPERTS, HIDDEN, WIDTH)
        self.shared_gate_up, self.shared_down = weight(2 * WIDTH, HIDDEN), weight(HIDDEN, WIDTH)
        self.stream = torch.cuda.Stream()

    def __call__(self, x: Tensor, state: State, on: frozenset[str]) -> Tensor:
        """x BF16 [B, H] -> [B, H]"""
        x = x + self.attention(plain.norm(x, self.input_norm, EPS), state, on)
        return x + self.experts(plain.norm(x, self.post_norm, EPS), on)

    def attention(self, x: Tensor, state: State, on: frozenset[str]) -> Tensor:
        """[B, H] -> [B, H]; the token's latent is written first."""
        q = F.linear(self.into_cache(x, state, on), self.q_b).unflatten(-1, (HEADS, NOPE + ROPE))
        q_rope = plain.rotate(q[..., NOPE:], state.cos_sin[state.positions.long()].unsqueeze(1))
        query = torch.cat((torch.einsum("ban,anl->bal", q[..., :NOPE], self.w_uk), q_rope), dim=-1)
        if "mla_decode" in on:
            out = mla.mla_decode(query.unsqueeze(1), state.cache, state.table, state.lengths, SCALE, LATENT)[0].squeeze(1)
        else:
            rows = state.cache[state.table.long()].flatten(1, 2)
            weights = ((query @ rows.transpose(1, 2)).float() * SCALE).softmax(-1).to(x.dtype)
            out = weights @ rows[..., :LATENT]
        return F.linear(torch.einsum("bal,avl->bav", out, self.w_uv).flatten(1), self.o)

    def into_cache(self, x: Tensor, state: State, on: frozenset[str]) -> Tensor:
        """[B, H] -> q_a [B, Q], and the latents into the cache."""
        three = (F.linear(x, part) for part in self.qkv_a.split((Q, LATENT, ROPE)))
        together = qkv.qkv_a(x, self.qkv_a) if "horizontal" in on else torch.cat(tuple(three), dim=-1)
        cache = state.cache.flatten(0, 1)
        rest = self.q_norm, self.kv_norm, state.cos_sin, state.positions, state.slots, cache
        if "norm_rope_cache" in on:
            return qkv.norm_rope_cache(together, *rest, 1.0, EPS)
        q, latent, k_rope = together.split((Q, LATENT, ROPE), dim=-1)
        turned = plain.rotate(k_rope, state.cos_sin[state.positions.long()])
        cache.index_copy_(0, state.slots, torch.cat((plain.norm(latent, self.kv_norm, EPS), turned), dim=-1))
        return plain.norm(q, self.q_norm, EPS)

    def experts(self, x: Tensor, on: frozenset[str]) -> Tensor:
        """[B, H] -> [B, H]"""
        if "streams" not in on:
            return self.routed(x, on) + self.shared(x)
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            shared = self.shared(x)
        routed = self.routed(x, on)
        here.wait_stream(self.stream)
        return routed + shared

    def shared(self, x: Tensor) -> Tensor:
        """The expert that every token visits."""
        return F.linear(swiglu(F.linear(x, self.shared_gate_up)), self.shared_down)

    def routed(self, x: Tensor, on: frozenset[str]) -> Tensor:
        """The chosen experts' weighted sum, as grouped products over the pairs sorted by expert."""
        logits = gemm.router_gemm(x, self.router) if "router_gemm" in on else x.float() @ self.router.float().t()
        choose = router.topk_router if "topk_router" in on else route
        weights, indices = choose(logits, self.bias, *ROUTING)
        expert, order = indices.flatten().long().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(EXPERTS, device=x.device), right=True).int()
        hidden = swiglu(F.grouped_mm(x[order // TOP_K], self.gate_up.transpose(1, 2), offs=ends))
        out = F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        weighted = out * weights.flatten()[order, None]
        return torch.zeros_like(weighted[: len(x)]).index_add_(0, order // TOP_K, weighted).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def weight(*shape: int) -> Tensor:
    """Random, so that products keep their inputs' size."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)


def ones(size: int) -> Tensor:
    """A norm's gains."""
    return torch.ones(size, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
