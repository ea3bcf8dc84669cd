"""The decoder that gets compiled: DeepSeek-V3 over a paged latent KV cache, in two forms of one set of weights.

  absorbed   For decode and short chunks. The query is carried into the latent space (q_nope @ W_UK, a head
             at a time), so that attention is MQA over the cached latents themselves, read through the page
             table; the result is carried out again by W_UV. Nothing is decompressed. W_UK and W_UV stay
             separate factors: multiplied into q_b and o_proj they would be larger than both.
  expanded   For long chunks of one sequence. Keys and values of every position so far are decompressed
             through kv_b once and shared by all queries of the chunk: per query and key that is
             nope + rope + v products a head instead of 2 * kv_lora + rope (for R1 320 instead of 1088).
             The positions of earlier chunks come from the cache, so chunked prefill equals one shot.

One step takes `tokens`, `positions`, `pages` and one cache a layer, which it writes in place before it attends.
Position -1 is padding (at the left end of a row). It is written to page 0, which belongs to no sequence, and
attends like position 0 only so that its softmax is not 0/0. Masked keys weigh exactly 0.

Fused by hand, because Inductor does not fuse products: q_a with kv_a_proj_with_mqa, gate with up, all experts of
a layer. The routed experts run as two grouped products over the (token, expert) pairs sorted by expert, in both
forms: weights that no token needs are not read, and nothing larger than [N*K, 2I] is made. Milliseconds of one
MoE layer, hidden 256, expert width 128, float32, one core of a Xeon 4 (torch 2.13 eager), N tokens:

             16 experts, top 4                        256 experts, top 8
    N        1      8      64     512                 1      8      64     512
    grouped  0.20   0.53   1.15   4.4                 0.86   1.8    7.8    26
    gather   0.41   2.0    53     (537 MB)            0.71   3.6    138    (1 GB)
    dense    0.44   0.70   2.0    18                  6.6    13     63     405

(gather: each token's own copy of its experts' weights; dense: every expert on every token.) On a GPU with
sm_90 or newer, `grouped_mm` in bfloat16 is one CUTLASS kernel.

What plugins can compute instead goes through one table, `Ops`; what is below is that of an engine without any.

Shape legend: B rows, T tokens a row, N = B*T, P pages a row, S = P * page_size, A heads, L kv_lora, R rope,
D = L + R, H hidden, E experts, K experts a token, I expert width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.models.arch import Arch
from plugins.topk_router.reference import route

__all__ = ["FORMS", "PLAIN", "Attention", "Decoder", "Form", "Linear", "Moe", "Ops", "Router", "Weight", "Where", "seen"]

Form = Literal["absorbed", "expanded"]
FORMS: tuple[Form, ...] = ("absorbed", "expanded")
FP8, MOST_FP8 = torch.float8_e4m3fn, 448.0


@dataclass(frozen=True, slots=True)
class Where:
    """What every layer of one step shares: where to write, what to read, what each token may see."""

    slots: Tensor
    """[N], place of each token in a cache flattened to [num_pages * page_size, D]."""
    pages: Tensor
    """[B, P]"""
    visible: Tensor
    """[B, T, S], whether key s may be seen by token t."""
    cos: Tensor
    sin: Tensor
    """[B, T, R/2]"""


class Weight(nn.Module):
    """One weight, without memory until it is assigned."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(Weight):
    """[out, in], without bias."""

    def __init__(self, *shape: int, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__(*shape, dtype=dtype)
        self.product = ops.linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self.product(x, self.weight)


class Norm(Weight):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of interleaved pairs; first elements of all pairs come out before the second ones, as in the reference."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def store(latents: Tensor, cache: Tensor, slots: Tensor) -> None:
    """[N, D] -> places [N] of a cache flattened to [num_pages * page_size, D], whose type may be E4M3"""
    if cache.dtype == FP8:
        latents = latents.clamp(-MOST_FP8, MOST_FP8)
    cache.view(-1, cache.shape[-1])[slots] = latents.to(cache.dtype)


def seen(cache: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_pages, page_size, D], [...] -> [..., page_size, D] in the type of the activations"""
    return cache[pages].to(dtype)


class Attention(nn.Module):
    """Multi-head latent attention in one of the two forms."""

    def __init__(self, arch: Arch, form: Form, dtype: torch.dtype, ops: Ops | None = None) -> None:
        super().__init__()
        self.arch, self.ops = arch, ops or PLAIN
        self.attend = self.ops.absorbed if form == "absorbed" else self.ops.expanded
        heads = arch.num_attention_heads
        self.qkv_a = Linear(arch.q_lora_rank + arch.latent_dim, arch.hidden_size, dtype=dtype, ops=self.ops)
        self.q_norm = Norm(arch.q_lora_rank, arch.rms_norm_eps, dtype)
        self.kv_norm = Norm(arch.kv_lora_rank, arch.rms_norm_eps, dtype)
        self.q_b = Linear(heads * arch.qk_head_dim, arch.q_lora_rank, dtype=dtype, ops=self.ops)
        self.kv_b = Weight(heads, arch.qk_nope_head_dim + arch.v_head_dim, arch.kv_lora_rank, dtype=dtype)
        self.o = Linear(arch.hidden_size, heads * arch.v_head_dim, dtype=dtype, ops=self.ops)

    def forward(self, x: Tensor, cache: Tensor, at: Where) -> Tensor:
        """[B, T, H], cache [num_pages, page_size, D] -> [B, T, H]"""
        arch = self.arch
        q = self.ops.into_cache(self, x, cache, at)
        q = self.q_b(q).unflatten(-1, (arch.num_attention_heads, arch.qk_head_dim))
        q_nope, q_rope = q.split((arch.qk_nope_head_dim, arch.qk_rope_head_dim), -1)
        q_rope = rotate(q_rope, at.cos.unsqueeze(2), at.sin.unsqueeze(2))
        return self.o(self.attend(self, q_nope, q_rope, cache, at).flatten(2))

    def into_cache(self, x: Tensor, cache: Tensor, at: Where) -> Tensor:
        """[B, T, H] -> normed q_a [B, T, Q]; the tokens' latents are written into the cache."""
        arch = self.arch
        q, latent, k_rope = self.qkv_a(x).split((arch.q_lora_rank, arch.kv_lora_rank, arch.qk_rope_head_dim), -1)
        latent = torch.cat((self.kv_norm(latent), rotate(k_rope, at.cos, at.sin)), dim=-1)
        store(latent.flatten(0, 1), cache, at.slots)
        return self.q_norm(q)

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Scores -> weights over the keys of the last axis, computed in float32."""
        wide = scores.float() * self.arch.softmax_scale
        return wide.masked_fill(~visible, float("-inf")).softmax(dim=-1).to(scores.dtype)

    def absorbed(self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, at: Where) -> Tensor:
        """[B, T, A, nope], [B, T, A, R] -> [B, T, A, v]"""
        heads, latents = self.arch.num_attention_heads, seen(cache, at.pages, q_nope.dtype).flatten(1, 2)
        w_uk, w_uv = self.kv_b.weight.split((self.arch.qk_nope_head_dim, self.arch.v_head_dim), 1)
        query = torch.cat((torch.einsum("btan,anl->btal", q_nope, w_uk), q_rope), dim=-1).flatten(1, 2)
        scores = torch.bmm(query, latents.transpose(1, 2)).unflatten(1, (-1, heads))
        weights = self.weigh(scores, at.visible.unsqueeze(2)).flatten(1, 2)
        out = torch.bmm(weights, latents[..., : self.arch.kv_lora_rank]).unflatten(1, (-1, heads))
        return torch.einsum("btal,avl->btav", out, w_uv)

    def expanded(self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, at: Where) -> Tensor:
        """The same for B = 1."""
        arch, latents = self.arch, seen(cache, at.pages, q_nope.dtype).flatten(1, 2)
        latent, k_rope = latents[0].split((arch.kv_lora_rank, arch.qk_rope_head_dim), -1)
        keys_values = torch.bmm(latent.expand(arch.num_attention_heads, -1, -1), self.kv_b.weight.transpose(1, 2))
        k_nope, value = keys_values.split((arch.qk_nope_head_dim, arch.v_head_dim), -1)
        query = torch.cat((q_nope[0], q_rope[0]), dim=-1).transpose(0, 1)
        key = torch.cat((k_nope, k_rope.unsqueeze(0).expand(arch.num_attention_heads, -1, -1)), dim=-1)
        weights = self.weigh(torch.bmm(query, key.transpose(1, 2)), at.visible)
        return torch.bmm(weights, value).transpose(0, 1).unsqueeze(0)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.gate_up = Linear(2 * width, hidden, dtype=dtype, ops=ops)
        self.down = Linear(hidden, width, dtype=dtype, ops=ops)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]"""
        return self.down(swiglu(self.gate_up(x)))


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Router(nn.Module):
    """Which K experts each token visits, and with which weights; float32 throughout, so that experts rank alike everywhere."""

    def __init__(self, arch: Arch, ops: Ops | None = None) -> None:
        super().__init__()
        self.arch, self.ops = arch, ops or PLAIN
        shape = arch.n_routed_experts, arch.hidden_size
        self.weight = nn.Parameter(torch.empty(shape, dtype=self.ops.router_dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(arch.n_routed_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] -> weights [N, K] in float32, indices [N, K]"""
        arch = self.arch
        limits = arch.n_group, arch.topk_group, arch.num_experts_per_tok, arch.routed_scaling_factor
        return self.ops.route(self.ops.router_logits(x, self.weight), self.bias, *limits, arch.norm_topk_prob)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """[N, H], [E, H] -> [N, E] in float32"""
    return F.linear(x.float(), weight)


class Moe(nn.Module):
    """The chosen experts' weighted sum, plus the shared expert that every token visits."""

    def __init__(self, arch: Arch, dtype: torch.dtype, ops: Ops | None = None) -> None:
        super().__init__()
        self.ops = ops or PLAIN
        experts, hidden, width = arch.n_routed_experts, arch.hidden_size, arch.moe_intermediate_size
        self.router = Router(arch, ops)
        self.gate_up = self.ops.expert_weight(experts, 2 * width, hidden, dtype=dtype)
        self.down = self.ops.expert_weight(experts, hidden, width, dtype=dtype)
        self.shared = Mlp(hidden, width * arch.n_shared_experts, dtype, self.ops)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]"""
        return self.ops.experts(self, x, *self.router(x))

    def mixed(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """[N, H] and each token's experts [N, K] -> their weighted sum, plus the shared one [N, H]"""
        y = self.routed(x, indices.flatten(), indices.shape[1]).unflatten(0, indices.shape)
        return torch.sum(y * weights.unsqueeze(-1).to(y.dtype), dim=1) + self.shared(x)

    def routed(self, x: Tensor, expert: Tensor, per_token: int) -> Tensor:
        """[N, H] and the expert of each of the N*K (token, expert) pairs -> their outputs [N*K, H]"""
        order = expert.argsort(stable=True)
        counts = (expert.unsqueeze(1) == torch.arange(self.gate_up.weight.shape[0], device=x.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(x[order // per_token], self.gate_up.weight.transpose(1, 2), offs=ends)
        out = F.grouped_mm(swiglu(hidden), self.down.weight.transpose(1, 2), offs=ends)
        return out[order.argsort()]


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, arch: Arch, number: int, form: Form, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.input_norm = Norm(arch.hidden_size, arch.rms_norm_eps, dtype)
        self.attn = Attention(arch, form, dtype, ops)
        self.post_norm = Norm(arch.hidden_size, arch.rms_norm_eps, dtype)
        moe = arch.is_moe(number)
        self.mlp = Moe(arch, dtype, ops) if moe else Mlp(arch.hidden_size, arch.intermediate_size, dtype, ops)

    def forward(self, x: Tensor, cache: Tensor, at: Where) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        x = x + self.attn(self.input_norm(x), cache, at)
        return x + self.mlp(self.post_norm(x).flatten(0, 1)).view_as(x)


class Decoder(nn.Module):
    """One step of the model: write the tokens' latents, return the logits of each row's last token."""

    inv_freq: Tensor

    def __init__(self, arch: Arch, form: Form, page_size: int, dtype: torch.dtype, ops: Ops | None = None) -> None:
        super().__init__()
        self.arch, self.page_size, self.dtype, self.ops = arch, page_size, dtype, ops or PLAIN
        if form == "expanded":
            self.ops = replace(self.ops, linear=F.linear)
        self.embed = Weight(arch.vocab_size, arch.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Layer(arch, i, form, dtype, self.ops) for i in range(arch.num_hidden_layers))
        self.norm = Norm(arch.hidden_size, arch.rms_norm_eps, dtype)
        self.head = Linear(arch.vocab_size, arch.hidden_size, dtype=dtype, ops=self.ops)
        self.register_buffer("inv_freq", torch.empty(arch.qk_rope_head_dim // 2))

    def where(self, positions: Tensor, pages: Tensor) -> Where:
        """[B, T], [B, P] -> what the layers need of them"""
        real = positions.clamp(min=0)
        offset = real % self.page_size
        slots = torch.gather(pages, 1, real // self.page_size) * self.page_size + offset
        keys = torch.arange(pages.shape[1] * self.page_size, device=positions.device)
        angles = real.unsqueeze(-1).float() * self.inv_freq
        factor = self.arch.attention_factor
        return Where(
            slots=torch.where(positions < 0, offset, slots).flatten(),
            pages=pages,
            visible=keys <= real.unsqueeze(-1),
            cos=(angles.cos() * factor).to(self.dtype),
            sin=(angles.sin() * factor).to(self.dtype),
        )

    def forward(self, tokens: Tensor, positions: Tensor, pages: Tensor, caches: list[Tensor]) -> Tensor:
        """[B, T], [B, T], [B, P], a cache a layer -> logits [B, V] in float32"""
        at = self.ops.where(self, positions, pages)
        x = F.embedding(tokens, self.embed.weight)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, at)
        return self.head(self.norm(x[:, -1])).float()


@dataclass(frozen=True, slots=True)
class Ops:
    """What computes the parts that plugins have kernels for; shapes are those of the methods that stand here as defaults."""

    where: Callable[[Decoder, Tensor, Tensor], Where] = Decoder.where
    into_cache: Callable[[Attention, Tensor, Tensor, Where], Tensor] = Attention.into_cache
    absorbed: Callable[[Attention, Tensor, Tensor, Tensor, Where], Tensor] = Attention.absorbed
    expanded: Callable[[Attention, Tensor, Tensor, Tensor, Where], Tensor] = Attention.expanded
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear
    """Of decode and short chunks; in the expanded form products are always torch's."""
    router_logits: Callable[[Tensor, Tensor], Tensor] = router_logits
    router_dtype: torch.dtype = torch.float32
    route: Callable[..., tuple[Tensor, Tensor]] = route
    experts: Callable[[Moe, Tensor, Tensor, Tensor], Tensor] = Moe.mixed
    expert_weight: Callable[..., nn.Module] = Weight


PLAIN = Ops()
