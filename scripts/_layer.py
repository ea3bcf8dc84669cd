"""One decoder layer of DeepSeek-R1, decoding, whole or a rank's share of it: what bench_layer and bench_block time.

Both norms, latent attention (absorbed, over a paged cache), the router, routed experts and the shared one. Weights are random, in
R1's formats: FP8 with a scale of each 128x128 block, but for the router, the norms, the fused way into attention and the up
products, which are absorbed (BF16, as TensorRT-LLM holds them where they are multiplied so). Every rank draws the same weights
and keeps its share. `on` names the steps of `STEPS` that are taken; without any the layer is plain torch, which multiplies what
was dequantised to BF16 before. On CPUs the plugins' CPU forms run: the same results, no speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.fused_qkv_a import op as qkv
from plugins.fused_qkv_a import reference as plain
from plugins.mla_absorb import op as absorb
from plugins.mla_decode import op as mla
from plugins.moe_grouped_gemm import op as moe
from plugins.moe_grouped_gemm.reference import fp8_weight, through_fp8
from plugins.quantize import op as quantize
from plugins.router_gemm import op as gemm
from plugins.topk_router import op as router
from plugins.topk_router.reference import route

__all__ = ["FASTEST", "R1", "STEPS", "Fp8", "Layer", "Shape", "Share", "State", "deviation"]

STEPS = {
    "graph": "captured in a CUDA graph",
    "mla_decode": "attention straight from the pages, not gathered",
    "mla_absorb": "queries into the latent space beside their RoPE part, and values out of it, without transposes",
    "topk_router": "one kernel to route, not 18 operations",
    "router_gemm": "the logits' product into FP32, without casts",
    "horizontal": "one product 7168 -> 2112 for three",
    "norm_rope_cache": "both inner norms, RoPE and the cache's write in one kernel",
    "rms_norm": "the outer norms by torch's fused one",
    "q_rope": "RoPE of the queries as one complex product, in place",
    "moe_grouped_gemm": "the routed experts in FP8, as they are stored, SwiGLU and the weighted sum fused",
    "fp8_dense": "query, output and shared expert's products in FP8 (cuBLASLt), activations quantised 1x128",
    "fp8_cache": "latents cached in E4M3, attention multiplied in FP8",
    "streams": "the shared expert beside the routed ones",
}
"""Steps in the order in which the ladder takes them, and what each is."""
FASTEST = frozenset(STEPS)
BLOCK, EPS = 128, 1e-6
CODES = 64.0
"""Standard deviation of codes: E4M3 ends at 448."""
FP8_ROWS = 4
"""Rows that cuBLASLt's 1x128 scales come in."""
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; DeepSeek-R1's unless told otherwise."""

    hidden: int = 7168
    q: int = 1536
    latent: int = 512
    rope: int = 64
    heads: int = 128
    nope: int = 128
    value: int = 128
    experts: int = 256
    top_k: int = 8
    n_group: int = 8
    topk_group: int = 4
    width: int = 2048
    routed_scale: float = 2.5
    page: int = 64

    @property
    def cache_bytes(self) -> int:
        """Of a token's BF16 latent and rope."""
        return 2 * (self.latent + self.rope)


R1 = Shape()


class Share(NamedTuple):
    """What a rank holds: all heads or its share, and experts by number or each expert's share of the width."""

    rank: int = 0
    ranks: int = 1
    attention: Literal["dp", "tp"] = "dp"
    experts: Literal["number", "width"] = "number"

    def of(self, size: int) -> slice:
        """Its part of `size` things."""
        return slice(self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks)


class Fp8(NamedTuple):
    """codes E4M3 [..., N, K], scale F32 [..., N/128, K/128]"""

    codes: Tensor
    scale: Tensor

    def rows(self, part: slice) -> Fp8:
        """Some of N."""
        return Fp8(self.codes[..., part, :].contiguous(), self.scale[..., _blocks(part), :].contiguous())

    def columns(self, part: slice) -> Fp8:
        """Some of K."""
        return Fp8(self.codes[..., part].contiguous(), self.scale[..., _blocks(part)].contiguous())

    def halves(self, part: slice) -> Fp8:
        """Some of the gate's rows and the same of the up product's behind them."""
        both = Fp8(*(tensor.unflatten(-2, (2, -1)) for tensor in self)).rows(part)
        return Fp8(*(tensor.flatten(-3, -2) for tensor in both))

    def plain(self) -> Tensor:
        """BF16 [..., N, K]"""
        if self.codes.dim() > 2:
            return torch.stack([Fp8(*one).plain() for one in zip(*self, strict=True)])
        return fp8_weight(*self).bfloat16()


@dataclass
class State:
    """Sequences of which the last token is being decoded, in a paged cache."""

    cache: Tensor
    """BF16 [pages, page, latent + rope]"""
    table: Tensor
    """I32 [B, pages of a sequence]"""
    lengths: Tensor
    """I32 [B]"""
    cos_sin: Tensor

    def __post_init__(self) -> None:
        page, self.codes = self.cache.shape[1], self.cache.to(E4M3)
        self.positions = self.lengths - 1
        last = self.positions.long()
        self.turns = torch.complex(*self.cos_sin.chunk(2, dim=1))
        self.slots = self.table.gather(1, (last // page).unsqueeze(1)).squeeze(1).long() * page + last % page

    @classmethod
    def random(cls, shape: Shape, lengths: Sequence[int], device: torch.device) -> State:
        """The same on every rank."""
        pages, count = -(-max(lengths) // shape.page), len(lengths)
        drawn = torch.Generator(device).manual_seed(count)
        table = torch.randperm(count * pages, generator=drawn, device=device).view(count, pages).int()
        cache = _normal(drawn, count * pages, shape.page, shape.latent + shape.rope)
        turns = 1e4 ** -torch.linspace(0, 1, shape.rope // 2, device=device)
        angles = torch.arange(max(lengths), device=device).unsqueeze(1) * turns
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        return cls(cache, table, torch.tensor(lengths, device=device, dtype=torch.int32), cos_sin)

    def seen(self, on: frozenset[str]) -> Tensor:
        """The cache, or its codes."""
        return self.codes if "fp8_cache" in on else self.cache

    def part(self, sequences: slice) -> State:
        """Some of the sequences, with pages of their own."""
        table = self.table[sequences]
        own = torch.arange(table.numel(), device=table.device, dtype=torch.int32).view_as(table)
        return State(self.cache[table.flatten().long()], own, self.lengths[sequences], self.cos_sin)


class Layer:
    """A share of the weights, and the layer with the steps of `on`. Shares of tensor parallelism give partial sums."""

    def __init__(self, shape: Shape, device: torch.device, share: Share | None = None) -> None:
        s, self.share = shape, share or Share()
        self.shape, self.device, self.first_expert = shape, device, 0
        narrow = self.share.attention == "tp"
        heads, width = (self.share.of(size) if narrow else slice(0, size) for size in (s.heads, s.width))
        self.heads = heads.stop - heads.start
        self.input_norm, self.post_norm, self.q_norm, self.kv_norm = (
            torch.ones(size, device=device, dtype=torch.bfloat16) for size in (s.hidden, s.hidden, s.q, s.latent)
        )
        drawn = torch.Generator(device).manual_seed(1)
        self.qkv_a = _scaled(drawn, s.q + s.latent + s.rope, s.hidden)
        self.w_uk, self.w_uv = (_scaled(drawn, s.heads, size, s.latent)[heads].contiguous() for size in (s.nope, s.value))
        self.router, self.bias = _scaled(drawn, s.experts, s.hidden), _normal(drawn, s.experts).float() / 10
        q_b, o = _fp8(device, 2, s.heads * (s.nope + s.rope), s.q), _fp8(device, 3, s.hidden, s.heads * s.value)
        gate_up, down = _fp8(device, 4, 2 * s.width, s.hidden), _fp8(device, 5, s.hidden, s.width)
        self.fp8 = {
            "q_b": q_b.rows(_times(heads, s.nope + s.rope)), "o": o.columns(_times(heads, s.value)),
            "shared_gate_up": gate_up.halves(width), "shared_down": down.columns(width), **self._experts(),
        }  # fmt: skip
        self.chosen = torch.empty(0)
        """Experts I32 [B, K] of the last call."""
        self.bf16: dict[str, Tensor] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _experts(self) -> dict[str, Fp8]:
        """Its routed experts, or its share of each."""
        s, by_number = self.shape, self.share.experts == "number"
        numbers = range(s.experts)[self.share.of(s.experts)] if by_number else range(s.experts)
        width = slice(0, s.width) if by_number else self.share.of(s.width)
        self.first_expert = numbers.start
        gate_up = [_fp8(self.device, 1000 + 2 * one, 2 * s.width, s.hidden).halves(width) for one in numbers]
        down = [_fp8(self.device, 1001 + 2 * one, s.hidden, s.width).columns(width) for one in numbers]
        return {"gate_up": _stacked(gate_up), "down": _stacked(down)}

    def __call__(self, x: Tensor, state: State, on: frozenset[str]) -> Tensor:
        """x BF16 [B, H] -> [B, H]"""
        x = x + self.attention(self.norm(x, self.input_norm, on), state, on)
        return x + self.experts(self.norm(x, self.post_norm, on), on)

    def weight_bytes(self) -> int:
        """Of its share as it is stored."""
        rest = self.qkv_a, self.w_uk, self.w_uv, self.router
        return sum(tensor.nbytes for tensor in (*rest, *(part for weight in self.fp8.values() for part in weight)))

    def norm(self, x: Tensor, weight: Tensor, on: frozenset[str]) -> Tensor:
        """RMSNorm over the hidden size."""
        return F.rms_norm(x, weight.shape, weight, EPS) if "rms_norm" in on else plain.norm(x, weight, EPS)

    def attention(self, x: Tensor, state: State, on: frozenset[str]) -> Tensor:
        """[B, H] -> [B, H]; the token's latent is written first."""
        s = self.shape
        scale = (s.nope + s.rope) ** -0.5
        q = self.linear(self.into_cache(x, state, on), "q_b", on).unflatten(-1, (self.heads, s.nope + s.rope))
        rope = q[..., s.nope :]
        if "q_rope" in on:
            turned = torch.view_as_complex(rope.float().unflatten(-1, (-1, 2))) * state.turns[state.positions].unsqueeze(1)
            rope.unflatten(-1, (2, -1)).copy_(torch.view_as_real(turned).transpose(-1, -2))
        else:
            rope.copy_(plain.rotate(rope, state.cos_sin[state.positions.long()].unsqueeze(1)))
        if "mla_absorb" in on:
            query = absorb.absorb_query(q, self.w_uk)
        else:
            query = torch.cat((torch.einsum("ban,anl->bal", q[..., : s.nope], self.w_uk), rope), dim=-1)
        if "mla_decode" in on:
            out = mla.mla_decode(query.unsqueeze(1), state.seen(on), state.table, state.lengths, scale, s.latent)[0].squeeze(1)
        else:
            rows = state.seen(on)[state.table.long()].flatten(1, 2).to(x.dtype)
            beyond = torch.arange(rows.shape[1], device=x.device) >= state.lengths.unsqueeze(1)
            scores = (query @ rows.transpose(1, 2)).float().mul_(scale).masked_fill_(beyond.unsqueeze(1), -torch.inf)
            out = scores.softmax(-1).to(x.dtype) @ rows[..., : s.latent]
        absorbed = absorb.absorb_output if "mla_absorb" in on else lambda *pair: torch.einsum("bal,avl->bav", *pair)
        return self.linear(absorbed(out, self.w_uv).flatten(1), "o", on)

    def into_cache(self, x: Tensor, state: State, on: frozenset[str]) -> Tensor:
        """[B, H] -> q_a [B, Q], and the latents into the cache."""
        s, cache = self.shape, state.seen(on).flatten(0, 1)
        parts = s.q, s.latent, s.rope
        three = (F.linear(x, part) for part in self.qkv_a.split(parts))
        together = qkv.qkv_a(x, self.qkv_a) if "horizontal" in on else torch.cat(tuple(three), dim=-1)
        rest = self.q_norm, self.kv_norm, state.cos_sin, state.positions, state.slots, cache
        if "norm_rope_cache" in on:
            return qkv.norm_rope_cache(together, *rest, 1.0, EPS)
        q, latent, k_rope = together.split(parts, dim=-1)
        turned = plain.rotate(k_rope, state.cos_sin[state.positions.long()])
        cache[state.slots] = torch.cat((plain.norm(latent, self.kv_norm, EPS), turned), dim=-1).to(cache.dtype)
        return plain.norm(q, self.q_norm, EPS)

    def experts(self, x: Tensor, on: frozenset[str]) -> Tensor:
        """[B, H] -> [B, H]; a step that is to be captured has one stream until it is (`timing.one_stream`)."""
        if "streams" not in on or self.stream is None or ("graph" in on and not torch.cuda.is_current_stream_capturing()):
            return self.routed(x, on) + self.shared(x, on)
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            shared = self.shared(x, on)
        routed = self.routed(x, on)
        here.wait_stream(self.stream)
        return routed + shared

    def shared(self, x: Tensor, on: frozenset[str]) -> Tensor:
        """The expert that every token visits."""
        return self.linear(swiglu(self.linear(x, "shared_gate_up", on)), "shared_down", on)

    def routed(self, x: Tensor, on: frozenset[str]) -> Tensor:
        """The chosen experts' weighted sum."""
        return self.grouped(x, *self.route(x, on), on)

    def route(self, x: Tensor, on: frozenset[str]) -> tuple[Tensor, Tensor]:
        """-> weights F32 [B, K], indices I32 [B, K]"""
        s = self.shape
        logits = gemm.router_gemm(x, self.router) if "router_gemm" in on else x.float() @ self.router.float().t()
        choose = router.topk_router if "topk_router" in on else route
        weights, indices = choose(logits, self.bias, s.n_group, s.topk_group, s.top_k, s.routed_scale)
        self.chosen = indices.int()
        return weights, self.chosen

    def grouped(self, x: Tensor, weights: Tensor, indices: Tensor, on: frozenset[str]) -> Tensor:
        """What this share's experts give. Plain: grouped products over the pairs sorted by expert; others' pairs come last."""
        if "moe_grouped_gemm" in on:
            return moe.moe_fp8_block(x, indices, weights, *self.fp8["gate_up"], *self.fp8["down"], self.first_expert)
        gate_up, down = self.plain("gate_up"), self.plain("down")
        local = indices.flatten().long() - self.first_expert
        local = torch.where((local >= 0) & (local < len(down)), local, len(down))
        expert, order = local.sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(len(down), device=x.device), right=True).int()
        hidden = swiglu(F.grouped_mm(x[order // self.shape.top_k], gate_up.transpose(1, 2), offs=ends))
        out = F.grouped_mm(hidden, down.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
        weighted = out.masked_fill_((expert == len(down)).unsqueeze(1), 0.0)
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, order // self.shape.top_k, weighted).to(x.dtype)

    def linear(self, x: Tensor, name: str, on: frozenset[str]) -> Tensor:
        """A dense product, BF16 [B, K] -> [B, N]"""
        return fp8_linear(x, self.fp8[name]) if "fp8_dense" in on else F.linear(x, self.plain(name))

    def plain(self, name: str) -> Tensor:
        """A weight in BF16, dequantised once."""
        if name not in self.bf16:
            self.bf16[name] = self.fp8[name].plain()
        return self.bf16[name]


def deviation(added: Tensor, chosen: Tensor, wanted: Tensor, wanted_chosen: Tensor) -> dict[str, float]:
    """`error`: relative L2 of what the layer adds, [B, H], over tokens whose experts [B, K] are the wanted ones; `rerouted`: share
    of the others, whose choice was so close that rounding before the router turned it."""
    same = (chosen.sort(1).values == wanted_chosen.sort(1).values).all(1)
    right = wanted[same].double()
    error = float((added[same].double() - right).norm() / right.norm().clamp(min=1e-30))
    return {"error": error, "rerouted": round(1 - float(same.double().mean()), 4)}


def fp8_linear(x: Tensor, weight: Fp8) -> Tensor:
    """x BF16 [B, K] -> [B, N] by cuBLASLt, activations quantised to FP8 in groups of 128 (sm_90); CPUs do as the reference."""
    if not x.is_cuda:
        return (through_fp8(x).float() @ weight.plain().float().t()).bfloat16()
    rows, columns = -(-len(x) // FP8_ROWS) * FP8_ROWS, x.shape[1]
    codes = x.new_empty((rows, columns), dtype=E4M3)
    scale = x.new_empty((columns // BLOCK, rows), dtype=torch.float32).t()
    quantize.launch_fp8(x, codes[: len(x)], scale[: len(x)])
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    out = F.scaled_mm(codes, weight.codes.t(), scale, kinds[0], weight.scale.t(), kinds[1], output_dtype=torch.bfloat16)
    return out[: len(x)]


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _normal(drawn: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=drawn, device=drawn.device, dtype=torch.bfloat16)


def _scaled(drawn: torch.Generator, *shape: int) -> Tensor:
    """Random BF16, so that products keep their inputs' size."""
    return _normal(drawn, *shape).mul_(shape[-1] ** -0.5)


def _fp8(device: torch.device, seed: int, rows: int, columns: int) -> Fp8:
    """The same, with scales that differ by up to 3 times from block to block."""
    drawn = torch.Generator(device).manual_seed(seed)
    codes = _normal(drawn, rows, columns).mul_(CODES).clamp_(-448, 448).to(E4M3)
    scale = torch.rand(rows // BLOCK, columns // BLOCK, generator=drawn, device=device) + 0.5
    return Fp8(codes, scale * (columns**-0.5 / CODES))


def _stacked(weights: Sequence[Fp8]) -> Fp8:
    return Fp8(*(torch.stack(parts) for parts in zip(*weights, strict=True)))


def _blocks(part: slice) -> slice:
    """Of elements -> of their scales."""
    if part.start % BLOCK or part.stop % BLOCK:
        raise ValueError(f"Elements {part.start} to {part.stop} are not whole blocks of {BLOCK}: choose other sizes or ranks.")
    return slice(part.start // BLOCK, part.stop // BLOCK)


def _times(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)
