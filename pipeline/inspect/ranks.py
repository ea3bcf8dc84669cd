"""Bytes of the weights that one rank loads, with the planner's own rules of who holds what.

It is the stored bytes that are split: no copies that an engine makes, no cache. An MTP layer's own embedding and head
are left out where they repeat the main model's, since engines share those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.checkpoint.layout import classify
from pipeline.core.errors import ConfigError
from pipeline.inspect.contents import NO_LAYERS, Contents, Module
from pipeline.planner.memory import Layout, Shares
from pipeline.planner.params import CLASSES, Part

__all__ = ["SETTINGS", "RankOptions", "rank_bytes"]

SETTINGS = ("tp", "ep", "attention_dp", "gpus_per_node")


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How the ranks share the work."""

    layout: Layout
    gpus_per_node: int = 8

    @classmethod
    def parse(cls, words: Iterable[str]) -> RankOptions | None:
        """From `tp=8 ep=8 attention_dp=true`; None without any."""
        values = dict(word.split("=", 1) for word in words)
        if unknown := sorted(values.keys() - set(SETTINGS)):
            raise ConfigError(f"inspect does not know {unknown[0]}: it takes a folder and {', '.join(SETTINGS)}.")
        if not values:
            return None
        tp = _number(values, "tp", 1)
        ep = _number(values, "ep", 1)
        if tp % ep:
            raise ConfigError(f"ep={ep} does not divide tp={tp}: expert parallelism spreads experts over the same ranks.")
        adp = values.get("attention_dp", "false").lower()
        if adp not in ("true", "false"):
            raise ConfigError(f"attention_dp={adp} is neither true nor false.")
        return cls(Layout(tp, ep, adp == "true"), _number(values, "gpus_per_node", 8))


def _number(values: dict[str, str], name: str, default: int) -> int:
    text = values.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}={text} is no number from 1 on.")
    return int(text)


def rank_bytes(contents: Contents, options: RankOptions, repeated: set[str]) -> dict[tuple[str, str], int]:
    """Bytes of the fullest rank, by class and format; `repeated` modules are loaded once only."""
    shares = Shares(options.layout, {}, options.gpus_per_node)
    experts = int(contents.config.get("n_routed_experts") or 1)
    sums: dict[tuple[str, str], float] = {}
    for module in contents.modules.values():
        key = (module.place.kind, module.format)
        size = 0.0 if module.name in repeated else _share(module, shares, options.layout, experts)
        sums[key] = sums.get(key, 0.0) + size
    return {key: round(size) for key, size in sums.items()}


def _share(module: Module, shares: Shares, layout: Layout, experts: int) -> float:
    kind = classify(module.name, NO_LAYERS).kind  # of an MTP layer's module as if it were in the main model
    if kind == "routed_experts":
        return module.num_bytes / experts * -(-experts // layout.ep) / layout.moe_tp
    rows, columns = module.shape if module.matrix else (1, 1)
    part = Part(kind if kind in CLASSES else "mtp", module.name.rpartition(".")[2], rows, columns)
    return shares.share(part, module.format, module.num_bytes)
