"""Which precision, where the recipe is not the last word.

Weights are in FP4 only where the chip multiplies it (SM100, SM103), or as W4A16, which says so in its name; the rule
`format` refuses the rest. The cache and MLA are in FP8 unless quant.kv_dtype says BF16. Where accuracy counts more
(quant.accuracy_sensitive, which is also what `fallback` makes of a recipe that `verify` refused), the cache is BF16 and so
are the weights, if the machine holds them; if not, they keep the FP8 blocks in which DeepSeek published them, which `convert`
copies bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import yaml

from pipeline.config.schema import Config, QuantConfig
from pipeline.core.errors import GateError
from pipeline.models.arch import Arch
from pipeline.planner.params import LINEAR_CLASSES, stored_bytes
from pipeline.share import share

__all__ = ["MOST_RANKS", "Precision", "fallback", "instances_on", "num_gpus", "one_instance", "precision_of", "recipe"]

UNQUANTISED = ("embed", "lm_head", "norm", "router")
ROOM = 0.75
"""Share of the memory that weights may take, so that engine and cache find room."""
MOST_RANKS = 64
"""Ranks of one instance; published instances of R1 have up to 64 (wide EP on GB200)."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Formats by module class, and of the cache."""

    recipe: str
    formats: dict[str, str]
    kv_format: str
    note: str = ""
    """Why they are not the recipe's."""


def precision_of(config: Config, arch: Arch) -> Precision:
    """The recipe's formats, or those that lose nothing where accuracy counts more."""
    quant = config.quant
    classes = (*LINEAR_CLASSES, "mtp")
    asked = dict.fromkeys(UNQUANTISED, "bf16") | {cls: getattr(quant, cls) for cls in classes}
    if not quant.accuracy_sensitive:
        return Precision(quant.name, asked, quant.kv_dtype)
    plain = dict.fromkeys((*UNQUANTISED, *classes), "bf16")
    size, memory = sum(stored_bytes(arch, plain).values()), config.hw.memory_bytes * num_gpus(config)
    if size <= ROOM * memory or "fp8_block" not in config.hw.weight_formats:
        return Precision("bf16", plain, "bf16", f"{_why(quant)}: weights and cache in BF16.")
    note = (
        f"{_why(quant)}: BF16 weights take {size / 1e9:,.0f} GB, more than {ROOM:.0%} of the {memory / 1e9:,.0f} GB "
        f"here, so the published FP8 blocks are kept, bit by bit; the cache is BF16."
    )
    return Precision("fp8_block", plain | dict.fromkeys(classes, "fp8_block"), "bf16", note)


def _why(quant: QuantConfig) -> str:
    """Why accuracy counts more than the recipe."""
    return f"verify refused quant={quant.name} ({quant.refused})" if quant.refused else "quant.accuracy_sensitive"


def fallback(config: Config, error: GateError) -> Config | None:
    """What to build instead of a recipe that `verify` refused; None where nothing, or nothing unless the user says so."""
    quant = config.quant
    if config.verify.on_failure != "fallback" or error.damage or quant.accuracy_sensitive:
        return None
    reasons = " ".join(f"{reason.partition(';')[0].removesuffix('.')}." for reason in error.reasons)
    return replace(config, quant=replace(quant, accuracy_sensitive=True, refused=reasons))


def one_instance(config: Config) -> bool:
    """Whether `parallel.tp` means one instance and no more: no total is asked for that could take several."""
    rates = config.slo.tokens_per_second or config.workload.requests_per_second
    return bool(config.parallel.tp and config.hw.num_nodes and not rates)


def num_gpus(config: Config, nodes: int | None = None) -> int:
    """GPUs that are paid for: those of `nodes` nodes (None: of all), or of the one instance that is asked for."""
    hw, asked = config.hw, config.parallel
    if one_instance(config):
        return (asked.tp or 1) * asked.pp
    nodes = nodes or hw.num_nodes
    return hw.num_devices * nodes if nodes else max(MOST_RANKS, hw.num_devices)


def instances_on(config: Config, ranks: int, nodes: int) -> int:
    """Instances of `ranks` GPUs on `nodes` nodes; none straddles two that one could hold."""
    if one_instance(config):
        return 1
    per_node = config.hw.num_devices
    return nodes * (per_node // ranks) if ranks <= per_node else nodes // -(-ranks // per_node)


def recipe(name: str) -> QuantConfig:
    """A recipe that ships with the pipeline."""
    return QuantConfig(**yaml.safe_load((share("conf") / "quant" / f"{name}.yaml").read_text(encoding="utf-8")))
