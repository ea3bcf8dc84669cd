"""What `inspect DIR` says of an engine folder: its engines, what they bind, their kernels, how near the reference they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.core.jsonio import read_json
from pipeline.engines.tensorrt.plan_file import kernels, read_header

__all__ = ["lines", "plain"]

FUSED_ATTENTION = "mha"


def plain(folder: Path) -> dict[str, Any]:
    """engine.json with what can be read from the engine files."""
    info = read_json(folder / "engine.json")
    if info["library"] == "tensorrt_rtx":
        for engine in info["engines"].values():
            header = read_header(folder / engine["file"])
            engine |= {"targets": list(header.targets), "built_by": header.version, "kernels": kernels(folder / engine["file"])}
    return info


def lines(info: dict[str, Any]) -> Iterator[str]:
    """For a person."""
    ranks = f", {info['ranks']} ranks ({info['parallel']})" if info["ranks"] > 1 else ""
    yield f"{info['library']} {info['version']} for {', '.join(info['targets'])}, {info['dtype']}{ranks}, weights {info['weights']}"
    for name, how in info["computed_as"].items():
        yield f"  {name}: {how}"
    for name, engine in info["engines"].items():
        yield f"{name}: {engine['layers']} layers, {engine['bytes'] / 1e6:,.1f} MB, network {engine['network'][:12]}"
        yield from _kernels(engine.get("kernels", {}))
        sizes = f"rows {engine['max_batch']}, tokens a row {engine['max_tokens']}, cache {engine['max_seq_len']}"
        yield f"  {sizes}, moe {engine['moe']}"
        yield f"  in   {_bindings(engine['inputs'])}"
        yield f"  out  {_bindings(engine['outputs'])}"
    yield from _agreement(info)
    yield info["not_run"]


def _kernels(found: dict[str, int]) -> Iterator[str]:
    if found:
        fused = sum(count for kernel, count in found.items() if FUSED_ATTENTION in kernel)
        yield f"  {sum(found.values())} kernels of {len(found)} kinds, {fused} of them fused attention"


def _bindings(tensors: dict[str, Any]) -> str:
    """Name, type and shape; caches and weights are counted."""
    few = {name: facts for name, facts in tensors.items() if not name.startswith(("cache.", "present.", "model.", "lm_head."))}
    told = [f"{name} {facts['dtype']}{facts['shape']}" for name, facts in few.items()]
    caches = sum(name.startswith(("cache.", "present.")) for name in tensors)
    weights = len(tensors) - len(few) - caches
    return ", ".join([*told, f"{caches} cache{'s' if caches != 1 else ''}", *([f"{weights} weights"] if weights else [])])


def _agreement(info: dict[str, Any]) -> Iterator[str]:
    if info["not_compared"]:
        yield f"not compared with the reference: {info['not_compared']}"
        return
    yield f"{'against the reference, interpreted':38} {'activations':11} {'tokens':>6} {'mean KL':>8} {'top-1':>7} {'largest':>8}"
    for row in info["agreement"]:
        figures = f"{row['tokens']:6} {row['mean_kl']:8.1e} {row['top1']:7.1%} {row['max_abs']:8.1e}"
        yield f"{row['what']:38} {row['activations']:11} {figures}"
