"""Takes plugins through TensorRT's own `tensorrt.plugin`, as a builder would: `python -P FILE CASES [uncompiled]`.

TensorRT's wheel of bindings is real, and all of its Python; stand-ins are the libraries behind it, so its registry, its expressions
of shapes (numbers here) and the setters that a builder hands in. CASES are JSON: module, plugin, sm, shapes, dynamic dimensions,
attributes, tactic. Printed is, as JSON, what the builder would get: shapes, types, aliases, tactics, kernel, grid, whole numbers.
`uncompiled` hands over the source: where there is no NVRTC.
"""

from __future__ import annotations

import json
import sys
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
        return self.creators[identity]


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


class Numbers(list[Any]):
    """ISymExprs"""

    def __setattr__(self, name: str, value: int) -> None:
        assert name == "nbSymExprs"
        self[:] = [None] * value


if __name__ == "__main__":
    if sys.argv[2:] == ["uncompiled"]:
        import_module("plugins.trt").compile_source = lambda source, options, ptx: source
    print(json.dumps([taken_through(case) for case in json.loads(sys.argv[1])]))
