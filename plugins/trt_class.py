"""Plugins of TensorRT that launch from the host: IPluginV3 classes over torch ops, for what no single kernel can do ahead of time.

Ops of several launches, and kernels whose arguments the host makes (TMA descriptors), run in Python where the engine runs: the
process that deserialises such an engine calls `register_creator` first, and needs torch and this package there. Captured in a CUDA
graph, as the runtime's decode steps are, they cost no Python. An op gives tensors of its own, which are copied to where TensorRT
wants them; its intermediates come from torch's allocator, not from TensorRT's workspace.

Nothing here was run by TensorRT: the classes were made and asked with the bindings of 11.4, and compute on the CPU in the tests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from plugins.nvrtc import source_text
from plugins.trt import NAMESPACE, Plugin, sizes

__all__ = ["folder_digest", "instance", "register_creator"]

VERSION, FIELD = "1", "attributes"
DTYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "FP8": torch.float8_e4m3fn, "INT8": torch.int8,
    "UINT8": torch.uint8, "INT32": torch.int32, "INT64": torch.int64,
}  # fmt: skip


def folder_digest(folder: Path, attributes: Mapping[str, Any]) -> str:
    """SHA-256 of the sources in a plugin's folder with what they include, compiled where they run, and of its attributes."""
    files = sorted(file for pattern in ("*.py", "*.cu", "*.cuh") for file in folder.glob(pattern))
    digest = hashlib.sha256(repr(sorted(attributes.items())).encode())
    for file in files:
        digest.update(file.name.encode() + hashlib.sha256(source_text(file)).digest())
    return digest.hexdigest()


class _Memory:
    """Bytes on the GPU that TensorRT owns, as torch takes them."""

    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _view(pointer: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that lies there."""
    count = prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(tuple(shape), dtype=dtype, device="cuda")
    return torch.as_tensor(_Memory(pointer, count), device="cuda").view(dtype).view(*shape)


def _on(stream: int) -> Any:
    """Work of torch goes to TensorRT's stream."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


def compute(plugin: Plugin, attributes: Mapping[str, Any], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """The op, from TensorRT's tensors into TensorRT's tensors."""
    for place, found in zip(outputs, plugin.reference(*inputs, **attributes), strict=True):
        place.copy_(found)


class _Size:
    """A dimension that is known at run time."""

    def __init__(self, trt: Any, expressions: Any, expression: Any) -> None:
        self._trt, self._expressions, self.expression = trt, expressions, expression

    def _with(self, operation: str, other: Any) -> _Size:
        second = other.expression if isinstance(other, _Size) else self._expressions.constant(other)
        kind = getattr(self._trt.DimensionOperation, operation)
        return _Size(self._trt, self._expressions, self._expressions.operation(kind, self.expression, second))

    def __add__(self, other: Any) -> _Size:
        return self._with("SUM", other)

    def __mul__(self, other: Any) -> _Size:
        return self._with("PROD", other)

    def __floordiv__(self, other: Any) -> _Size:
        return self._with("FLOOR_DIV", other)


def _expressed(trt: Any, plugin: Plugin, inputs: Sequence[Any], attributes: Mapping[str, Any], expressions: Any) -> list[Any]:
    """The outputs' shapes as TensorRT's expressions."""
    given = [[_Size(trt, expressions, shape[place]) for place in range(len(shape))] for shape in inputs]
    made = []
    for shape in plugin.shapes(sizes(plugin, given), **attributes):
        made.append(trt.DimsExprs(len(shape)))
        for place, size in enumerate(shape):
            made[-1][place] = size.expression if isinstance(size, _Size) else expressions.constant(size)
    return made


@cache
def _class_of(trt: Any, plugin: Plugin) -> type:
    """The plugin's class, over the library's."""

    class Made(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):  # type: ignore[misc, name-defined]
        def __init__(self, attributes: Mapping[str, Any]) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.plugin_name, self.plugin_namespace, self.plugin_version = plugin.name, NAMESPACE, VERSION
            self.num_outputs, self.timing_cache_id = len(plugin.outputs), ""
            self.attributes = dict(attributes)

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Made(self.attributes)

        def get_output_data_types(self, inputs: Sequence[Any]) -> list[Any]:
            return [getattr(trt.DataType, name) for name in plugin.outputs.values()]

        def get_output_shapes(self, inputs: Sequence[Any], shapes: Sequence[Any], expressions: Any) -> list[Any]:
            return _expressed(trt, plugin, inputs, self.attributes, expressions)

        def supports_format_combination(self, place: int, tensors: Sequence[Any], inputs: int) -> bool:
            wanted = [*plugin.inputs.values(), *plugin.outputs.values()][place]
            return tensors[place].desc.type.name == wanted and tensors[place].desc.format == trt.TensorFormat.LINEAR

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            pass

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            pass

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def get_fields_to_serialize(self) -> Any:
            return _fields(trt, self.attributes)

        def enqueue(self, given: Any, wanted: Any, inputs: Any, outputs: Any, workspace: int, stream: int) -> None:
            with _on(stream):
                tensors = (
                    [_view(pointer, tuple(each.dims), DTYPES[each.type.name]) for each, pointer in zip(*pair, strict=True)]
                    for pair in ((given, inputs), (wanted, outputs))
                )
                compute(plugin, self.attributes, *tensors)

    return Made


@cache
def _kept(text: str) -> bytes:
    """Bytes that never die: a collection of fields points at its data, and does not keep it."""
    return text.encode()


def _fields(trt: Any, attributes: Mapping[str, Any]) -> Any:
    text = _kept(json.dumps(dict(attributes), sort_keys=True))
    return trt.PluginFieldCollection([trt.PluginField(FIELD, text, trt.PluginFieldType.CHAR)])


def register_creator(trt: Any, plugin: Plugin) -> Any:
    """What makes the plugin, at build time and where an engine is deserialised; registered once a process, which keeps it."""
    registry = trt.get_plugin_registry()
    creator = _creator(trt, plugin)
    if registry.get_creator(plugin.name, VERSION, NAMESPACE) is None:
        registry.register_creator(creator, NAMESPACE)
    return creator


@cache
def _creator(trt: Any, plugin: Plugin) -> Any:
    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_namespace, self.plugin_version = plugin.name, NAMESPACE, VERSION
            self.field_names = trt.PluginFieldCollection([trt.PluginField(FIELD, b"", trt.PluginFieldType.CHAR)])

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            given = next(field for field in fields if field.name == FIELD)
            return _class_of(trt, plugin)(json.loads(given.data.tobytes()))

    return Creator()


def instance(trt: Any, plugin: Plugin, attributes: Mapping[str, Any]) -> Callable[..., Any]:
    """What makes of inputs the tuple that `INetworkDefinition.add_plugin` takes."""
    creator = register_creator(trt, plugin)
    made = creator.create_plugin(plugin.name, _fields(trt, attributes), trt.TensorRTPhase.BUILD)
    return lambda *inputs: (list(inputs), [], made)
