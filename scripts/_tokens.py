"""Whether an engine writes float32's tokens as far as BF16 can tell them apart, and how far its logits are from float32's.

All logits are of the same positions of the same text (each engine is given the text's words, not its own, so that one other word
does not change what follows). `reference` is the engine without plugins, `exact` is float32.

    error of a position   the largest difference from float32 among float32's CONTENDERS best words
    allowed               the largest such error of the reference: what BF16 alone does to this model
    decided               a position where float32's best word leads the next by more than twice `allowed`: as far as an engine
                          errs no more than the reference, its word is float32's there

An engine in BF16 passes if it has float32's word at every decided position and its logits are at most BF16_RATIO times as far from
float32's as the reference's. One whose experts are multiplied in FP8 rounds more: its logits are to be within FP8_ERROR of
float32's, as the norm of the difference over the norm, and its word to be float32's at a share of FP8_TOP1 of all positions and at
every decided one. `ties` is the proof for each other word: how little float32 prefers its own, beside the errors there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["BF16_RATIO", "FP8_ERROR", "FP8_TOP1", "contender_errors", "judge", "lead", "relative", "ties"]

CONTENDERS = 8
BF16_RATIO, FP8_ERROR, FP8_TOP1 = 1.25, 0.05, 0.95


def judge(exact: Tensor, reference: Tensor, found: Tensor, fp8: bool = False) -> dict[str, Any]:
    """Logits [N, V], all three -> the figures above, and whether they are `good`."""
    allowed = float(contender_errors(exact, reference).max())
    word, decided = found.argmax(-1), lead(exact) > 2 * allowed
    right = word == exact.argmax(-1)
    error, least = relative(found, exact), relative(reference, exact)
    close = error <= FP8_ERROR and float(right.double().mean()) >= FP8_TOP1 if fp8 else error <= BF16_RATIO * least
    return {
        "of": len(exact), "equal_tokens": int((word == reference.argmax(-1)).sum()), "float32_tokens": int(right.sum()),
        "decided": int(decided.sum()), "decided_others": int((decided & ~right).sum()), "allowed": round(allowed, 4),
        "error": round(error, 5), "error_of_reference": round(least, 5), "good": close and bool(right[decided].all()),
    }  # fmt: skip


def ties(exact: Tensor, reference: Tensor, found: Tensor) -> list[dict[str, float]]:
    """Of each position where `reference` and `found` have other words: how much float32 prefers its own to each, and the errors."""
    words = [logits.argmax(-1, keepdim=True) for logits in (reference, found)]
    best, errors = exact.max(-1).values, [contender_errors(exact, logits) for logits in (reference, found)]
    behind = [best - exact.gather(1, word).squeeze(1) for word in words]
    columns = {"behind_reference": behind[0], "behind": behind[1], "error_of_reference": errors[0], "error": errors[1]}
    places = (words[0] != words[1]).squeeze(1).nonzero().flatten().tolist()
    return [{"position": place} | {name: round(float(values[place]), 4) for name, values in columns.items()} for place in places]


def contender_errors(exact: Tensor, found: Tensor) -> Tensor:
    """[N, V], both -> [N]"""
    best = exact.topk(min(CONTENDERS, exact.shape[-1]), dim=-1).indices
    return (found - exact).abs().gather(1, best).amax(-1)


def lead(exact: Tensor) -> Tensor:
    """[N, V] -> how far the best is ahead of the next [N]"""
    best = exact.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
