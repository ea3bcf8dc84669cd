"""Exact parameter counts and stored bytes of a DeepSeek-V3 class model, by module class.

A model is a list of `Part`s: `count` tensors of one shape and class. Everything else is a sum over that list, so the
counts agree with the checkpoint or they do not (DeepSeek-R1: 671,026,419,200 parameters without the MTP layer).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.models.arch import Arch

__all__ = [
    "CLASSES", "LINEAR_CLASSES", "STORAGE", "Part", "Storage", "block_of", "counted_parts", "embedding_parts", "layer_parts",
    "main_parts", "mtp_layer", "num_params", "stored_bytes",
]  # fmt: skip

LINEAR_CLASSES = ("attention", "o_proj", "dense_mlp", "shared_experts", "routed_experts")
"""Classes whose weights may be quantised; those of an MTP layer follow the format of `mtp` instead."""
CLASSES = ("embed", "lm_head", "norm", "router", *LINEAR_CLASSES, "mtp")


@dataclass(frozen=True, slots=True)
class Storage:
    """What a format stores: the weight, a scale for every `rows` x `cols` of it, and more."""

    bits: int
    scale_bytes: int = 0
    rows: int = 1
    cols: int | None = None
    """None: a whole row."""
    column_bytes: int = 0
    """Of what is stored once a column."""
    fixed_bytes: int = 0
    """Of what is stored once a tensor."""


STORAGE = {
    "bf16": Storage(16),
    "fp8": Storage(8, fixed_bytes=8),
    "fp8_block": Storage(8, 4, 128, 128),
    "fp8_channel": Storage(8, 4),
    "mxfp8": Storage(8, 1, 1, 32),
    "nvfp4": Storage(4, 1, 1, 16, fixed_bytes=8),
    "w4a16_nvfp4": Storage(4, 1, 1, 16, fixed_bytes=4),
    "w4a8_nvfp4_fp8": Storage(4, 1, 1, 32, fixed_bytes=8),
    "mxfp4": Storage(4, 1, 1, 32),
    "int4_awq": Storage(4, 4, 1, 128, column_bytes=2),
    "w4a8_awq": Storage(4, 4, 1, 128, column_bytes=2, fixed_bytes=8),
}
"""As `pipeline/formats` writes it; a test compares the two."""


@dataclass(frozen=True, slots=True)
class Part:
    """`count` tensors of [rows, cols]; `name` is the last part of Hugging Face's module name."""

    cls: str
    name: str
    rows: int
    cols: int = 1
    count: int = 1
    float32: bool = False

    @property
    def params(self) -> int:
        """Elements of all `count` tensors."""
        return self.rows * self.cols * self.count

    def bytes(self, fmt: str) -> int:
        """Stored bytes of all `count` tensors when linear layers are in `fmt`."""
        if self.float32:
            return 4 * self.params
        return self.count * matrix_bytes(self.stored_as(fmt), self.rows, self.cols)

    def stored_as(self, fmt: str) -> str:
        """BF16 for what is not linear, and for kv_b_proj, which `convert` leaves in BF16 unless in FP8 blocks."""
        folded = self.name == "kv_b_proj" and fmt != "fp8_block"
        return fmt if self.cls in LINEAR_CLASSES and not folded else "bf16"


def block_of(fmt: str) -> int:
    """Columns that may not be parted, because they share a scale."""
    return STORAGE[fmt].cols or 1


def matrix_bytes(fmt: str, rows: int, cols: int) -> int:
    """Bytes of one weight with its scales, as the checkpoint stores them."""
    item = STORAGE[fmt]
    scales = math.ceil(rows / item.rows) * math.ceil(cols / (item.cols or cols))
    return rows * cols * item.bits // 8 + item.scale_bytes * scales + item.column_bytes * cols + item.fixed_bytes


def attention_parts(arch: Arch) -> list[Part]:
    """Multi-head latent attention of one layer. q_a and kv_a are the two that tensor parallelism does not split."""
    heads = arch.num_attention_heads
    return [
        Part("attention", "q_a_proj", arch.q_lora_rank, arch.hidden_size),
        Part("attention", "q_b_proj", heads * arch.qk_head_dim, arch.q_lora_rank),
        Part("attention", "kv_a_proj_with_mqa", arch.latent_dim, arch.hidden_size),
        Part("attention", "kv_b_proj", heads * (arch.qk_nope_head_dim + arch.v_head_dim), arch.kv_lora_rank),
        Part("o_proj", "o_proj", arch.hidden_size, heads * arch.v_head_dim),
        Part("norm", "q_a_layernorm", arch.q_lora_rank),
        Part("norm", "kv_a_layernorm", arch.kv_lora_rank),
    ]


def mlp_parts(cls: str, hidden: int, inter: int, count: int = 1) -> list[Part]:
    """`count` gated MLPs."""
    return [
        Part(cls, "gate_proj", inter, hidden, count),
        Part(cls, "up_proj", inter, hidden, count),
        Part(cls, "down_proj", hidden, inter, count),
    ]


def layer_parts(arch: Arch, layer: int) -> list[Part]:
    """Every tensor of one layer, an MTP layer's own four excepted."""
    hidden = arch.hidden_size
    parts = [*attention_parts(arch), Part("norm", "layernorm", hidden, count=2)]
    if not arch.is_moe(layer):
        return parts + mlp_parts("dense_mlp", hidden, arch.intermediate_size)
    return [
        *parts,
        Part("router", "gate", arch.n_routed_experts, hidden),
        Part("router", "e_score_correction_bias", arch.n_routed_experts, float32=True),
        *mlp_parts("shared_experts", hidden, arch.moe_intermediate_size * arch.n_shared_experts),
        *mlp_parts("routed_experts", hidden, arch.moe_intermediate_size, arch.n_routed_experts),
    ]


def embedding_parts(arch: Arch) -> list[Part]:
    """What stands before and behind the layers: embedding, head and the last norm."""
    embedding = [Part(cls, cls, arch.vocab_size, arch.hidden_size) for cls in ("embed", "lm_head")]
    return [*embedding, Part("norm", "norm", arch.hidden_size)]


def main_parts(arch: Arch) -> list[Part]:
    """The main model: everything but the MTP layers."""
    layers = [part for layer in range(arch.num_hidden_layers) for part in layer_parts(arch, layer)]
    return [*embedding_parts(arch), *layers]


def counted_parts(arch: Arch) -> list[tuple[Part, int]]:
    """The main model's tensors of one dense and one MoE layer, each with how many layers have it, and what stands around."""
    counted = [(part, 1) for part in embedding_parts(arch)]
    for is_moe in (False, True):
        alike = [layer for layer in range(arch.num_hidden_layers) if arch.is_moe(layer) == is_moe]
        counted += [(part, len(alike)) for part in layer_parts(arch, alike[0])] if alike else []
    return counted


def mtp_layer(arch: Arch, *, stored: bool) -> list[Part]:
    """One MTP layer; all are alike. As `stored` it brings its own copy of embedding and head; an engine shares the main model's."""
    hidden = arch.hidden_size
    copies = [Part(cls, cls, arch.vocab_size, hidden) for cls in ("embed", "lm_head")] if stored else []
    own = [Part("mtp", "eh_proj", hidden, 2 * hidden), Part("norm", "enorm, hnorm, shared_head.norm", hidden, count=3)]
    return [*layer_parts(arch, arch.num_hidden_layers), *own, *copies]


def num_params(parts: list[Part]) -> int:
    """Parameters of all parts."""
    return sum(part.params for part in parts)


def stored_bytes(arch: Arch, formats: Mapping[str, str]) -> dict[str, int]:
    """Bytes of a checkpoint by module class; without the files' headers (12 MB for DeepSeek-R1)."""
    sizes = dict.fromkeys(CLASSES, 0)
    for part in main_parts(arch):
        sizes[part.cls] += part.bytes(formats.get(part.cls, "bf16"))
    layer = sum(part.bytes(formats.get("mtp", "bf16")) for part in mtp_layer(arch, stored=True))
    sizes["mtp"] += layer * arch.num_nextn_predict_layers
    return sizes
