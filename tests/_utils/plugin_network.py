"""A network of TensorRT-RTX that takes plugins, which the real one does not: a plugin's outputs are further inputs of it.

So all other layers are TensorRT's own, with its inference of shapes and types; a plugin is recorded where it was added, and who
walks the network (the interpreter, the listing, the fingerprint) meets it there as TensorRT would show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from pipeline.engines.tensorrt import plugins
from pipeline.engines.tensorrt.graph import Graph
from plugins.trt import Plugin, sizes

__all__ = ["NetworkWithPlugins", "with_plugins"]


class PluginLayer:
    """IPluginV3Layer"""

    type = SimpleNamespace(name=plugins.LAYER)
    name = metadata = ""

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self.num_inputs, self.num_outputs = len(inputs), len(outputs)

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    def get_output(self, index: int) -> Any:
        return self._outputs[index]


class NetworkWithPlugins:
    """INetworkDefinition"""

    def __init__(self, trt: ModuleType, real: Any) -> None:
        self._trt, self._real = trt, real
        self._added: list[tuple[int, PluginLayer]] = []
        self._made: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def add_plugin(self, instance: tuple[Plugin, Sequence[Any], Mapping[str, Any]], aot: bool = False) -> PluginLayer:
        plugin, inputs, attributes = instance
        assert aot == (plugin.kernel is not None)
        assert [tensor.dtype.name for tensor in inputs] == list(plugin.inputs.values())
        shapes = plugin.shapes(sizes(plugin, [tuple(tensor.shape) for tensor in inputs]), **attributes)
        outputs = []
        for (output, dtype), shape in zip(plugin.outputs.items(), shapes, strict=True):
            name = f"{plugin.name}.{len(self._added)}.{output}"
            self._made.add(name)
            outputs.append(self._real.add_input(name, getattr(self._trt.DataType, dtype), self._trt.Dims(list(shape))))
        self._added.append((self._real.num_layers, PluginLayer(inputs, outputs)))
        return self._added[-1][1]

    @property
    def num_layers(self) -> int:
        return self._real.num_layers + len(self._added)

    def get_layer(self, index: int) -> Any:
        for before, (place, layer) in enumerate(self._added):
            if index == place + before:
                return layer
            if index < place + before:
                return self._real.get_layer(index - before)
        return self._real.get_layer(index - len(self._added))

    @property
    def num_inputs(self) -> int:
        return self._real.num_inputs - len(self._made)

    def get_input(self, index: int) -> Any:
        own = (self._real.get_input(place) for place in range(self._real.num_inputs))
        return [tensor for tensor in own if tensor.name not in self._made][index]


def with_plugins(net: Graph, sm: int, *, host: bool = False) -> Graph:
    """The empty network, with plugins for one compute capability."""
    net.plugins, net.definition = plugins.Plugins(sm, host=host), NetworkWithPlugins(net.trt, net.definition)
    return net
