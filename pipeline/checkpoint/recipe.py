"""Which format each parameter gets: the content of `precision.json`, applied to names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.layout import Place
from pipeline.checkpoint.source import Entry, read_json
from pipeline.core.errors import ConfigError
from pipeline.formats import Format, get_format
from pipeline.formats.int4_awq import Int4Awq
from pipeline.formats.numerics import Array
from pipeline.formats.nvfp4 import Nvfp4
from pipeline.layouts import Form, Written, get_layout, stored_as

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
    layout: str = "modelopt"
    """How the formats are stored: a name of `pipeline.layouts`."""

    @classmethod
    def from_file(cls, file: Path) -> Recipe:
        """Read what `plan` decided."""
        return cls.from_table(read_json(file))

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Recipe:
        """From {"formats": {class: format}, "kv_cache", "input_scale"}, and where they are not the default, the options."""
        formats = dict(table["formats"])
        if missing := [kind for kind in QUANTISED_CLASSES if kind not in formats]:
            raise ConfigError(f"precision.json gives no format for {', '.join(missing)}: run plan again.")
        options = {name: str(table[name]) for name in ("nvfp4_scale_search", "nvfp4_mode", "layout") if name in table}
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

    def form_of(self, target: Format) -> Form:
        """How a format is stored; refuses one for which the layout has no form."""
        return stored_as(get_layout(self.layout), target)

    def searching(self, target: Format) -> Format:
        """The format, with the search for block scales where it has them, and scales as loaders of the layout keep them."""
        if isinstance(target, Nvfp4):
            return replace(target, search=self.nvfp4_scale_search)
        if isinstance(target, Int4Awq) and (rounding := get_layout(self.layout).scale_rounding):
            return replace(target, scale_rounding=rounding)
        return target

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
        target = self.format_of(entry.place)
        if entry.format is not target or entry.name.endswith("e_score_correction_bias"):
            return False
        if not entry.quantised:
            return not entry.place.linear or entry.main.dtype == "BF16"
        return self._as_stored(entry, target)

    def relays(self, entry: Entry) -> bool:
        """Whether codes and scales are taken over, but named and packed by another layout."""
        return entry.quantised and entry.format is self.format_of(entry.place)

    def completed(self, item: Format, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The format's tensors of such a weight; an activation scale that the source lacks is the recipe's."""
        if "input_scale" not in {output.suffix for output in item.outputs("", (128, 128))}:
            return dict(tensors)
        return {"input_scale": np.array(self.input_scale, np.float32)} | dict(tensors)

    def tables(self, entries: Iterable[Entry]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """What config.json (`quantization_config`) and hf_quant_config.json must say of what was written."""
        matrices = (entry for entry in entries if entry.name.endswith(".weight") and len(entry.shape) == 2)
        return get_layout(self.layout).tables([self._written(entry) for entry in matrices], self.kv_cache)

    def _written(self, entry: Entry) -> Written:
        """Formats may be stored alike: then it is the one that was asked for."""
        asked = self.format_of(entry.place)
        item = asked if asked.quant_algo is not None and self._as_stored(entry, asked) else entry.format
        return Written(entry.place.module, item if entry.quantised else None, entry.place.linear, entry.place.kind == "mtp")

    def _as_stored(self, entry: Entry, item: Format) -> bool:
        """Whether the entry's tensors are those that the layout stores for the format."""
        wanted = self.form_of(item).outputs(entry.place.module, entry.shape)
        stored = {(suffix, info.dtype, info.shape) for suffix, info in entry.tensors.items()}
        return stored == {(output.suffix, output.dtype, output.shape) for output in wanted}
