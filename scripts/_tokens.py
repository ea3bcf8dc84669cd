"""Whether an engine writes float32's words as far as rounding can tell them apart, and how far its logits are from float32's.

All logits are of the same positions of the same text (each engine is given the text's words, not its own, so that one other word
does not change what follows). `exact` is float32; the references are without plugins, the engine first, then its graph uncompiled:
it rounds where fused kernels do not, and both are what BF16 alone does.

    error of a position   the largest difference from float32 among float32's CONTENDERS best words
    allowed there         in BF16 the larger of the references' errors at that position; where experts are multiplied in FP8, or
                          the cache is in FP8, FP8_ERROR of the root mean square of float32's logits
    wrong                 a word that float32 puts further behind its own than twice what is allowed. A reference has none: where
                          it prefers another contender, it errs by half of what lies between them, at least

An engine passes if its logits are near float32's (BF16: at most BF16_RATIO times as far as the references'; FP8: within FP8_ERROR,
as the norm of the difference over the norm) and at most RARE of its words are wrong: a token may be routed to another expert where
two score alike, in one engine here and in another there. `others` is the proof for each other word: how far float32 puts it behind
its own, beside the errors there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["BF16_RATIO", "FP8_ERROR", "RARE", "contender_errors", "judge", "others", "relative"]

CONTENDERS = 8
BF16_RATIO, FP8_ERROR, RARE = 1.25, 0.05, 0.005


def judge(exact: Tensor, references: Sequence[Tensor], found: Tensor, fp8: bool = False) -> dict[str, Any]:
    """Logits [N, V], all of them -> the figures above, `sure` (positions where the next best word would be wrong), and `good`.

    `equal_tokens` are those of the first reference.
    """
    errors = torch.stack([contender_errors(exact, each) for each in references]).amax(0)
    allowed = FP8_ERROR * exact.square().mean(-1).sqrt() if fp8 else errors
    second, word = exact.topk(2).indices[:, 1], found.argmax(-1)
    wrong = int((behind(exact, word) > 2 * allowed).sum())
    error, least = relative(found, exact), max(relative(each, exact) for each in references)
    near = error <= (FP8_ERROR if fp8 else BF16_RATIO * least)
    return {
        "of": len(exact), "equal_tokens": int((word == references[0].argmax(-1)).sum()),
        "float32_tokens": int((word == exact.argmax(-1)).sum()), "sure": int((behind(exact, second) > 2 * allowed).sum()),
        "wrong": wrong, "error": round(error, 5), "error_of_references": round(least, 5),
        "good": near and wrong <= RARE * len(exact),
    }  # fmt: skip


def others(exact: Tensor, reference: Tensor, found: Tensor) -> list[dict[str, float]]:
    """Of each position where `reference` and `found` have other words: how far float32 puts each behind its own, and the errors."""
    columns: dict[str, Tensor] = {}
    for name, logits in (("_reference", reference), ("", found)):
        columns[f"behind{name}"] = behind(exact, logits.argmax(-1))
        columns[f"error{name}"] = contender_errors(exact, logits)
    places = (reference.argmax(-1) != found.argmax(-1)).nonzero().flatten().tolist()
    return [{"position": place} | {name: round(float(values[place]), 4) for name, values in columns.items()} for place in places]


def behind(exact: Tensor, word: Tensor) -> Tensor:
    """[N, V], a word of each position [N] -> how far float32 puts it behind its own [N]"""
    return exact.max(-1).values - exact.gather(1, word.unsqueeze(1)).squeeze(1)


def contender_errors(exact: Tensor, found: Tensor) -> Tensor:
    """[N, V], both -> [N]"""
    best = exact.topk(min(CONTENDERS, exact.shape[-1]), dim=-1).indices
    return (found - exact).abs().gather(1, best).amax(-1)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
