"""Which layers and projections lost the most: from the weights' errors alone, and without a model.

The damage of a group is the mean of (relative error)^2 over its weights, so a large matrix counts for more than a small
one, and what was kept byte for byte counts as none. -10 log10 of it is an SQNR in dB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10

from pipeline.verify.sample import projection
from pipeline.verify.weights import FLOOR_DB, TensorError

__all__ = ["Damage", "by_layer", "by_projection", "groups"]


@dataclass(frozen=True, slots=True)
class Damage:
    """Of one group of weights."""

    name: str
    weights: int
    """Elements compared."""
    relative: float
    """Mean squared relative error."""
    worst: str
    """The tensor with the lowest SQNR."""

    @property
    def sqnr_db(self) -> float | None:
        """None: exact."""
        return round(-10 * log10(self.relative), 2) if self.relative > 0 else None


def by_layer(errors: Sequence[TensorError]) -> list[Damage]:
    """Layers, the most damaged first; embedding, head and final norm are no layer."""
    return _rank(errors, lambda error: None if error.layer is None else f"model.layers.{error.layer}")


def by_projection(errors: Sequence[TensorError]) -> list[Damage]:
    """Projections over all layers (experts together), the most damaged first."""
    return _rank(errors, lambda error: ("mtp: " if error.kind == "mtp" else "") + projection(error.name).removesuffix(".weight"))


def groups(errors: Sequence[TensorError]) -> dict[str, list[str]]:
    """What changed, by layer and by class: the tensors' names. MTP layers do not take part in the main model's logits."""
    found: dict[str, list[str]] = {}
    changed = [error for error in errors if error.sqnr_db is not None and error.kind != "mtp"]
    for error in sorted(changed, key=lambda error: (-1 if error.layer is None else error.layer, error.name)):
        if error.layer is not None:
            found.setdefault(f"layer {error.layer}", []).append(error.name)
    for error in sorted(changed, key=lambda error: (error.kind, error.name)):
        found.setdefault(error.kind, []).append(error.name)
    return found


def _rank(errors: Sequence[TensorError], group_of: Callable[[TensorError], str | None]) -> list[Damage]:
    groups: dict[str, list[TensorError]] = {}
    for error in errors:
        if (group := group_of(error)) is not None:
            groups.setdefault(group, []).append(error)
    ranked = [_damage(name, group) for name, group in groups.items()]
    return sorted(ranked, key=lambda damage: (-damage.relative, damage.name))


def _damage(name: str, group: list[TensorError]) -> Damage:
    weights = sum(error.elements for error in group)
    squares = sum(error.elements * _squared(error) for error in group)
    worst = min(group, key=lambda error: (error.rank, error.name))
    return Damage(name, weights, float(f"{squares / max(1, weights):.4g}"), worst.name)


def _squared(error: TensorError) -> float:
    """Relative error squared; where it is not finite, that of the floor."""
    return 10 ** (-FLOOR_DB / 10) if error.relative_l2 is None else error.relative_l2**2
