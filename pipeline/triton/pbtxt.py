"""`config.pbtxt`, written and read through Triton's own protobuf classes: what parses here, parses in the server.

The text is the same bytes for the same arguments: parameters are added in sorted order and printed by `text_format`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from pipeline.core.errors import ConfigError

__all__ = ["ModelConfig", "TensorSpec", "build", "read", "write"]

ModelConfig = pb.ModelConfig


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: `kind` is Triton's name without TYPE_ (STRING, INT32, ...)."""

    name: str
    kind: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False


def build(
    name: str,
    *,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    parameters: Mapping[str, str],
    backend: str = "python",
    max_batch_size: int = 0,
    decoupled: bool = True,
) -> pb.ModelConfig:
    """The config of a model with one CPU instance (a python model places its own tensors)."""
    config = pb.ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)
    config.model_transaction_policy.decoupled = decoupled
    for spec in inputs:
        config.input.add(name=spec.name, data_type=_data_type(spec), dims=spec.dims, optional=spec.optional)
    for spec in outputs:
        config.output.add(name=spec.name, data_type=_data_type(spec), dims=spec.dims)
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    for key in sorted(parameters):
        config.parameters[key].string_value = parameters[key]
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
