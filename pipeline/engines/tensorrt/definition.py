"""A network definition that says at once, and in our own layer names, what is wrong with it.

TensorRT raises nothing: a wrong call returns None, sets a recorder, or fails only at build time. `Definition` reads the recorder
and the output's shape after every layer, so the first cause is reported with the layer that made it. It also keeps what
TensorRT only points at: weights must live until the build is over.

Tensors are TensorRT's `ITensor`s; the operations on them are in `graph.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from pipeline.core.errors import StageError
from pipeline.engines.tensorrt.library import process_logger
from pipeline.engines.tensorrt.plugins import Plugins
from pipeline.formats.numerics import BF16, E4M3, Array

__all__ = ["Definition", "Tensor", "numpy_dtypes"]

Tensor = Any
LAYER = re.compile(r"((?:^|\.)(?:layers|cache|present)\.)(\d+)(?=\.|$)")
NOISE = "catchCudaError"
"""Marks the entry that follows every error where there is no GPU."""


def numpy_dtypes(trt: ModuleType) -> dict[Any, np.dtype[Any]]:
    """TensorRT's data types as numpy's; 4-bit types take one byte an element there."""
    kinds = trt.DataType
    return {
        kinds.FLOAT: np.dtype(np.float32), kinds.HALF: np.dtype(np.float16), kinds.BF16: BF16, kinds.FP8: E4M3,
        kinds.INT32: np.dtype(np.int32), kinds.INT64: np.dtype(np.int64), kinds.BOOL: np.dtype(np.bool_),
        kinds.INT8: np.dtype(np.int8), kinds.FP4: np.dtype(ml_dtypes.float4_e2m1fn), kinds.INT4: np.dtype(ml_dtypes.int4),
    }  # fmt: skip


def _recorder(trt: ModuleType) -> Any:
    class Recorder(trt.IErrorRecorder):  # type: ignore[misc, name-defined]
        """What TensorRT reports, in order."""

        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)
            self.items: list[tuple[Any, str]] = []

        def num_errors(self) -> int:
            return len(self.items)

        def get_error_code(self, index: int) -> Any:
            return self.items[index][0]

        def get_error_desc(self, index: int) -> str:
            return self.items[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            self.items.clear()

        def report_error(self, code: Any, text: str) -> bool:
            self.items.append((code, text))
            return True

    return Recorder()


class Definition:
    """A network under construction."""

    plugins: Plugins | None = None
    """Kernels of ours that stand for native layers."""

    def __init__(self, trt: ModuleType, *, external_weights: bool = False, first_layer: int = 0) -> None:
        """With `first_layer` the names of layers count from it (`layers.+0`), so that alike segments of a model are alike."""
        self.trt = trt
        self.logger = process_logger(trt)
        self.builder = trt.Builder(self.logger)
        self.recorder = _recorder(trt)
        self.definition = self._new_network()
        self.numpy = numpy_dtypes(trt)
        self.constants: dict[str, Callable[[], Array]] = {}
        """Value of each constant's tensor, one element an element: TensorRT cannot give BF16 and FP8 weights back."""
        self.ranges: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}
        """Least, usual and largest shape of each input that has one."""
        self.shape_inputs: dict[str, tuple[int, int, int]] = {}
        """Inputs that are read on the host: least, usual and largest value."""
        self.external: dict[str, Array] | None = {} if external_weights else None
        """With external weights: what each of the inputs that carry them holds, as it lies in memory."""
        self._kept: list[Any] = []
        self._scope: list[str] = []
        self.binds: dict[str, str] = {}
        """Input or output -> the name that it would have in the whole model, where that differs."""
        self._inputs: dict[str, Tensor] = {}
        self._first_layer = first_layer

    def _new_network(self) -> Any:
        """An empty network, whose errors are recorded."""
        self.builder.error_recorder = self.recorder
        return self.builder.create_network(0)

    # Errors and names

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Layers made inside are called `name.…`."""
        self._scope.append(self._local(name))
        try:
            yield
        finally:
            self._scope.pop()

    def _local(self, name: str) -> str:
        """The name with layers counted from this network's first."""
        if not self._first_layer:
            return name
        return LAYER.sub(lambda match: f"{match[1]}+{int(match[2]) - self._first_layer}", name)

    def first_error(self) -> str | None:
        """What TensorRT reported first; later entries follow from it."""
        return next((f"{code.name}: {text}" for code, text in self.recorder.items if NOISE not in text), None)

    def fail(self, what: str) -> StageError:
        """The error to raise about `what`."""
        logged = [text for severity, text in self.logger.lines if "ERROR" in severity]
        reason = self.first_error() or (logged[-1] if logged else "TensorRT gave no reason")
        return StageError(f"TensorRT refused {what}: {reason}")

    def layer(self, method: str, *arguments: Any) -> Any:
        """`INetworkDefinition.<method>`, named and checked; settings that change shapes need `checked` afterwards."""
        name = ".".join([*self._scope, f"{method.removeprefix('add_')}_{self.definition.num_layers}"])
        try:
            made = getattr(self.definition, method)(*arguments)
        except (TypeError, RuntimeError) as error:
            raise StageError(f"TensorRT refused {name}: {str(error).splitlines()[0]}") from error
        if made is None or self.first_error():
            raise self.fail(name)
        made.name = made.metadata = name  # the latter comes back with the engine's kernels
        return made

    def checked(self, layer: Any, output: int = 0) -> Tensor:
        """An output whose shape TensorRT could infer."""
        tensor = layer.get_output(output)
        try:
            known = tensor is not None and len(tensor.shape) >= 0
        except (RuntimeError, ValueError):
            known = False
        if not known or self.first_error():
            raise self.fail(layer.name)
        return tensor

    def one(self, method: str, *arguments: Any) -> Tensor:
        """The output of a layer that has one."""
        return self.checked(self.layer(method, *arguments))

    # Inputs, constants, outputs

    def _bound(self, name: str) -> str:
        """The input's or output's own name, which `binds` leads back to the one in the whole model."""
        local = self._local(name)
        if local != name:
            self.binds[local] = name
        return local

    def input(self, name: str, dtype: Any, shape: Sequence[int], *, range: Sequence[Sequence[int]] | None = None) -> Tensor:
        """An input; -1 marks dimensions that `range` (least, usual, largest shape) bounds."""
        name = self._bound(name)
        tensor = self.definition.add_input(name, dtype, self.trt.Dims(list(shape)))
        if tensor is None or self.first_error():
            raise self.fail(f"the input {name}")
        if range is not None:
            least, usual, most = range
            self.ranges[name] = (least, usual, most)
        return tensor

    def shape_input(self, name: str, values: tuple[int, int, int]) -> Tensor:
        """An input [1] of INT64 that is read on the host, because shapes follow from it."""
        tensor = self.input(name, self.trt.DataType.INT64, (1,))
        self.shape_inputs[name] = values
        return tensor

    def constant(self, value: Any, name: str = "") -> Tensor:
        """A weight, which has a name to be refitted by, or a small constant; not copied where it is contiguous."""
        array = np.asarray(value)
        array = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        dtype = next(kind for kind, numpy in self.numpy.items() if numpy == array.dtype)
        return self._constant(array, dtype, array.shape, lambda: array, name)

    def packed_constant(self, packed: Array, dtype: Any, shape: Sequence[int], name: str) -> Tensor:
        """A weight of 4-bit elements, two a byte, the even one in the low nibble."""
        packed = np.ascontiguousarray(packed)
        return self._constant(packed, dtype, shape, lambda: _unpack(packed, self.numpy[dtype], shape), name)

    def _constant(self, stored: Array, dtype: Any, shape: Sequence[int], value: Callable[[], Array], name: str) -> Tensor:
        if name and self.external is not None:
            if name not in self.external:
                self.external[name] = stored
                self._inputs[name] = self.input(name, dtype, shape)
                self.constants[self._inputs[name].name] = value
            return self._inputs[name]
        self._kept.append(stored)
        weights = self.trt.Weights(dtype, stored.ctypes.data, math.prod(shape))
        layer = self.layer("add_constant", self.trt.Dims(list(shape)), weights)
        if name and not self.definition.set_weights_name(weights, name):
            raise self.fail(f"the name {name} of a weight")
        tensor = self.checked(layer)
        self.constants[tensor.name] = value
        return tensor

    def output(self, tensor: Tensor, name: str) -> None:
        """Mark `tensor` as an output called `name`."""
        name = self._bound(name)
        tensor.name = name
        self.definition.mark_output(tensor)
        if self.first_error() or tensor.name != name:
            raise self.fail(f"the output {name}")


def _unpack(stored: Array, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Two elements a byte -> one."""
    codes = np.stack([stored & 15, stored >> 4], axis=-1).reshape(shape)
    if dtype == np.dtype(ml_dtypes.int4):
        return ((codes.astype(np.int8) ^ 8) - 8).astype(dtype)
    return codes.view(dtype)
