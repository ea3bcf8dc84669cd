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
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.core.limits import limited, mistakes

__all__ = ["HF_FIELDS", "Arch", "read_hf_config"]

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": MODEL_TYPES,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
}
"""Fields of config.json that choose a computation, with what is computed here."""
YARN = {
    "factor": True, "original_max_position_embeddings": True, "beta_fast": False, "beta_slow": False, "mscale": False,
    "mscale_all_dim": False, "attention_factor": False,
}  # fmt: skip
"""Numbers of a YaRN table, and whether one has to be there."""
WIDTH = {"least": 1, "most": 2**20}
LAYERS = {"least": 0, "most": 1024}
TOKEN = {"least": -1, "most": 2**24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One model's dimensions. Build it with `from_hf` or `from_dir`."""

    model_type: str = "deepseek_v3"
    vocab_size: int = limited(least=1, most=2**24)
    hidden_size: int = limited(**WIDTH)
    intermediate_size: int = limited(**WIDTH)
    """Width of the dense layers' MLP."""
    moe_intermediate_size: int = limited(**WIDTH)
    """Width of one expert's MLP."""
    num_hidden_layers: int = limited(least=1, most=1024)
    """Layers of the main model; MTP layers are stored after them and are not counted."""
    num_nextn_predict_layers: int = limited(0, **LAYERS)
    num_attention_heads: int = limited(**WIDTH)
    q_lora_rank: int = limited(**WIDTH)
    kv_lora_rank: int = limited(**WIDTH)
    qk_nope_head_dim: int = limited(**WIDTH)
    qk_rope_head_dim: int = limited(**WIDTH)
    v_head_dim: int = limited(**WIDTH)
    n_routed_experts: int = limited(**WIDTH)
    n_shared_experts: int = limited(**WIDTH)
    num_experts_per_tok: int = limited(**WIDTH)
    n_group: int = limited(**WIDTH)
    topk_group: int = limited(**WIDTH)
    routed_scaling_factor: float = limited(above=0)
    norm_topk_prob: bool = True
    first_k_dense_replace: int = limited(**LAYERS)
    """The first this many layers have a dense MLP."""
    moe_layer_freq: int = limited(1, least=1, most=1024)
    rms_norm_eps: float = limited(1e-6, above=0, most=1)
    rope_theta: float = limited(10000.0, above=1)
    rope_scaling: dict[str, Any] | None = None
    """None, or a YaRN table: factor, original_max_position_embeddings, beta_*, mscale*."""
    max_position_embeddings: int = limited(least=1, most=2**30)
    bos_token_id: int | None = limited(None, **TOKEN)
    eos_token_id: int | list[int] | None = limited(None, **TOKEN)
    pad_token_id: int | None = limited(None, **TOKEN)

    def __post_init__(self) -> None:
        """Refuse shapes that no DeepSeek-V3 class model can have."""
        if problems := [*mistakes(self), *_yarn_mistakes(self.rope_scaling)]:
            raise ConfigError("\n".join(f"config.json: {problem}" for problem in problems))
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
        return cls.from_hf(read_hf_config(Path(path)))

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
    for name, values in COMPUTED.items():
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
    merged = dict(_table(config, "rope_parameters"))
    theta = config.get("rope_theta", merged.pop("rope_theta", 10000.0))
    scaling = _table(config, "rope_scaling") or merged or None
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"rope_scaling is of type {kind!r}; only 'yarn' or none is computed.")
    theta = float(theta) if type(theta) is int else theta
    return {"rope_theta": theta, "rope_scaling": dict(scaling) if scaling and kind == "yarn" else None}


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The table `name` of config.json; empty where there is none."""
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: {name} is {found!r}, but must be a table or null.")
    return found


def _yarn_mistakes(scaling: dict[str, Any] | None) -> Iterator[str]:
    """A sentence for each number of a YaRN table that is missing or cannot be."""
    for name, needed in YARN.items() if scaling is not None else ():
        value = (scaling or {}).get(name)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if (needed or value is not None) and not (usable and (value > 0 or (value == 0 and not needed))):
            yield f"rope_scaling.{name} is {value!r}, but must be a number above 0."


HF_FIELDS = (*(field.name for field in fields(Arch)), *(name for name in COMPUTED if name != "model_type"), "rope_parameters")
"""The fields of config.json that are read here."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no config.json: give the folder of a Hugging Face checkpoint as checkpoint=DIR.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): fetch it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a {type(config).__name__}, but must hold a table of settings: fetch it again.")
    return config
