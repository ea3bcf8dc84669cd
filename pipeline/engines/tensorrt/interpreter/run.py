"""The interpreter's loop: values by tensor name, layers in order, collectives over ranks."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core.errors import StageError
from pipeline.engines.tensorrt.definition import Definition
from pipeline.engines.tensorrt.interpreter.layers import LAYERS, wide
from pipeline.engines.tensorrt.interpreter.special import SPECIAL
from pipeline.engines.tensorrt.network.collectives import KIND as COLLECTIVE
from pipeline.engines.tensorrt.network.collectives import Collective
from pipeline.engines.tensorrt.plugins import LAYER as PLUGIN
from pipeline.engines.tensorrt.plugins import interpreted
from pipeline.formats.numerics import Array

__all__ = ["CLASSES", "Exchange", "Interpreter", "exchanged", "run_ranks"]

CLASSES = {
    "CONSTANT": "IConstantLayer", "ELEMENTWISE": "IElementWiseLayer", "UNARY": "IUnaryLayer", "ACTIVATION": "IActivationLayer",
    "REDUCE": "IReduceLayer", "TOPK": "ITopKLayer", "GATHER": "IGatherLayer", "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "SHUFFLE": "IShuffleLayer", "SLICE": "ISliceLayer", "CONCATENATION": "IConcatenationLayer", "CAST": "ICastLayer",
    "SELECT": "ISelectLayer", "SHAPE": "IShapeLayer", "ONE_HOT": "IOneHotLayer", "SCATTER": "IScatterLayer",
    "CUMULATIVE": "ICumulativeLayer", "QUANTIZE": "IQuantizeLayer", "DEQUANTIZE": "IDequantizeLayer",
    "DYNAMIC_QUANTIZE": "IDynamicQuantizeLayer", "ROTARY_EMBEDDING": "IRotaryEmbeddingLayer",
    "KV_CACHE_UPDATE": "IKVCacheUpdateLayer", "ATTENTION_INPUT": "IAttentionInputLayer",
    "ATTENTION_OUTPUT": "IAttentionOutputLayer", "MOE": "IMoELayer", COLLECTIVE: "IDistCollectiveLayer",
}  # fmt: skip
"""Layer type -> the class that shows its settings; the network hands out plain `ILayer`s."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a rank brings to a collective."""

    collective: Collective
    value: Array

    def __str__(self) -> str:
        return f"{self.collective} of {self.value.dtype}{list(self.value.shape)}"


class Interpreter:
    """One network."""

    def __init__(self, net: Definition) -> None:
        self.trt = net.trt
        self._constants, self._storage = net.constants, net.numpy
        self._definition = net.definition
        self._layers = [self._cast(net.definition.get_layer(index)) for index in range(net.definition.num_layers)]
        self.values: dict[str, Array] = {}
        """Every tensor of the last run: for looking into a difference."""
        self._weights: dict[str, Array] = {}
        """Those that no feed changes, kept for the next run: constants, and what is dequantised of them."""

    def _cast(self, layer: Any) -> tuple[str, Any]:
        kind = layer.type.name
        if kind == PLUGIN:
            return kind, layer
        if kind not in CLASSES:
            raise StageError(f"The layer {layer.name} is of type {kind}, which the interpreter does not compute.")
        layer.__class__ = getattr(self.trt, CLASSES[kind])
        return kind, layer

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs by name -> outputs by name, of a network without collectives."""
        return run_ranks([self], [feeds])[0]

    def steps(self, feeds: Mapping[str, Array]) -> Generator[Exchange, Array, dict[str, Array]]:
        """The same, stopping at each collective: yields what this rank brings, gets what it takes away."""
        self.values = dict(self._weights)
        for index in range(self._definition.num_inputs):
            tensor = self._definition.get_input(index)
            given = self._constants[tensor.name]() if tensor.name in self._constants else feeds[tensor.name]
            self._store(tensor, given, "the input")
        for kind, layer in self._layers:
            if layer.get_output(0).name in self._weights:
                continue
            inputs = [self._value(layer.get_input(index)) for index in range(layer.num_inputs)]
            if kind == COLLECTIVE:
                results: Any = ((yield Exchange(Collective.parse(layer.metadata), inputs[0])),)
            elif kind == "CONSTANT":
                results = (self._constants[layer.get_output(0).name](),)
            elif kind == PLUGIN:
                results = interpreted(layer.metadata, inputs)
            elif kind in SPECIAL:
                results = SPECIAL[kind](self.trt, layer, inputs, self._value)
            else:
                results = LAYERS[kind](self.trt, layer, inputs)
            for index, result in enumerate(results if isinstance(results, tuple) else (results,)):
                self._store(layer.get_output(index), result, layer.name)
            if kind in ("CONSTANT", "DEQUANTIZE") and all(layer.get_input(n).name in self._weights for n in range(len(inputs))):
                self._weights[layer.get_output(0).name] = self.values[layer.get_output(0).name]
        outputs = (self._definition.get_output(index).name for index in range(self._definition.num_outputs))
        return {name: self.values[name] for name in outputs}

    def _value(self, tensor: Any) -> Array | None:
        return None if tensor is None else self.values[tensor.name]

    def _store(self, tensor: Any, value: Array, what: str) -> None:
        """Keep a result in its type; its shape must be the one that TensorRT inferred."""
        array, inferred = np.asarray(value), tuple(tensor.shape)
        if len(inferred) != array.ndim or any(a not in (-1, b) for a, b in zip(inferred, array.shape, strict=True)):
            raise StageError(
                f"{what} {tensor.name}: TensorRT infers the shape {inferred}, but the interpreter finds {array.shape}."
            )
        self.values[tensor.name] = array.astype(self._storage[tensor.dtype], copy=False)


def run_ranks(ranks: Sequence[Interpreter], feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Run all ranks of a group together.

    Raises:
        StageError: they do not come to the same collectives in the same order, which on GPUs would hang for ever.
    """
    running = [rank.steps(feed) for rank, feed in zip(ranks, feeds, strict=True)]
    answers: list[Array | None] = [None] * len(running)
    while True:
        asked: list[Exchange] = []
        done: list[dict[str, Array]] = []
        for generator, answer in zip(running, answers, strict=True):
            try:
                asked.append(generator.send(answer))  # type: ignore[arg-type]
            except StopIteration as stop:
                done.append(stop.value)
        if not asked:
            return done
        if done:
            raise StageError(f"The ranks do not agree: {len(done)} have ended while others wait in {asked[0]}.")
        answers = [exchanged(asked, rank) for rank in range(len(asked))]


def exchanged(asked: Sequence[Exchange], rank: int) -> Array:
    """What a rank takes away; sums in float32, in the order of ranks.

    Raises:
        StageError: the ranks of its group brought something else, or to another collective.
    """
    mine = asked[rank]
    group = [asked[member] for member in mine.collective.group if member < len(asked)]
    if len(group) < len(mine.collective.group) or len({str(each) for each in group}) > 1 or rank not in mine.collective.group:
        raise StageError(f"The ranks do not agree: rank {rank} waits in {mine}, others in {_others(asked, mine)}.")
    operation, values = mine.collective.operation, [wide(each.value) for each in group]
    place = mine.collective.group.index(rank)
    if operation == "ALL_GATHER":
        return np.concatenate(values)
    if operation == "ALL_TO_ALL":
        return np.concatenate([np.split(value, len(values))[place] for value in values])
    if operation == "ALL_REDUCE":
        return np.sum(values, axis=0)
    if operation == "REDUCE_SCATTER":
        return np.split(np.sum(values, axis=0), len(values))[place]
    raise StageError(f"The collective {operation} is not one that the interpreter computes.")


def _others(asked: Sequence[Exchange], mine: Exchange) -> str:
    return ", ".join(sorted({str(each) for each in asked} - {str(mine)})) or "the same"
