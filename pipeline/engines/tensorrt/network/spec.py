"""What one network is: which part of the model, in which form, for which shapes and which rank."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from pipeline.models.arch import Arch

__all__ = ["FORMS", "FP4_BLOCK", "Exchange", "Form", "Parallel", "Payload", "Spec"]

Form = Literal["absorbed", "expanded"]
FORMS: tuple[Form, ...] = ("absorbed", "expanded")
Parallel = Literal["adp", "tp"]
Payload = Literal["bf16", "fp4"]
Exchange = Literal["gather", "all_to_all"]
FP4_BLOCK = 16
"""Elements of a block of NVFP4, which have a scale of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One network.

    absorbed   decode and short chunks: queries are carried into the latent space, attention is MQA over the cached latents
               themselves. The heads are folded into the query axis, because TensorRT would copy the cache once a head.
    expanded   prefill: keys and values of every position so far are made from the cached latents; attention is MHA with
               heads of nope + rope, for which TensorRT has a fused kernel.
    """

    arch: Arch
    form: Form
    dtype: str = "bfloat16"
    """Type of activations and cache."""
    max_batch: int
    max_tokens: int
    """Tokens of one row in one step."""
    max_seq_len: int
    """Rows of the cache."""
    first_layer: int = 0
    last_layer: int
    """One past the last; the network with layer 0 embeds, the one with the model's last layer has the head."""
    mtp: bool = False
    """The multi-token-prediction layer instead of the model; or, for the model, that it hands out its hidden states."""
    rank: int = 0
    ranks: int = 1
    parallel: Parallel = "adp"
    """adp: each rank attends for its own rows; tp: the ranks share the heads. Experts are spread over the ranks in both."""
    moe: str = "dense"
    """How experts are computed: dense, dispatch or layer (see `moe.py`)."""
    moe_capacity: int = 0
    """dispatch: most tokens an expert takes; 0: all of them."""
    exchange: Exchange = "gather"
    """adp: how tokens come to the ranks that have their experts, and back (see `exchange.py`)."""
    exchange_share: float = 1.0
    """all_to_all: the part of a step's tokens for which each rank has room on each other one."""
    gather: Payload = "bf16"
    """adp: what tokens travel in on their way to the experts (see `payload.py`)."""

    plugins_for: int = 0
    """Compute capability, x10, of the plugins that stand for native layers; 0: none do."""
    host_plugins: bool = False
    """Whether those that are launched from the host may, too."""

    @property
    def embeds(self) -> bool:
        """Whether tokens come in, not hidden states."""
        return self.first_layer == 0 or self.is_draft

    @property
    def has_head(self) -> bool:
        """Whether logits go out."""
        return self.last_layer >= self.arch.num_hidden_layers

    @property
    def is_draft(self) -> bool:
        """Whether this is the MTP layer."""
        return self.first_layer >= self.arch.num_hidden_layers

    @property
    def layers(self) -> range:
        """Numbers of the layers."""
        return range(self.first_layer, self.last_layer)

    @property
    def heads(self) -> int:
        """Attention heads of this rank."""
        return self.arch.num_attention_heads // (self.ranks if self.parallel == "tp" else 1)

    @property
    def experts(self) -> range:
        """Routed experts of this rank."""
        count = self.arch.n_routed_experts // self.ranks
        return range(self.rank * count, (self.rank + 1) * count)

    @property
    def most_tokens_at_experts(self) -> int:
        """Rows that a rank's experts see in the largest step, those of other ranks among them."""
        most = self.max_batch * self.max_tokens
        if self.ranks == 1 or self.parallel == "tp":
            return most
        return self.ranks * (self.room(most) if self.exchange == "all_to_all" else most)

    def room(self, tokens: int) -> int:
        """all_to_all: places that each rank has on each other one, of a step of so many tokens."""
        return -(-tokens * self.permille // 1000)

    @property
    def permille(self) -> int:
        """`exchange_share` as a whole number, which shapes are computed with."""
        return round(1000 * self.exchange_share)

    @property
    def sent_per_token(self) -> int:
        """Bytes that a rank sends to all others for each token of a step: its own ones under adp, all ranks' same ones under tp,
        where a ring's all-reduce passes everything on twice. For all layers of this network."""
        arch, others, size = self.arch, self.ranks - 1, {"bfloat16": 2, "float32": 4}[self.dtype]
        moe = sum(arch.is_moe(number) for number in self.layers)
        if self.parallel == "tp":
            return (moe + len(self.layers)) * 2 * others * arch.hidden_size * size // self.ranks
        there = arch.hidden_size * 9 // FP4_BLOCK if self.gather == "fp4" else arch.hidden_size * size
        routing, back = 8 * arch.num_experts_per_tok, arch.hidden_size * size
        return moe * others * (there + routing + back) * self.permille // 1000

    def plain(self) -> dict[str, Any]:
        """For a report."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "arch"}
