"""Which format each parameter gets: the content of `precision.json`, applied to names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import Place
from pipeline.checkpoint.source import Entry, read_json
from pipeline.core.errors import ConfigError
from pipeline.formats import Format, get_format
from pipeline.formats.nvfp4 import Nvfp4

__all__ = ["QUANTISED_CLASSES", "Recipe"]

QUANTISED_CLASSES = ("attention", "o_proj", "dense_mlp", "shared_experts", "routed_experts", "mtp")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A format for each module class. What is not linear is kept as it is."""

    formats: dict[str, str]
    kv_cache: str
    input_scale: float
    nvfp4_scale_search: str = "amax"
    nvfp4_mode: str = "modelopt"

    @classmethod
    def from_file(cls, file: Path) -> Recipe:
        """Read what `plan` decided."""
        return cls.from_table(read_json(file))

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Recipe:
        """From {"formats": {class: format}, "kv_cache", "input_scale"} and, where not the default, the options of NVFP4."""
        formats = dict(table["formats"])
        if missing := [kind for kind in QUANTISED_CLASSES if kind not in formats]:
            raise ConfigError(f"precision.json gives no format for {', '.join(missing)}: run plan again.")
        options = {name: str(table[name]) for name in ("nvfp4_scale_search", "nvfp4_mode") if name in table}
        return cls(formats, str(table["kv_cache"]), float(table["input_scale"]), **options)

    def format_of(self, place: Place) -> Format:
        """The format of a linear layer.

        Runtimes split kv_b_proj by heads and fold it into the attention, for which they need BF16, or FP8 blocks,
        which they dequantise on load; with any other scales they would read bare codes. So it stays BF16 then.
        """
        name = self.formats[place.kind] if place.linear else "bf16"
        if place.module.endswith(".kv_b_proj") and name != "fp8_block":
            name = "bf16"
        return get_format(name)

    def searching(self, target: Format) -> Format:
        """The format, with the search for block scales where it has them."""
        return replace(target, search=self.nvfp4_scale_search) if isinstance(target, Nvfp4) else target

    def exact(self, target: Format) -> bool:
        """Whether a weight is quantised from float32 instead of BF16."""
        return self.nvfp4_mode == "exact" and isinstance(target, Nvfp4)

    @property
    def rounding(self) -> str:
        """What happens before a weight is quantised, for people."""
        text = "a weight that changes format is rounded to bf16 first (as ModelOpt does), then quantised"
        return text if self.nvfp4_mode == "modelopt" else f"{text}; NVFP4 formats are quantised from exact float32"

    def keeps(self, entry: Entry) -> bool:
        """Whether the stored bytes are taken over unchanged."""
        if entry.format is not self.format_of(entry.place) or entry.name.endswith("e_score_correction_bias"):
            return False
        return entry.quantised or not entry.place.linear or entry.main.dtype == "BF16"
