"""Compares a compiled engine with the eager graph on random tokens: `python -m pipeline.engines.torch.selfcheck FOLDER RUNTIME`.

Three steps that between them use both forms, all page sizes of rows, padding, and the cache that the step before wrote.
The figure is the norm of the difference over the norm of the logits. Compiled float32 lies at 1e-6; in bfloat16 a token
may be routed to another expert when two score alike, which no summation order can avoid, so its limit is wide. So is that of an FP8
cache, in which values between two codes become one or the other.

Plugins compile their kernels at first use, some for a number of tokens: on CUDA every class of step is run once, so that the
folder that the engine carries (`$R1_PIPELINE_CACHE`, set by the build) has them all.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.engines.torch.export import load_decoder, new_caches

__all__ = ["LIMITS", "compare", "import_runtime", "steps", "warm"]

FP8 = "float8_e4m3fn"
LIMITS = {("float32", "float32"): 1e-3, ("float32", FP8): 0.02, ("bfloat16", "bfloat16"): 0.15, ("bfloat16", FP8): 0.15}
"""By the types of the activations and of the cache."""


def import_runtime(path: Path) -> ModuleType:
    """The runtime as a module, from its file."""
    spec = importlib.util.spec_from_file_location("runtime", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps(info: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, positions and pages: a long chunk of one row, a short chunk after it, then one token of every row."""
    random = torch.Generator().manual_seed(0)
    rows, room, size = info["max_batch_size"], info["max_seq_len"], info["page_size"]
    long = max(min(info["prefill_chunk"], room - 2), 1)
    short = max(min(min(info["expanded_from"]) - 1, info["prefill_chunk"], room - long - 1), 0)
    table = torch.arange(1, info["num_pages"]).view(rows, -1)

    def chunk(start: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        pages = table[:1, : -(-(start + length) // size)]
        return torch.randint(0, info["vocab_size"], (1, length), generator=random), torch.arange(start, start + length)[None], pages

    chunks = [chunk(0, long), *([chunk(long, short)] if short else [])]
    done = long + short
    positions = torch.tensor([[done]] + [[0]] * (rows - 1))
    tokens = torch.randint(0, info["vocab_size"], (rows, 1), generator=random)
    return [*chunks, (tokens, positions, table[:, : done // size + 1])]


@torch.inference_mode()
def compare(folder: Path, runtime: Path) -> list[float]:
    """Relative error of each step's logits, then of what the steps have written into the cache."""
    device = json.loads((folder / "engine.json").read_text(encoding="utf-8"))["device"]
    weights = load_file(folder / "weights.safetensors", device=device)
    engine = import_runtime(runtime).CompiledEngine.load(folder, weights)
    info = engine.info
    decoders = {form: load_decoder(folder, form, weights) for form in info["forms"]}
    caches, errors = new_caches(info), []
    for tokens, positions, pages in steps(info):
        compiled = engine.step(tokens, positions, pages).double()
        inputs = (value.to(info["device"]) for value in (tokens, positions, pages))
        eager = decoders[engine.form_of(*tokens.shape, pages.shape[1])](*inputs, caches).double()
        errors.append(((compiled - eager).norm() / eager.norm()).item())
    errors.append(apart(engine.caches, caches))
    if info["device"] == "cuda" and info["plugins"]["taken"]:
        warm(engine)
    return errors


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Relative error of caches [num_pages, page_size, D], a layer at a time: they may fill half the memory. Page 0 is padding's."""
    norms = torch.zeros(2, dtype=torch.float64)
    for one, other in zip(found, wanted, strict=True):
        other = other[1:].float()
        norms += torch.stack([(one[1:].float() - other).norm(), other.norm()]).double().cpu() ** 2
    return float((norms[0] / norms[1]).sqrt())


def warm(engine: Any) -> None:
    """Prefill and decode steps of every power of two, of one more, and of the most; up to 64 tokens of every eight (router_gemm's).

    Chunks are a row's first, and its last: in how many parts attention is computed, each with kernels of its own, follows from the
    context.
    """
    info = engine.info
    table = torch.arange(1, info["num_pages"]).view(info["max_batch_size"], -1)

    def sizes(most: int) -> list[int]:
        powers, eights = [1 << k for k in range(most.bit_length())], range(8, min(most, 64) + 1, 8)
        return sorted({min(size, most) for power in powers for size in (power, power + 1, most)} | {*eights})

    for length in sizes(info["prefill_chunk"]):
        for end in sorted({length, info["max_seq_len"]}):
            pages = table[:1, : -(-end // info["page_size"])]
            engine.step(torch.zeros(1, length, dtype=torch.int64), torch.arange(end - length, end)[None], pages)
    for rows in sizes(info["max_batch_size"]):
        engine.step(torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(rows, 1, dtype=torch.int64), table[:rows, :1])


def main(folder: Path, runtime: Path) -> None:
    """Print one sentence, or exit with one."""
    info = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
    limit = LIMITS[info["dtype"], info["kv_dtype"]]
    errors = compare(folder, runtime)
    text = f"compiled and eager logits differ by {max(errors):.1e} of their norm (limit {limit:g})"
    if not all(error <= limit for error in errors):
        sys.exit(f"{text}: by step {[f'{error:.1e}' for error in errors]}; report it with the versions of torch and the compiler.")
    print(json.dumps(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
