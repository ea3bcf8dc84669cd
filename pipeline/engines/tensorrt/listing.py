"""A network as text, a line a layer, for people, for `diff`, and for the picture: written when it is built, read when it is shown.

    layers.0.attn.topk_7  TOPK  FLOAT[-1, 8], INT32[-1, 8]  <- layers.0.attn.shuffle_6, starts, layers.0.attn.topk_3:1  => present.0

Name, type, what it gives, what it reads (inputs of the network, or layers, `:1` being a layer's second tensor), and the outputs of
the network that it gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.engines.tensorrt.definition import Definition

__all__ = ["Layer", "kind_of", "layers_of", "listing", "read"]

TENSOR = re.compile(r"\w+\[[^\]]*\]")


@dataclass(frozen=True, slots=True)
class Layer:
    """One line."""

    name: str
    kind: str
    gives: tuple[str, ...]
    """Type and shape of each tensor."""
    reads: tuple[str, ...]
    outputs: tuple[str, ...]

    def text(self) -> str:
        """The line."""
        ends = [f"  {arrow} {', '.join(names)}" for arrow, names in (("<-", self.reads), ("=>", self.outputs)) if names]
        return f"{self.name}  {self.kind}  {', '.join(self.gives)}{''.join(ends)}\n"


def layers_of(net: Definition) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Each layer with its inputs and outputs."""
    for index in range(net.definition.num_layers):
        layer = net.definition.get_layer(index)
        inputs = [layer.get_input(place) for place in range(layer.num_inputs)]
        yield layer, inputs, [layer.get_output(place) for place in range(layer.num_outputs)]


def kind_of(layer: Any) -> str:
    """Type of a layer."""
    return layer.type.name if hasattr(layer.type, "name") else str(layer.type)


def listing(net: Definition) -> str:
    """Every layer, in the order in which they were made."""
    made = {
        tensor.name: f"{layer.name}:{place}" if place else layer.name
        for layer, _, outputs in layers_of(net)
        for place, tensor in enumerate(outputs)
    }
    last = {net.definition.get_output(index).name for index in range(net.definition.num_outputs)}
    return "".join(
        Layer(
            layer.name, kind_of(layer), tuple(f"{tensor.dtype.name}{list(tensor.shape)}" for tensor in outputs),
            tuple(made.get(tensor.name, tensor.name) for tensor in inputs if tensor is not None),
            tuple(tensor.name for tensor in outputs if tensor.name in last),
        ).text()
        for layer, inputs, outputs in layers_of(net)
    )  # fmt: skip


def read(text: str) -> list[Layer]:
    """The layers of a listing."""
    return [_layer(line) for line in text.splitlines()]


def _layer(line: str) -> Layer:
    rest, _, outputs = line.partition("  => ")
    head, _, reads = rest.partition("  <- ")
    name, kind, gives = head.split("  ", 2)
    return Layer(name, kind, tuple(TENSOR.findall(gives)), _names(reads), _names(outputs))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.strip().split(", ") if name)
