"""What the headers of a checkpoint's files say of its weights, so that a plan counts what is there, not what config.json promises.

Every weight that is stored under its Hugging Face name in a plain type (FP8, BF16, ...) must have the shape that config.json
gives it; packed ones are `convert`'s to unpack. R1's 163 headers take half a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.models.arch import Arch

__all__ = ["Headers", "read_headers"]

PLAIN = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Types of safetensors that store one weight an element."""


@dataclass(frozen=True, slots=True)
class Headers:
    """What is stored."""

    tensors: int
    bytes: int
    """Of all tensors, scales included."""
    parameters: int | None
    """Of the main model; None where some are packed, or have other names."""
    drafts: bool
    """Whether an MTP layer is stored."""

    def plain(self) -> dict[str, Any]:
        """For the report."""
        return {"tensors": self.tensors, "bytes": self.bytes, "parameters": self.parameters, "mtp_layer": self.drafts}


def read_headers(folder: Path, arch: Arch) -> Headers | None:
    """None where the folder holds no weights yet.

    Raises:
        ConfigError: if a file cannot be read, or a weight has another shape than config.json gives it.
    """
    from pipeline.checkpoint.layout import parameters
    from pipeline.checkpoint.reader import raw_header, uncollected

    with uncollected():
        found = [raw_header(file) for file in sorted(folder.glob("*.safetensors"))]
    stored = {name: entry for header in found for name, entry in header.items() if name != "__metadata__"}
    if not stored:
        return None
    last, counted = f"model.layers.{arch.num_hidden_layers}.", 0
    for name, shape in parameters(arch):
        entry = stored.get(name)
        if entry and entry.get("dtype") in PLAIN and tuple(entry["shape"]) != shape:
            other = f"and config.json there makes it {list(shape)}: they are not of one model"
            raise ConfigError(f"{name} is {entry['shape']} in {folder}, {other}.")
        if not name.startswith(last):
            counted = -1 if counted < 0 or not entry or entry.get("dtype") not in PLAIN else counted + prod(shape)
    sizes = (entry["data_offsets"] for entry in stored.values())
    return Headers(
        tensors=len(stored),
        bytes=sum(stop - start for start, stop in sizes),
        parameters=counted if counted > 0 else None,
        drafts=any(name.startswith(last) for name in stored),
    )
