"""Which plugins an engine takes, and of each other one in a sentence why not: asked once, when the engine is described.

A plugin is taken where its own `has_kernel` says that it takes this GPU and these shapes; what would only be computed in plain
torch inside the plugin stays in the graph, which the compiler can then see through. On a CPU none is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.checkpoint import Checkpoint
from pipeline.engines.torch.graph import Decoder, Linear
from pipeline.engines.torch.plugged import EXPERTS
from pipeline.models.arch import Arch
from plugins.fused_qkv_a import op as fused_qkv_a
from plugins.gemm_tactics import cublaslt, tactics
from plugins.mla_decode import op as mla_decode
from plugins.mla_prefill import op as mla_prefill
from plugins.moe_grouped_gemm import launch as moe_grouped_gemm
from plugins.router_gemm import op as router_gemm
from plugins.topk_router import op as topk_router

if TYPE_CHECKING:
    from pipeline.config.schema import TorchEngineConfig

__all__ = ["choose"]


def choose(arch: Arch, settings: TorchEngineConfig, source: Path) -> dict[str, Any]:
    """engine.json's `plugins`: `taken`, `left` (name -> why), `experts`, the format in which routed experts stay, if any, and
    `products`, the shapes [out, in] of weights that the tactic file is for."""
    if settings.plugins == "off" or settings.device == "cpu":
        why = "engine.torch.plugins=off." if settings.plugins == "off" else "Its kernels are for CUDA, this engine is for the CPU."
        return {"taken": [], "left": dict.fromkeys(RULES, why), "experts": None, "products": []}
    stored = formats(source, arch)
    reasons = {name: rule(arch, settings, stored) for name, rule in RULES.items()}
    taken = [name for name, why in reasons.items() if not why]
    experts = next(iter(stored["routed_experts"]), None) if "moe_grouped_gemm" in taken else None
    tuned = products(arch, settings) if "gemm_tactics" in taken else []
    return {"taken": taken, "left": {name: why for name, why in reasons.items() if why}, "experts": experts, "products": tuned}


def formats(source: Path, arch: Arch) -> dict[str, set[str]]:
    """Class of module -> formats that the checkpoint stores its weights in; the router's by safetensors' name of the type."""
    found: dict[str, set[str]] = {"routed_experts": set(), "router": set()}
    for entry in Checkpoint.open(source).entries.values():
        if entry.place.kind in found and entry.name.endswith(".weight"):
            plain = entry.place.kind == "router"
            found[entry.place.kind].add(entry.main.dtype if plain else entry.format.name)
    return found


def blank(*shape: int, device: str = "cuda") -> Tensor:
    """A tensor to ask about."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def why_no_fused_qkv_a(arch: Arch, settings: TorchEngineConfig, stored: dict[str, set[str]]) -> str:
    """"" if it is taken."""
    q, latent, rope = arch.q_lora_rank, arch.kv_lora_rank, arch.qk_rope_head_dim
    if fused_qkv_a.has_kernel(*(blank(*shape, device="meta") for shape in ((q,), (latent,), (1, latent + rope)))):
        return ""
    return (
        "Its kernel needs q_lora_rank and kv_lora_rank in multiples of 256 and qk_rope_head_dim of 8; "
        f"this model has {q}, {latent} and {rope}."
    )


def products(arch: Arch, settings: TorchEngineConfig) -> list[list[int]]:
    """Shapes of the model's weights for which there is an algorithm that this GPU's library knows."""
    with torch.device("meta"):
        parts = Decoder(arch, "absorbed", settings.page_size, torch.bfloat16).modules()
    shapes = {tuple(part.weight.shape) for part in parts if isinstance(part, Linear)}
    return [list(shape) for shape in sorted(shapes & tactics.products(*library()))]


def why_no_gemm_tactics(arch: Arch, settings: TorchEngineConfig, stored: dict[str, set[str]]) -> str:
    """The same."""
    if products(arch, settings):
        return ""
    (device, version), here = tactics.library(), library()
    if (device, version) != here:
        return f"Its algorithms are for {device} with cuBLASLt {version}; here are {here[0]} with {here[1]}."
    return "Its file has no algorithm for a product of this model's sizes: search them with python -m plugins.gemm_tactics.tactics."


def why_no_mla_decode(arch: Arch, settings: TorchEngineConfig, stored: dict[str, set[str]]) -> str:
    """The same."""
    heads, width, page = arch.num_attention_heads, arch.latent_dim, settings.page_size
    if mla_decode.has_kernel(blank(1, 1, heads, width), blank(1, page, width, device="meta"), arch.kv_lora_rank):
        return ""
    found = f"{gpu()}, heads={heads}, kv_lora_rank={arch.kv_lora_rank}, qk_rope_head_dim={arch.qk_rope_head_dim}"
    return (
        "Its kernel needs sm_90, heads below 64 or a multiple of it, kv_lora_rank=512, qk_rope_head_dim=64 and "
        f"engine.torch.page_size in multiples of 64; here are {found} and page_size={page}."
    )


def why_no_mla_absorb(arch: Arch, settings: TorchEngineConfig, stored: dict[str, set[str]]) -> str:
    """The same; other shapes it leaves to cuBLAS by itself."""
    return why_no_mla_decode(arch, settings, stored) and "It surrounds mla_decode, which is not taken."


def why_no_mla_prefill(arch: Arch, settings: TorchEngineConfig, stored: dict[str, set[str]]) -> str:
    """The same."""
    heads, nope, rope, value = arch.num_attention_heads, arch.qk_nope_head_dim, arch.qk_rope_head_dim, arch.v_head_dim
    if mla_prefill.has_kernel(blank(1, heads, nope + rope), rope, value):
        return ""
    return (
        "Its kernel needs sm_90, qk_nope_head_dim=128, qk_rope_head_dim=64 and v_head_dim=128; "
        f"here are {gpu()}, {nope}, {rope} and {value}."
    )


def why_no_moe_grouped_gemm(arch: Arch, settings: TorchEngineConfig, stored: dict[str, set[str]]) -> str:
    """The same."""
    names = sorted(stored["routed_experts"])
    if len(names) != 1 or names[0] not in EXPERTS:
        found = " and ".join(names) or "not there"
        return f"Its kernels take experts in {', '.join(EXPERTS)}; this checkpoint's are {found}: convert it with quant=fp8_block."
    experts, hidden, width = arch.n_routed_experts, arch.hidden_size, arch.moe_intermediate_size
    weight = EXPERTS[names[0]]["expert_weight"]
    with torch.device("meta"):
        parts = tuple(weight(experts, 2 * width, hidden, dtype=torch.bfloat16).parameters())
    if moe_grouped_gemm.has_kernel(blank(1, hidden), parts, arch.num_experts_per_tok):
        return ""
    return (
        "Its kernels need sm_90, hidden_size and moe_intermediate_size in multiples of 128 (256 in NVFP4), at most 1024 experts "
        f"and 32 a token; here are {gpu()}, {hidden}, {width}, {experts} and {arch.num_experts_per_tok} in {names[0]}."
    )


def why_no_router_gemm(arch: Arch, settings: TorchEngineConfig, stored: dict[str, set[str]]) -> str:
    """The same."""
    hidden, experts = arch.hidden_size, arch.n_routed_experts
    if stored["router"] != {"BF16"}:
        found = " and ".join(sorted(stored["router"])) or "not there"
        return f"Its kernel takes BF16 weights; this checkpoint's are {found}, and routes must not change."
    if router_gemm.has_kernel(blank(1, hidden), blank(experts, hidden, device="meta")):
        return ""
    return f"Its kernel needs hidden_size in multiples of 256 and experts of 32; this model has {hidden} and {experts}."


def why_no_topk_router(arch: Arch, settings: TorchEngineConfig, stored: dict[str, set[str]]) -> str:
    """The same."""
    experts, groups, kept = arch.n_routed_experts, arch.n_group, arch.topk_group
    if topk_router.has_kernel(experts, groups, kept, arch.num_experts_per_tok):
        return ""
    return (
        "Its kernel needs experts, and those of the groups that are kept, in multiples of 32, and n_group a power of two up to 32; "
        f"this model keeps {kept} of {groups} groups of {experts} experts."
    )


def library() -> tuple[str, int]:
    """What an algorithm is for: this GPU and version of cuBLASLt."""
    return torch.cuda.get_device_name(), cublaslt.version()


def gpu() -> str:
    """sm_90"""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


RULES: dict[str, Callable[[Arch, TorchEngineConfig, dict[str, set[str]]], str]] = {
    "fused_qkv_a": why_no_fused_qkv_a,
    "gemm_tactics": why_no_gemm_tactics,
    "mla_absorb": why_no_mla_absorb,
    "mla_decode": why_no_mla_decode,
    "mla_prefill": why_no_mla_prefill,
    "moe_grouped_gemm": why_no_moe_grouped_gemm,
    "router_gemm": why_no_router_gemm,
    "topk_router": why_no_topk_router,
}
"""By the names of their folders in plugins/."""
