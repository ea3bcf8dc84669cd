"""Which precision, where the recipe is not the last word.

Weights are in FP4 only where the chip multiplies it (SM100, SM103), or as W4A16, which says so in its name; the rule
`format` refuses the rest. The cache and MLA are in FP8 unless quant.kv_dtype says BF16. Where accuracy counts more
(quant.accuracy_sensitive, for instance after `verify` refused a recipe), the cache is BF16 and so are the weights, if the
machine holds them; if not, they keep the FP8 blocks in which DeepSeek published them, which `convert` copies bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from pipeline.config.schema import Config, QuantConfig
from pipeline.models.arch import Arch
from pipeline.planner.params import LINEAR_CLASSES, stored_bytes
from pipeline.share import share

__all__ = ["Precision", "num_gpus", "precision_of", "recipe"]

UNQUANTISED = ("embed", "lm_head", "norm", "router")
ROOM = 0.75
"""Share of the memory that weights may take, so that engine and cache find room."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Formats by module class, and of the cache."""

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
        return Precision(asked, quant.kv_dtype)
    plain = dict.fromkeys((*UNQUANTISED, *classes), "bf16")
    size, memory = sum(stored_bytes(arch, plain).values()), config.hw.memory_bytes * num_gpus(config)
    if size <= ROOM * memory or "fp8_block" not in config.hw.weight_formats:
        return Precision(plain, "bf16", "quant.accuracy_sensitive: weights and cache in BF16.")
    note = (
        f"quant.accuracy_sensitive: BF16 weights take {size / 1e9:,.0f} GB, more than {ROOM:.0%} of the {memory / 1e9:,.0f} GB "
        f"here, so the published FP8 blocks are kept, bit by bit; the cache is BF16."
    )
    return Precision(plain | dict.fromkeys(classes, "fp8_block"), "bf16", note)


def num_gpus(config: Config) -> int:
    """GPUs that are paid for: those of all nodes, or of the one instance that `parallel.tp` asks for."""
    hw, asked = config.hw, config.parallel
    return asked.tp * asked.pp if asked.tp else hw.num_devices * hw.num_nodes


def recipe(name: str) -> QuantConfig:
    """A recipe that ships with the pipeline."""
    return QuantConfig(**yaml.safe_load((share("conf") / "quant" / f"{name}.yaml").read_text(encoding="utf-8")))
