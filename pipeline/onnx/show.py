"""What `inspect DIR` says of a result of `onnx`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.core.jsonio import read_json
from pipeline.engines.tensorrt.library import listed
from pipeline.engines.tensorrt.plan_file import kernels
from pipeline.onnx import ENGINE, REPORT

__all__ = ["lines", "plain"]


def plain(folder: Path) -> dict[str, Any]:
    """The report, with the engine's kernels."""
    info = read_json(folder / REPORT)
    if info["engine"] and info["engine"]["library"] == "tensorrt_rtx":
        info["engine"]["kernels"] = kernels(folder / ENGINE)
    return info


def lines(info: dict[str, Any]) -> Iterator[str]:
    """For a person."""
    kinds = info["operators"]
    nodes = f"{sum(kinds.values())} nodes of {len(kinds)} kinds, {info['parameters']:,} parameters"
    yield f"{info['factory']}: ONNX opset {info['opset']}, {nodes}"
    for name, facts in info["inputs"].items():
        least, usual, most = facts["range"]
        yield f"  in   {name} {facts['dtype']}{usual}" + (f", from {least} to {most}" if least != most else "")
    yield f"  out  {', '.join(info['outputs'])}"
    for row in info["agreement"]:
        yield f"  {row['output']} {row['shape']}: onnxruntime within {row['relative']:.1e} of the largest value"
    if info["not_compared"]:
        yield info["not_compared"]
    if engine := info["engine"]:
        built = f"{engine['layers']} layers, {engine['bytes'] / 1e6:,.1f} MB, {sum(engine.get('kernels', {}).values())} kernels"
        yield f"{engine['library']} {engine['version']} for {listed(engine['targets'])}: {built}; not run on a GPU"
