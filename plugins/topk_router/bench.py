"""The router beside flashinfer, vLLM and sgl-kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, compiled, micros
from plugins.topk_router import op
from plugins.topk_router.reference import route

__all__ = ["rows"]

CONFIGS = {
    "deepseek_r1": (256, 8, 4, 8, 2.5),
    "kimi_k2": (384, 1, 1, 8, 2.827),
    "glm_4.5": (160, 1, 1, 8, 2.5),
}
TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
OTHERS_TOKENS = TOKENS[:-1]
"""Of the other models."""


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Configurations and batches. `tied_us`: the last token has a pair of equal experts; `groups_tied_us`: equal groups."""
    first, *others = CONFIGS
    for tokens in TOKENS:
        yield _row(bench, first, tokens)
    for name in () if bench.quick else others:
        for tokens in OTHERS_TOKENS:
            yield _row(bench, name, tokens)


def _row(bench: Bench, name: str, tokens: int) -> dict[str, Any]:
    experts, *config = CONFIGS[name]
    logits, bias = torch.randn(tokens, experts, device="cuda"), torch.randn(experts, device="cuda") * 0.1
    weights, indices = route(logits, bias, *config)
    out = torch.full_like(weights, torch.nan), torch.full_like(indices, -1, dtype=torch.int32)
    chosen = indices.sort().values

    def wrong(found: tuple[Tensor, Tensor]) -> Tensor:
        return (found[1].long().sort().values != chosen).any(dim=1)

    def dense(weights: Tensor, indices: Tensor) -> Tensor:
        return torch.zeros_like(logits).scatter(1, indices.long(), weights)

    def error() -> float:
        return float((dense(*out) - dense(weights, indices))[~wrong(out)].abs().max() / weights.abs().max())

    row = bench.row(
        "topk_router",
        {"model": name, "tokens": tokens},
        lambda overlap: op.launch(logits, bias, *out, *config, overlap=overlap),
        error=error,
        eager=lambda: route(logits, bias, *config),
        compiled=lambda: compiled(route)(logits, bias, *config),
        peers=_peers(logits, bias, *config),
        right=lambda found: not bool(wrong(found).any()),
        moved=logits.numel() * 4 + weights.numel() * 8,
    )
    row |= {"tokens_that_differ": int(wrong(out).sum())}
    ties = {"tied_us": _tied(logits, bias)}
    if config[1] < config[0]:
        ties |= {"groups_tied_us": _groups_tied(logits, bias, *config[:2])}
    return row | {name: micros(lambda given=given: op.launch(*given, *out, *config)) for name, given in ties.items()}


def _tied(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The same, but the last token's two best experts are equal."""
    logits, bias = logits.clone(), bias.clone()
    logits[-1, :2], bias[:2] = logits.max() + 1, bias.max()
    return logits, bias


def _groups_tied(logits: Tensor, bias: Tensor, groups: int, kept: int) -> tuple[Tensor, Tensor]:
    """The same, but the last token's last group that is kept and the next one are equal."""
    logits, bias = logits.clone(), bias.clone()
    best = (logits[-1].sigmoid() + bias).view(groups, -1).topk(2).values.sum(1).argsort(descending=True)
    one, other = best[kept - 1], best[kept]
    bias.view(groups, -1)[other] = bias.view(groups, -1)[one]
    logits[-1].view(groups, -1)[other] = logits[-1].view(groups, -1)[one]
    return logits, bias


def _peers(logits: Tensor, bias: Tensor, *config: Any) -> dict[str, Call]:
    n_group, topk_group, top_k, scale = config

    def flashinfer() -> tuple[Tensor, Tensor]:
        from flashinfer.fused_moe import fused_topk_deepseek

        out = torch.empty(len(logits), top_k, device="cuda"), torch.empty(len(logits), top_k, dtype=torch.int32, device="cuda")
        fused_topk_deepseek(logits, bias, n_group, topk_group, top_k, scale, *out, False)
        return out

    ops = torch.ops
    return {
        "flashinfer": flashinfer,
        "vllm": lambda: ops._moe_C.grouped_topk(logits, n_group, topk_group, top_k, True, scale, bias, 1),
        "sgl": lambda: ops.sgl_kernel.moe_fused_gate(logits, bias, n_group, topk_group, top_k, 0, scale, True),
    }
