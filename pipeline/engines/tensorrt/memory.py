"""Memory that building one engine takes, from the bytes of its weights: what `plan` predicts, and what the build looks at first.

TensorRT copies constants, some formats more than once, and the files of weights are mapped and read through, so that their pages
count while there is room. Fitted to `scripts/bench_tensorrt_build.py` (TensorRT-RTX 1.7.1, `benchmarks/tensorrt_build_*.json`):
R1's layers of all kinds with 4, 16 and 32 experts, 1.0 to 10.7 GB; every row is met within 8 %, those with 32 within 1 %.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.core.memory import available_memory, whole_memory
from pipeline.engines.tensorrt.network.spec import Spec

if TYPE_CHECKING:
    from pipeline.checkpoint import Entry

__all__ = ["FOLDED", "held_as", "peak", "refuse_small", "stored_in", "too_large_to_compare"]

EXPERT = re.compile(r"\.experts\.(\d+)\.")
BASE, LAYER = 0.42e9, 0.04e9
"""The process with its libraries and the compiler at one decoder layer, and each further layer of the same network."""
FOLDED = "folded"
"""Kind of what kv_b_proj takes in BF16, in which attention folds it in; held while a network is defined, as inputs, too."""
COPIES = {
    "bf16": 2.0, "experts in bf16": 2.66, "fp8": 2.06, "fp8_channel": 2.06, "fp8_block": 2.95, "nvfp4": 2.05, "w4a16_nvfp4": 2.65,
    "int4_awq": 3.6,
}  # fmt: skip
"""Kind of weights -> resident bytes a stored byte, one of them being pages of a mapped file."""
WIDENED = 8.0
"""The same of formats that engines do not have, which become BF16."""
COMPARED_BYTES = 16
"""Of memory for each parameter of a model that is compared, for the reference and the interpreted networks: two layers of R1's
widths with 8 experts, 1.2e9 parameters, took 16.1 GiB."""


def held_as(fmt: str, routed: bool) -> str:
    """The kind, for `COPIES`: stacks of experts in BF16 are turned over, other matrices are not."""
    return "experts in bf16" if fmt == "bf16" and routed else fmt


def peak(stored: Mapping[str, float], layers: int, weights: str) -> int:
    """Resident bytes at most, of an engine with so many stored bytes of each kind; `weights` is engine.tensorrt.weights."""
    compiled = BASE + LAYER * (layers - 1)
    if weights == "inputs":
        return int(compiled + stored.get(FOLDED, 0))
    return int(compiled + sum(COPIES.get(kind, WIDENED) * size for kind, size in stored.items() if kind != FOLDED))


def stored_in(entries: Iterable[Entry], specs: Mapping[str, Spec]) -> dict[str, dict[str, float]]:
    """Engine -> bytes of its weights by kind. Heads that a tensor-parallel rank does not have are counted with its own."""
    sizes: defaultdict[tuple[str | int, int | None], Counter[str]] = defaultdict(Counter)
    for entry in entries:
        expert = EXPERT.search(entry.name)
        where = entry.place.kind if entry.place.layer is None else entry.place.layer
        size = sizes[where, int(expert[1]) if expert else None]
        size[held_as(entry.format.name, expert is not None)] += entry.num_bytes
        size[FOLDED] += 2 * prod(entry.shape) if "kv_b_proj" in entry.name else 0
    return {name: _sum(sizes[key] for key in sizes if _has(spec, *key)) for name, spec in specs.items()}


def _has(spec: Spec, where: str | int, expert: int | None) -> bool:
    """Whether a network has what lies in a layer, or is of a kind that stands beside the layers; and that expert."""
    if isinstance(where, int):
        return where in spec.layers and (expert is None or expert in spec.experts)
    ends = {"embed": spec.embeds, "lm_head": spec.has_head, "norm": spec.has_head}
    return not spec.is_draft and ends.get(where, False)


def _sum(counts: Iterable[Counter[str]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def refuse_small(stored: Mapping[str, Mapping[str, float]], specs: Mapping[str, Spec], weights: str) -> str | None:
    """Stop before the system does; a sentence where the largest engine takes more than is free now.

    Raises:
        ConfigError: the machine has less than that engine takes without pages of files, which can be given back.
    """
    peaks = {name: peak(held, len(specs[name].layers), weights) for name, held in stored.items()}
    name = max(peaks, key=peaks.__getitem__)
    most, there, free = peaks[name], whole_memory(), available_memory()
    bare = most - (0 if weights == "inputs" else sum(size for kind, size in stored[name].items() if kind != FOLDED))
    inputs = "" if weights == "inputs" else ", or set engine.tensorrt.weights=inputs"
    if bare > there:
        raise ConfigError(
            f"Building {name} takes {bare / 1e9:.1f} GB of memory, and this machine has {there / 1e9:.1f}: lower "
            f"engine.tensorrt.layers_per_engine, raise parallel.tp{inputs}."
        )
    if most <= free:
        return None
    return f"building {name} takes {most / 1e9:.1f} GB of memory and {free / 1e9:.1f} are free: it may be slow, or be killed"


def too_large_to_compare(parameters: int) -> str:
    """Why a model is not compared with the reference here; "" if it is."""
    needed, free = parameters * COMPARED_BYTES, available_memory()
    if needed <= free:
        return ""
    return f"the model's {parameters:,} parameters would take {needed / 1e9:.1f} GB to interpret, and {free / 1e9:.1f} are free"
