"""An engine folder of DeepSeek-R1's widths: a dense layer and a MoE layer, random weights made on the GPU, a real build's steps.

Words, routes and answers of purely random weights are near ties, which any rounding decides; a trained model's mostly are not.
So here a word lies near the router's rows of its own experts, and the head's row of the word that follows it lies near it. What
a layer adds is as large as the word, so that some routes and words are still close.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import torch
from torch import Tensor

from pipeline.checkpoint import ShardWriter
from pipeline.core.jsonio import write_json
from pipeline.engines.torch import build, carry, choose
from pipeline.models.arch import Arch

__all__ = ["build_wide"]

WIDTHS = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip
NUMPY = {"F32": "float32", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": "uint8"}
ROUTER, DEVICE = "layers.1.mlp.router", "cuda"
ROUTE_LEAD, WORD_LEAD = 8.0, 0.1
"""What a word adds to its experts' logits, and to the next word's for each unit of its length, before norms."""
E2M1_SIZE = 2.93
"""Root mean square of all E2M1 values."""


def build_wide(settings: Any, tiny: Path, folder: Path, experts: str, count: int) -> None:
    """Fill `folder`: `count` experts in the format `experts`, or in BF16 with plugins=off; the rest as in `tiny`'s config."""
    choose.formats = lambda *_: {"routed_experts": {experts}, "router": {"BF16"}}
    info = build.describe(replace(Arch.from_dir(tiny), **WIDTHS | {"n_routed_experts": count}), settings, tiny)
    write_json(folder / "engine.json", info)
    carry.carry(info["plugins"]["taken"], folder)
    began = time.perf_counter()
    write_random(info, folder / "weights.safetensors")
    print(f"weights written in {time.perf_counter() - began:.0f} s", flush=True)
    build.compile_forms(folder, info)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    print(build.check(folder), f"after {time.perf_counter() - began:.0f} s")


def write_random(info: dict[str, Any], path: Path) -> None:
    """Weights that keep their inputs' size, the same whatever they are stored in."""
    arch, plan = Arch(**info["arch"]), [(name, *kind) for name, kind in build.stored_as(info["weights"]).items()]
    nvfp4 = "nvfp4" in (info["plugins"]["experts"] or "")
    with ShardWriter(path, plan) as writer:
        for name, kind, shape in plan:
            dtype = getattr(torch, info["weights"][name][0])
            routed = ".mlp." in name and (len(shape) == 3 or name.endswith("scale_2"))
            value = (nvfp4_experts if nvfp4 else fp8_experts)(name, shape, dtype) if routed else plain(name, shape, dtype, arch)
            writer.write(name, value.contiguous().view(torch.uint8).flatten().cpu().numpy().view(NUMPY[kind]).reshape(shape))


def plain(name: str, shape: tuple[int, ...], dtype: torch.dtype, arch: Arch) -> Tensor:
    """What is no routed expert's, of BF16 values."""
    if name == "inv_freq":
        return torch.tensor(arch.inv_freq(), device=DEVICE)
    if name in ("embed.weight", "head.weight"):
        value = {"embed.weight": words, "head.weight": answers}[name](arch)
    elif "norm" in name:
        value = 1 + normal(name, *shape) * 0.05
    else:
        value = normal(name, *shape) * (0.01 if name.endswith("bias") else shape[-1] ** -0.5)
    return value.bfloat16().to(dtype)


def words(arch: Arch) -> Tensor:
    """[V, H], each near the rows of its experts: equally many of each of its groups."""
    router = normal(f"{ROUTER}.weight", arch.n_routed_experts, arch.hidden_size) * arch.hidden_size**-0.5
    size, each = arch.n_routed_experts // arch.n_group, arch.num_experts_per_tok // arch.topk_group
    drawn = drawing("experts")
    groups = torch.rand(arch.vocab_size, arch.n_group, generator=drawn, device=DEVICE).topk(arch.topk_group).indices
    inside = torch.rand(*groups.shape, size, generator=drawn, device=DEVICE).topk(each).indices
    experts = (groups.unsqueeze(-1) * size + inside).flatten(1)
    return normal("embed", arch.vocab_size, arch.hidden_size) + ROUTE_LEAD * router[experts].sum(1)


def answers(arch: Arch) -> Tensor:
    """[V, H]; the row of the word after each is near that one."""
    rows = normal("head", arch.vocab_size, arch.hidden_size) * arch.hidden_size**-0.5
    after = (5 * torch.arange(arch.vocab_size, device=DEVICE) + 3) % arch.vocab_size
    return rows.index_add(0, after, torch.nn.functional.normalize(words(arch), dim=-1) * WORD_LEAD)


def fp8_experts(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """E4M3 with a scale for each 128x128, also where they are asked for in BF16."""
    drawn = drawing(name)
    if name.endswith("scale_inv"):
        return scales_of(shape, drawn)
    blocks = (shape[0], shape[1] // 128, shape[2] // 128)
    scales, out = scales_of(blocks, drawn), torch.empty(shape, dtype=dtype, device=DEVICE)
    for expert in range(shape[0]):
        codes = torch.randn(shape[1:], device=DEVICE, generator=drawn).mul_(64).to(torch.float8_e4m3fn)
        wide = scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        out[expert] = codes if dtype == torch.float8_e4m3fn else (codes.float() * wide).to(dtype)
    return out


def nvfp4_experts(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Codes of all values alike, scales of 0.5 to 1.5, and one a tensor that makes the weights 1 / sqrt(7168)."""
    if name.endswith("scale_2"):
        return torch.full(shape, WIDTHS["hidden_size"] ** -0.5 / E2M1_SIZE, device=DEVICE)
    if name.endswith("scale"):
        return (0.5 + torch.rand(shape, device=DEVICE, generator=drawing(name))).to(dtype)
    return torch.randint(256, shape, device=DEVICE, generator=drawing(name), dtype=dtype)


def scales_of(shape: tuple[int, ...], drawn: torch.Generator) -> Tensor:
    """F32, so that codes of magnitude 64 become weights of 1 / sqrt(columns)."""
    return (0.5 + torch.rand(shape, device=DEVICE, generator=drawn)) * ((128 * shape[-1]) ** -0.5 / 64)


def normal(name: str, *shape: int) -> Tensor:
    """Standard normal values, always the same of a name."""
    return torch.randn(shape, device=DEVICE, generator=drawing(name))


def drawing(name: str) -> torch.Generator:
    """Of a module: its codes and its scales start alike."""
    return torch.Generator(DEVICE).manual_seed(zlib.crc32(name.rpartition(".weight")[0].encode() or name.encode()))
