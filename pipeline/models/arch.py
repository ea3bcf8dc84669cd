"""The shape of a DeepSeek-V3 class model, read from a Hugging Face `config.json`.

Field names are Hugging Face's own, so a reader can hold the two side by side. The module needs only the
standard library: the planner and the rules ask about shapes on machines that have no torch.

YaRN (arXiv 2309.00071), as DeepSeek and transformers apply it, does three things:

  1. each rotary frequency is divided by `factor`, except that the fast ones, which turn more than
     `beta_fast` times within the original context, are kept, with a linear ramp between (`inv_freq`);
  2. cos and sin are multiplied by a ratio of mscales, 1.0 for R1 (`attention_factor`);
  3. the softmax scale is multiplied by mscale squared (`softmax_scale`).
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError

__all__ = ["Arch"]

MODEL_TYPES = ("deepseek_v3", "kimi_k2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One model's dimensions. Build it with `from_hf` or `from_dir`."""

    model_type: str = "deepseek_v3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense layers' MLP."""
    moe_intermediate_size: int
    """Width of one expert's MLP."""
    num_hidden_layers: int
    """Layers of the main model; MTP layers are stored after them and are not counted."""
    num_nextn_predict_layers: int = 0
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool = True
    first_k_dense_replace: int
    """The first this many layers have a dense MLP."""
    moe_layer_freq: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """None, or a YaRN table: factor, original_max_position_embeddings, beta_*, mscale*."""
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Refuse shapes that no DeepSeek-V3 class model can have."""
        if self.n_routed_experts % self.n_group:
            raise ConfigError(
                f"n_routed_experts is {self.n_routed_experts}, which {self.n_group} groups do not divide; "
                f"set n_group to a divisor of it."
            )
        reachable = self.n_routed_experts // self.n_group * self.topk_group
        if self.topk_group > self.n_group or self.num_experts_per_tok > reachable:
            raise ConfigError(
                f"A token picks {self.num_experts_per_tok} experts, but {self.topk_group} of {self.n_group} "
                f"groups hold {reachable}; lower num_experts_per_tok or fix topk_group and n_group."
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; RoPE rotates pairs, so it must be even.")

    @classmethod
    def from_dir(cls, path: str | Path) -> Arch:
        """Read `config.json` in a checkpoint directory."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no config.json; point at a Hugging Face checkpoint directory.")
        return cls.from_hf(json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Arch:
        """Read a Hugging Face config, refusing what the reference model would compute differently."""
        _refuse_unsupported(config)
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in config.items() if name in known}
        values.update(_rope_fields(config))
        needed = (field.name for field in fields(cls) if field.default is MISSING)
        if missing := [name for name in needed if name not in values]:
            raise ConfigError(f"config.json lacks {', '.join(missing)}; a DeepSeek-V3 class model needs them.")
        return cls(**values)

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key, as the softmax sees them."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values that MLA caches per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_stored_layers(self) -> int:
        """Layers in the checkpoint, MTP layers included."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` routes; MTP layers (from `num_hidden_layers` on) always do."""
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(qk_head_dim), times mscale squared under YaRN."""
        scale = self.qk_head_dim**-0.5
        yarn = self.rope_scaling or {}
        if yarn.get("mscale_all_dim"):
            scale *= _mscale(yarn["factor"], yarn["mscale_all_dim"]) ** 2
        return scale

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        yarn = self.rope_scaling
        if yarn is None:
            return 1.0
        if yarn.get("attention_factor") is not None:
            return float(yarn["attention_factor"])
        if yarn.get("mscale") and yarn.get("mscale_all_dim"):
            return _mscale(yarn["factor"], yarn["mscale"]) / _mscale(yarn["factor"], yarn["mscale_all_dim"])
        return _mscale(yarn["factor"], 1.0)

    def inv_freq(self) -> tuple[float, ...]:
        """The qk_rope_head_dim/2 rotary frequencies in radians per token, fastest first."""
        dim = self.qk_rope_head_dim
        plain = [self.rope_theta ** (-i / dim) for i in range(0, dim, 2)]
        if self.rope_scaling is None:
            return tuple(plain)
        factor = self.rope_scaling["factor"]
        low, high = self._yarn_ramp()
        slowed = (min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2))
        return tuple(f / factor * share + f * (1 - share) for f, share in zip(plain, slowed, strict=True))

    def _yarn_ramp(self) -> tuple[float, float]:
        """Frequency indices between which YaRN goes from keeping to dividing by the factor."""
        yarn, dim = self.rope_scaling or {}, self.qk_rope_head_dim

        def index_of(turns: float) -> float:
            context = yarn["original_max_position_embeddings"]
            return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.rope_theta))

        low = max(math.floor(index_of(yarn.get("beta_fast") or 32)), 0)
        high = min(math.ceil(index_of(yarn.get("beta_slow") or 1)), dim - 1)
        return low, high if high != low else high + 0.001


def _mscale(factor: float, weight: float) -> float:
    """DeepSeek's yarn_get_mscale."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Say which value is not supported, what is, and what to do."""
    allowed: dict[str, tuple[Any, ...]] = {
        "model_type": MODEL_TYPES,
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "tie_word_embeddings": (False,),
        "rope_interleave": (True,),
    }
    for name, values in allowed.items():
        found = config.get(name, None if name == "model_type" else values[0])
        if found not in values:
            raise ConfigError(
                f"{name} is {found!r}, but this pipeline computes only {' or '.join(map(repr, values))}; "
                f"use a DeepSeek-V3 or R1 class checkpoint, or add the model under pipeline/models."
            )
    if config.get("q_lora_rank") is None:
        raise ConfigError(
            "q_lora_rank is null, as in DeepSeek-V2-Lite, whose queries are not low-rank; "
            "only models with q_a_proj and q_b_proj are supported, so use a V3 or R1 class checkpoint."
        )


def _rope_fields(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, from either the published or transformers 5's spelling."""
    merged = dict(config.get("rope_parameters") or {})
    theta = config.get("rope_theta", merged.pop("rope_theta", 10000.0))
    scaling = config.get("rope_scaling") or merged or None
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"rope_scaling is of type {kind!r}; only 'yarn' or none is computed.")
    return {"rope_theta": float(theta), "rope_scaling": dict(scaling) if scaling and kind == "yarn" else None}
