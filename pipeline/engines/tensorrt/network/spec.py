"""What one network is: which part of the model, in which form, for which shapes and which rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.models.arch import Arch

__all__ = ["FORMS", "Form", "Parallel", "Spec"]

Form = Literal["absorbed", "expanded"]
FORMS: tuple[Form, ...] = ("absorbed", "expanded")
Parallel = Literal["adp", "tp"]


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

    def plain(self) -> dict[str, Any]:
        """For a report."""
        names = ("form", "dtype", "max_batch", "max_tokens", "max_seq_len", "first_layer", "last_layer", "mtp", "rank", "ranks",
                 "parallel", "moe", "moe_capacity")  # fmt: skip
        return {name: getattr(self, name) for name in names}
