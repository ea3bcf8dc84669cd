"""DeepSeek-V3 in plain torch: the reference that every faster path is compared with.

It computes a whole sequence at once, with no cache, no kernel and no absorbed weights, so that each
step reads like the papers (arXiv 2405.04434 for MLA, 2412.19437 for V3). Parameter names are Hugging
Face's, so a published checkpoint, once dequantised, loads with `strict=True`.

Three choices decide whether the numbers agree with DeepSeek's:

  RoPE    rotates interleaved pairs (x0, x1), (x2, x3), ... and leaves the first elements of all pairs
          before the second ones. Queries and keys are permuted alike, so their products do not change.
  Router  works in float32 whatever the weights' type is; see `plugins.topk_router.reference`.
  MTP     joins the embedding of the next token with the hidden state after the model's final norm.

Shape legend: B batch, T tokens, N = B*T, H hidden, A heads, V vocabulary, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.core.errors import ConfigError
from pipeline.models.arch import Arch
from plugins.topk_router.reference import route

__all__ = ["DeepseekV3", "build"]


def linear(num_in: int, num_out: int) -> nn.Linear:
    """A projection; DeepSeek-V3 has no biases."""
    return nn.Linear(num_in, num_out, bias=False)


class RMSNorm(nn.Module):
    """Scale by the root mean square, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rope_tables(arch: Arch, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cos and sin, each [T, qk_rope_head_dim/2] in float32."""
    inv_freq = torch.tensor(arch.inv_freq(), dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float32, device=device), inv_freq)
    return angles.cos() * arch.attention_factor, angles.sin() * arch.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs: [..., T, rope] -> [..., T, rope], first elements before second ones."""
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head latent attention, with keys and values expanded from the latent."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        heads = arch.num_attention_heads
        self.q_a_proj = linear(arch.hidden_size, arch.q_lora_rank)
        self.q_a_layernorm = RMSNorm(arch.q_lora_rank, arch.rms_norm_eps)
        self.q_b_proj = linear(arch.q_lora_rank, heads * arch.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(arch.hidden_size, arch.latent_dim)
        self.kv_a_layernorm = RMSNorm(arch.kv_lora_rank, arch.rms_norm_eps)
        self.kv_b_proj = linear(arch.kv_lora_rank, heads * (arch.qk_nope_head_dim + arch.v_head_dim))
        self.o_proj = linear(heads * arch.v_head_dim, arch.hidden_size)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, H] -> [B, A, T, nope + rope]"""
        arch = self.arch
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (arch.num_attention_heads, arch.qk_head_dim)).transpose(1, 2)
        nope, rope = q.split([arch.qk_nope_head_dim, arch.qk_rope_head_dim], dim=-1)
        return torch.cat([nope, rotate(rope, cos, sin)], dim=-1)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> keys [B, A, T, nope + rope], values [B, A, T, v]; all heads share one rope part."""
        arch = self.arch
        latent, rope = self.kv_a_proj_with_mqa(x).split([arch.kv_lora_rank, arch.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (arch.num_attention_heads, -1))
        nope, value = kv.transpose(1, 2).split([arch.qk_nope_head_dim, arch.v_head_dim], dim=-1)
        rope = rotate(rope, cos, sin).unsqueeze(1).expand(-1, arch.num_attention_heads, -1, -1)
        return torch.cat([nope, rope], dim=-1), value

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H], causal."""
        query = self.queries(x, cos, sin)
        key, value = self.keys_values(x, cos, sin)
        scale = self.arch.softmax_scale
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """The router: which K experts each token visits, and with which weights."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.weight = nn.Parameter(torch.empty(arch.n_routed_experts, arch.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(arch.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] -> weights [N, K] in float32, indices [N, K]"""
        arch = self.arch
        return route(
            F.linear(x.float(), self.weight.float()),
            self.e_score_correction_bias,
            n_group=arch.n_group,
            topk_group=arch.topk_group,
            top_k=arch.num_experts_per_tok,
            scale=arch.routed_scaling_factor,
            norm_topk_prob=arch.norm_topk_prob,
        )


class Moe(nn.Module):
    """The chosen experts' weighted sum, plus the shared expert that every token visits."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        width = arch.moe_intermediate_size
        self.gate = Gate(arch)
        self.experts = nn.ModuleList(Mlp(arch.hidden_size, width) for _ in range(arch.n_routed_experts))
        self.shared_experts = Mlp(arch.hidden_size, width * arch.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        tokens = x.flatten(0, -2)
        weights, indices = self.gate(tokens)
        routed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(indices == number)
            share = weights[row, slot].unsqueeze(-1)
            routed.index_add_(0, row, (expert(tokens[row]) * share).to(tokens.dtype))
        return routed.view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, arch: Arch, number: int) -> None:
        super().__init__()
        self.self_attn = Attention(arch)
        self.mlp = Moe(arch) if arch.is_moe(number) else Mlp(arch.hidden_size, arch.intermediate_size)
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharedHead(nn.Module):
    """The MTP layer's own norm, and its copy of lm_head."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.head = linear(arch.hidden_size, arch.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, V]"""
        return self.head(self.norm(x))


class MtpLayer(Layer):
    """Multi-token prediction: from a hidden state and the token after it, predict the one after that."""

    def __init__(self, arch: Arch, number: int) -> None:
        super().__init__(arch, number)
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.enorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.hnorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.eh_proj = linear(2 * arch.hidden_size, arch.hidden_size)
        self.shared_head = SharedHead(arch)

    def join(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """[B, T], [B, T, H] -> the layer's input [B, T, H]"""
        return self.eh_proj(torch.cat([self.enorm(self.embed_tokens(next_ids)), self.hnorm(hidden)], dim=-1))


class Decoder(nn.Module):
    """Embedding, layers (the MTP layers last, unused here) and the final norm."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(
            Layer(arch, i) if i < arch.num_hidden_layers else MtpLayer(arch, i) for i in range(arch.num_stored_layers)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, H], after the final norm."""
        cos, sin = rope_tables(self.arch, ids.shape[1], ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers[: self.arch.num_hidden_layers]:
            x = layer(x, cos, sin)
        return self.norm(x)


class DeepseekV3(nn.Module):
    """The model with its head."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.model = Decoder(arch)
        self.lm_head = linear(arch.hidden_size, arch.vocab_size)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, H], the states that `lm_head` and `mtp_logits` read."""
        return self.model(ids)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]; position t predicts token t + 1."""
        return self.lm_head(self.hidden(ids))

    def mtp_logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """[B, T], [B, at least T - 1, H] -> logits [B, T - 1, V]; position t predicts token t + 2.

        Position t joins `hidden[t]` with `ids[t + 1]`. To draft, append the token just sampled to `ids`.
        """
        if not self.arch.num_nextn_predict_layers:
            raise ConfigError("num_nextn_predict_layers is 0: this checkpoint has no MTP layer to draft with.")
        layer = self.model.layers[self.arch.num_hidden_layers]
        cos, sin = rope_tables(self.arch, ids.shape[1] - 1, ids.device)
        joined = layer.join(ids[:, 1:], hidden[:, : ids.shape[1] - 1])
        return layer.shared_head(layer(joined, cos, sin))


def build(arch: Arch, state_dict: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> DeepseekV3:
    """A model of `dtype` from a dequantised checkpoint; the router's bias stays float32, as shipped."""
    keep = "e_score_correction_bias"
    cast = {k: v.to(torch.float32 if k.endswith(keep) else dtype) for k, v in state_dict.items()}
    with torch.device("meta"):
        model = DeepseekV3(arch)
    model.load_state_dict(cast, strict=True, assign=True)
    return model.eval().requires_grad_(False)
