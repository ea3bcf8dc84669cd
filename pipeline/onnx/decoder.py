"""The example of a factory: one step of the decoder of engine=torch, from any checkpoint that convert wrote or reads.

    python -m pipeline onnx pipeline.onnx.decoder:absorbed out=DIR targets=[120] checkpoint=FOLDER

ONNX writes nothing in place, so the caches go in as `past` and come out as `present`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from pipeline.checkpoint import dequantized
from pipeline.config.load import load
from pipeline.core.jsonio import write_json
from pipeline.engines.torch.build import describe, stored_as
from pipeline.engines.torch.export import load_decoder, new_caches
from pipeline.engines.torch.graph import Decoder, Form
from pipeline.engines.torch.weights import write_weights
from pipeline.models.arch import Arch

__all__ = ["Step", "absorbed", "expanded"]

Source = tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]


class Step(nn.Module):
    """One step whose caches are values."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, positions: Tensor, pages: Tensor, past: list[Tensor]) -> dict[str, Any]:
        """As `Decoder`, with the caches that it writes handed out."""
        present = [cache.clone() for cache in past]
        return {"logits": self.decoder(tokens, positions, pages, present), "present": present}


def absorbed(checkpoint: str = "", max_seq_len: str = "128", max_batch_size: str = "4", prefill_chunk: str = "32") -> Source:
    """Decode and short chunks, of several rows."""
    return _source("absorbed", checkpoint, max_seq_len, max_batch_size, prefill_chunk)


def expanded(checkpoint: str = "", max_seq_len: str = "128", max_batch_size: str = "4", prefill_chunk: str = "32") -> Source:
    """Chunks of one row."""
    return _source("expanded", checkpoint, max_seq_len, max_batch_size, prefill_chunk)


def _source(form: Form, checkpoint: str, *sizes: str) -> Source:
    folder = Path(checkpoint) if checkpoint else Path(__file__).parents[1] / "data" / "tiny_r1"
    info = _info(folder, *sizes)
    with tempfile.TemporaryDirectory() as scratch:
        write_json(Path(scratch) / "engine.json", info)
        write_weights(dequantized(folder), Arch.from_dir(folder), stored_as(info["weights"]), Path(scratch) / "weights.safetensors")
        step = Step(load_decoder(Path(scratch), form))
    most = info["max_batch_size"] if form == "absorbed" else 1, info["prefill_chunk"], -(-info["max_seq_len"] // info["page_size"])
    rows, count, width = (min(size, limit) for size, limit in zip((2, 5, 2), most, strict=True))
    dims = [Dim(name, min=1, max=limit) if limit > 1 else None for name, limit in zip(("B", "T", "P"), most, strict=True)]
    tokens = torch.arange(3, 3 + rows * count).view(rows, count) % info["vocab_size"]
    pages = 1 + torch.arange(rows * width).view(rows, width)
    args = tokens, torch.arange(count).repeat(rows, 1), pages, new_caches(info)
    shapes = {0: dims[0], 1: dims[1]}, {0: dims[0], 1: dims[1]}, {0: dims[0], 1: dims[2]}, [None] * info["num_layers"]
    return step, args, shapes


def _info(folder: Path, max_seq_len: str, max_batch_size: str, prefill_chunk: str) -> dict[str, Any]:
    """As the build of engine=torch describes it, in float32 on the CPU."""
    words = (f"max_seq_len={max_seq_len}", f"max_batch_size={max_batch_size}", f"prefill_chunk={prefill_chunk}")
    settings = load(["+hw=cpu", "engine=torch", "engine.torch.compiler=export", *(f"engine.torch.{word}" for word in words)])
    assert settings.engine.torch is not None
    return describe(Arch.from_dir(folder), settings.engine.torch, folder)
