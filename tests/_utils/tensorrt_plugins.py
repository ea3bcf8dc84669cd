"""Takes plugins through TensorRT's own `tensorrt.plugin`, as a builder would: `python -P FILE CASES`.

TensorRT's wheel of bindings is real, and all of its Python; stand-ins are the libraries behind it, so its registry, its expressions
of shapes (numbers here) and the setters that a builder hands in. CASES are JSON: module, plugin, sm, shapes, dynamic dimensions,
attributes, tactic. Printed is, as JSON, what the builder would get: shapes, types, aliases, tactics, kernel, grid, whole numbers.
Kernels are handed over as their sources: they are compiled elsewhere, and not everywhere.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import tensorrt_bindings as trt

sys.modules["tensorrt"] = trt


class Expression(trt.IDimensionExpr):
    """A number."""

    @classmethod
    def of(cls, value: int) -> Expression:
        made = cls.__new__(cls)  # the class of the bindings has no constructor
        made.number = int(value)
        return made

    def is_constant(self) -> bool:
        return False

    def get_constant_value(self) -> int:
        raise AssertionError("a dynamic size was taken for a constant")


class Expressions:
    """IExprBuilder"""

    def constant(self, value: int) -> Expression:
        return Expression.of(value)

    def operation(self, kind: Any, first: Expression, second: Expression) -> Expression:
        a, b = first.number, second.number
        found = {
            "SUM": a + b, "SUB": a - b, "PROD": a * b, "FLOOR_DIV": a // b if b else 0, "CEIL_DIV": -(-a // b) if b else 0,
            "MAX": max(a, b), "MIN": min(a, b),
        }  # fmt: skip
        return Expression.of(found[kind.name])


class Registry:
    """IPluginRegistry"""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name, creator.plugin_version, namespace] = creator
        return True

    def get_creator(self, *identity: str) -> Any:
        return self.creators.get(identity)


class Dimensions(list[Any]):
    """DimsExprs"""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


def described(shape: list[int], dynamic: list[int], dtype: str) -> Any:
    """DynamicPluginTensorDesc"""
    found = trt.DynamicPluginTensorDesc()
    inner = trt.PluginTensorDesc()
    inner.dims = trt.Dims([-1 if place in dynamic else size for place, size in enumerate(shape)])
    inner.type, inner.format = getattr(trt.DataType, dtype), trt.TensorFormat.LINEAR
    found.desc = inner
    found.min = found.opt = found.max = trt.Dims(shape)
    return found


def made(case: dict[str, Any], plugin: Any) -> Any:
    """The plugin's object, by way of a layer's arguments, a creator and the fields in between."""
    from plugins.trt import register

    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    maker = register(plugin, case["sm"])
    import_module("tensorrt.plugin._tensor").SymExprImpl.expr = None  # else written to C++, and not read from there
    inputs = [trt.ITensor.__new__(trt.ITensor) for _ in plugin.inputs]
    tensors, _, instance = maker(*inputs, **case["attributes"])(trt.QuickPluginCreationRequest.STRICT_AOT)
    assert tensors == inputs
    return instance


def taken_through(case: dict[str, Any]) -> dict[str, Any]:
    """What a builder does, in its order."""
    plugin = next(each for each in import_module(case["module"]).PLUGINS if each.name == case["plugin"])
    if plugin.kernel is None:
        return enqueued(case, plugin)
    instance, builder, count = made(case, plugin), Expressions(), len(plugin.inputs)
    trt.DimsExprs = Dimensions
    types = instance.get_output_data_types(
        [getattr(trt.DataType, dtype) for dtype in plugin.inputs.values()], [len(shape) for shape in case["shapes"]]
    )
    symbols = [[Expression.of(size) for size in shape] for shape in case["shapes"]]
    outputs = [[size.number for size in shape] for shape in instance.get_output_shapes(symbols, [], builder)]
    given = zip(case["shapes"], case["dynamic"], plugin.inputs.values(), strict=True)
    tensors = [described(*each) for each in given]
    tensors += [described(shape, [], dtype) for shape, dtype in zip(outputs, plugin.outputs.values(), strict=True)]
    formats = instance.get_supported_format_combinations(tensors, count)
    instance.configure_plugin(tensors[:count], tensors[count:])
    tactics = sorted(instance.get_valid_tactics())
    instance.set_tactic(case["tactic"])
    launch, numbers = SimpleNamespace(), Numbers()
    instance.get_launch_params(symbols, tensors, count, launch, numbers, builder)
    name, kernel = instance.get_kernel(*([each.desc for each in part] for part in (tensors[:count], tensors[count:])))
    return {
        "types": [kind.name for kind in types], "shapes": outputs,
        "aliases": [instance.get_aliased_input(place) for place in range(len(types))],
        "formats": [each.type.name for each in formats], "tactics": tactics, "attributes": instance.attrs, "kernel": name,
        "compiled": kernel.decode(),
        "launch": {part: value.expr.number for part, value in vars(launch).items()},
        "numbers": [each.expr.number for each in numbers],
    }  # fmt: skip


def enqueued(case: dict[str, Any], plugin: Any) -> dict[str, Any]:
    """A plugin of the class route: built, serialised, made again, and run over tensors of the CPU at their addresses."""
    import torch

    from plugins import trt_class
    from tests._utils.plugin_inputs import filled

    registry = Registry()
    trt.get_plugin_registry, trt.DimsExprs = (lambda: registry), Dimensions
    trt_class._on, trt_class._view = (lambda stream: nullcontext()), at_address
    _, shape_inputs, built = trt_class.instance(trt, plugin, case["attributes"])(*range(len(plugin.inputs)))
    creator = registry.get_creator(plugin.name, built.plugin_version, built.plugin_namespace)
    again = creator.create_plugin(plugin.name, built.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME).clone()
    symbols = [[Expression.of(size) for size in shape] for shape in case["shapes"]]
    outputs = [[size.number for size in shape] for shape in again.get_output_shapes(symbols, [], Expressions())]
    types = [kind.name for kind in again.get_output_data_types([])]
    given = [filled(*each) for each in zip(case["values"], case["shapes"], plugin.inputs.values(), strict=True)]
    places = [torch.zeros(shape, dtype=trt_class.DTYPES[kind]) for shape, kind in zip(outputs, types, strict=True)]
    tensors, count = [*given, *places], len(given)
    kinds = [*plugin.inputs.values(), *types]
    descs = [described(list(each.shape), [], kind) for each, kind in zip(tensors, kinds, strict=True)]
    inner, pointers = [each.desc for each in descs], [each.data_ptr() for each in tensors]
    again.enqueue(inner[:count], inner[count:], pointers[:count], pointers[count:], 0, 0)
    expected = plugin.reference(*given, **case["attributes"])
    return {
        "shapes": outputs, "types": types, "attributes": again.attributes, "shape_inputs": shape_inputs,
        "supported": [again.supports_format_combination(place, descs, count) for place in range(len(descs))],
        "equal": [bool(torch.equal(a.float(), b.float())) for a, b in zip(places, expected, strict=True)],
        "largest": [float(place.float().abs().max()) for place in places],
    }  # fmt: skip


def at_address(pointer: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor of the CPU that lies there."""
    import torch

    count = math.prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(pointer), dtype=torch.uint8).view(dtype).view(*shape)


class Numbers(list[Any]):
    """ISymExprs"""

    def __setattr__(self, name: str, value: int) -> None:
        assert name == "nbSymExprs"
        self[:] = [None] * value


if __name__ == "__main__":
    import_module("plugins.trt").compile_source = lambda source, options, ptx: source
    print(json.dumps([taken_through(case) for case in json.loads(sys.argv[1])]))
