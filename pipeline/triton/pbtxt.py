"""`config.pbtxt`, written and read through Triton's own protobuf classes: what parses here, parses in the server.

The text is the same bytes for the same arguments: parameters are added in sorted order and printed by `text_format`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from pipeline.core.errors import ConfigError
from pipeline.triton.releases import takes

if TYPE_CHECKING:
    from pipeline.triton.releases import Release

__all__ = ["ModelConfig", "TensorSpec", "build", "read", "specs", "write"]

ModelConfig = pb.ModelConfig
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_MS = (25, 50, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600)
"""Buckets of the time to the first token; the server's own end at 5 s. Counted with --metrics-config=histogram_latencies=true."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: `kind` is Triton's name without TYPE_ (STRING, INT32, ...)."""

    name: str
    kind: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False


def specs(table: Mapping[str, str], *, optional: bool = False) -> tuple[TensorSpec, ...]:
    """{"stop_words": "STRING[-1]"}: names and kinds, with dims where those are not [1]."""
    found = []
    for name, text in table.items():
        kind, _, dims = text.rstrip("]").partition("[")
        found.append(TensorSpec(name, kind, tuple(map(int, dims.split(","))) if dims else (1,), optional))
    return tuple(found)


def build(
    name: str,
    *,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    parameters: Mapping[str, str],
    backend: str = "python",
    max_batch_size: int = 0,
    decoupled: bool = True,
    kind: int = pb.ModelInstanceGroup.KIND_CPU,
    release: Release | None = None,
) -> pb.ModelConfig:
    """The config of a model with one instance, on the CPU for Triton (a python model places its own tensors).

    `release` is the server that will read it; None: one of any release.
    """
    config = pb.ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)
    config.model_transaction_policy.decoupled = decoupled
    for spec in inputs:
        config.input.add(name=spec.name, data_type=_data_type(spec), dims=spec.dims, optional=spec.optional)
    for spec in outputs:
        config.output.add(name=spec.name, data_type=_data_type(spec), dims=spec.dims)
    config.instance_group.add(count=1, kind=kind)
    for key in sorted(parameters):
        config.parameters[key].string_value = parameters[key]
    if decoupled and takes(release, "model_metrics"):
        control = config.model_metrics.metric_control.add()
        control.metric_identifier.family = FIRST_RESPONSE
        control.histogram_options.buckets.extend(FIRST_RESPONSE_MS)
    return config


def write(path: Path, config: pb.ModelConfig) -> None:
    """Write `config` as text, fields in the order of the schema."""
    path.write_text(
        text_format.MessageToString(config, use_short_repeated_primitives=True, as_utf8=True), encoding="utf-8"
    )


def read(path: Path) -> pb.ModelConfig:
    """Parse a config.pbtxt. Stricter than the server: no unfilled `${...}`, no parameter twice."""
    text = path.read_text(encoding="utf-8")
    if found := re.search(r"\$\{[^}]*}?", text):
        line = text.count("\n", 0, found.start()) + 1
        raise ConfigError(f"{path}:{line}: {found.group()} is a placeholder that nobody filled; write its value.")
    try:
        config = text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{path}:{error}; correct the file or package the model again.") from None
    keys = re.findall(r'\bparameters\s*:?\s*\{\s*key\s*:\s*"([^"]*)"', text)
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"{path}: parameter {', '.join(twice)} is given twice and the last one would win; keep one.")
    return config


def _data_type(spec: TensorSpec) -> int:
    return int(pb.DataType.Value(f"TYPE_{spec.kind}"))
