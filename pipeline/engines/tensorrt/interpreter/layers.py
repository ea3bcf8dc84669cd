"""What each layer of a network computes: arithmetic, shapes and indices, in numpy.

A function gets TensorRT's module, the layer with its settings, and the values of its inputs (None where one is left out).
BF16 and FP16 are widened to float32, and rounded by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.core.errors import StageError
from pipeline.formats.numerics import BF16, Array

__all__ = ["LAYERS", "wide"]

Values = Sequence[Any]


def wide(value: Array) -> Array:
    """In float32 where it is a narrower float."""
    return value.astype(np.float32) if value.dtype in (BF16, np.float16) else value


def _of(table: dict[str, Any], operation: Any, layer: Any) -> Any:
    if operation.name not in table:
        raise StageError(f"The layer {layer.name} asks for {operation.name}, which the interpreter does not compute.")
    return table[operation.name]


_ELEMENTWISE: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "LESS": np.less,
    "GREATER": np.greater, "EQUAL": np.equal, "AND": np.logical_and, "OR": np.logical_or, "POW": np.power,
    "DIV": lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a / b).astype(a.dtype),
}  # fmt: skip
_UNARY: dict[str, Callable[[Array], Array]] = {
    "SQRT": np.sqrt, "RECIP": np.reciprocal, "ABS": np.abs, "NEG": np.negative, "EXP": np.exp, "NOT": np.logical_not,
    "ROUND": np.rint,
}  # fmt: skip
_REDUCE: dict[str, Callable[..., Array]] = {"SUM": np.sum, "AVG": np.mean, "MAX": np.max, "MIN": np.min}


def _elementwise(trt: Any, layer: Any, x: Values) -> Array:
    return _of(_ELEMENTWISE, layer.op, layer)(wide(x[0]), wide(x[1]))


def _unary(trt: Any, layer: Any, x: Values) -> Array:
    return _of(_UNARY, layer.op, layer)(wide(x[0]))


def _activation(trt: Any, layer: Any, x: Values) -> Array:
    # the class's `type` hides ILayer's own, and is the activation
    table = {"SIGMOID": lambda v: 1 / (1 + np.exp(-v)), "RELU": lambda v: np.maximum(v, 0), "TANH": np.tanh}
    with np.errstate(over="ignore"):
        return _of(table, layer.type, layer)(wide(x[0]))


def _axes(mask: int, rank: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if mask >> axis & 1)


def _reduce(trt: Any, layer: Any, x: Values) -> Array:
    value = wide(x[0])
    return _of(_REDUCE, layer.op, layer)(value, axis=_axes(layer.axes, value.ndim), keepdims=layer.keep_dims)


def _topk(trt: Any, layer: Any, x: Values) -> tuple[Array, Array]:
    value = wide(x[0])
    axis = _axes(layer.axes, value.ndim)[0]
    order = np.argsort(-value, axis=axis, kind="stable").take(range(layer.k), axis=axis)
    return np.take_along_axis(x[0], order, axis), order.astype(np.int32)


def _gather(trt: Any, layer: Any, x: Values) -> Array:
    if layer.mode == trt.GatherMode.ELEMENT:
        return np.take_along_axis(x[0], x[1].astype(np.int64), layer.axis)
    if layer.mode == trt.GatherMode.DEFAULT and layer.num_elementwise_dims == 0:
        return np.take(x[0], x[1], axis=layer.axis)
    raise StageError(f"The layer {layer.name} gathers in a way that the interpreter does not compute.")


def _matmul(trt: Any, layer: Any, x: Values) -> Array:
    flip = trt.MatrixOperation.TRANSPOSE
    a, b = wide(x[0]), wide(x[1])
    return (a.swapaxes(-1, -2) if layer.op0 == flip else a) @ (b.swapaxes(-1, -2) if layer.op1 == flip else b)


def _shuffle(trt: Any, layer: Any, x: Values) -> Array:
    value = x[0].transpose(list(layer.first_transpose)[: x[0].ndim]) if x[0].ndim else x[0]
    shape = [int(size) for size in x[1]] if len(x) > 1 and x[1] is not None else _reshape_dims(layer)
    if shape is not None:
        if layer.zero_is_placeholder:
            shape = [value.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
        value = value.reshape(shape)
    return value.transpose(list(layer.second_transpose)[: value.ndim]) if value.ndim else value


def _reshape_dims(layer: Any) -> list[int] | None:
    try:
        return list(layer.reshape_dims)
    except (TypeError, ValueError):
        return None


def _slice(trt: Any, layer: Any, x: Values) -> Array:
    def setting(index: int, dims: Any) -> list[int]:
        given = x[index] if len(x) > index else None
        return [int(v) for v in np.ravel(given)] if given is not None else list(dims)

    value = x[0]
    start, size, stride = setting(1, layer.start), setting(2, layer.shape), setting(3, layer.stride)
    axes = [int(v) for v in np.ravel(x[5])] if len(x) > 5 and x[5] is not None else range(value.ndim)
    for position, axis in enumerate(axes):
        index = start[position] + np.arange(size[position]) * stride[position]
        inside = (index >= 0) & (index < value.shape[axis])
        value = np.take(value, np.clip(index, 0, value.shape[axis] - 1), axis)
        if not inside.all():
            if layer.mode != trt.SampleMode.FILL:
                raise StageError(f"The layer {layer.name} reads {index.max() + 1} of {x[0].shape[axis]} elements of axis {axis}.")
            shown = inside.reshape([-1 if other == axis else 1 for other in range(value.ndim)])
            value = np.where(shown, value, np.zeros((), value.dtype)).astype(value.dtype)
    return value


def _one_hot(trt: Any, layer: Any, x: Values) -> Array:
    off, on = x[1]
    return np.where(np.arange(int(x[2])) == x[0][..., None], on, off).astype(x[1].dtype)


def _scatter(trt: Any, layer: Any, x: Values) -> Array:
    result = x[0].copy()
    if layer.mode != trt.ScatterMode.ND:
        raise StageError(f"The layer {layer.name} scatters in a way that the interpreter does not compute.")
    result[tuple(np.moveaxis(x[1], -1, 0))] = x[2]
    return result


def _cumulative(trt: Any, layer: Any, x: Values) -> Array:
    total = np.cumsum(x[0], int(x[1]), dtype=x[0].dtype)
    return total - x[0] if layer.exclusive else total


LAYERS: dict[str, Callable[[Any, Any, Values], Any]] = {
    "ELEMENTWISE": _elementwise, "UNARY": _unary, "ACTIVATION": _activation, "REDUCE": _reduce, "TOPK": _topk,
    "GATHER": _gather, "MATRIX_MULTIPLY": _matmul, "SHUFFLE": _shuffle, "SLICE": _slice, "ONE_HOT": _one_hot,
    "SCATTER": _scatter, "CUMULATIVE": _cumulative,
    "CONCATENATION": lambda trt, layer, x: np.concatenate(x, layer.axis),
    "CAST": lambda trt, layer, x: x[0],
    "SELECT": lambda trt, layer, x: np.where(x[0], x[1], x[2]),
    "SHAPE": lambda trt, layer, x: np.array(x[0].shape, np.int64),
    "ATTENTION_INPUT": lambda trt, layer, x: tuple(x[: layer.num_outputs]),
}  # fmt: skip
"""Layer type -> its function. CAST only hands on: the caller stores in the output's type."""
