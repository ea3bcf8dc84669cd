"""TEST DOUBLE of what `triton_repo/tensorrt/1/tensorrt_runner.py` calls of TensorRT's Python API, and of torch.cuda.

Its engines read their inputs from addresses, interpret the network, and write their outputs to addresses.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.checkpoint import Checkpoint
from pipeline.engines.tensorrt.builder import describe
from pipeline.engines.tensorrt.interpreter import Interpreter
from pipeline.engines.tensorrt.worker import network
from pipeline.formats.numerics import Array

__all__ = ["CUDA", "FakeTensorrt", "Graph", "write_engines"]

DTYPES = {"FLOAT": np.float32, "INT32": np.int32, "INT64": np.int64}


def write_engines(folder: Path, info: dict[str, Any], checkpoint: Path) -> dict[str, Interpreter]:
    """Engine files that hold no more than their names; `info` gets what a build says of them. Name -> what computes it."""
    opened, made = Checkpoint.open(checkpoint), {}
    for name, table in info["engines"].items():
        net, _ = network(opened, "tensorrt_rtx", dict(table), folder)
        table |= describe(net) | {"file": f"{name}.engine"}
        (folder / table["file"]).write_text(name)
        made[name] = Interpreter(net)
    return made


class FakeTensorrt:
    """The module."""

    __version__ = "1.7.1.116"

    class Logger:
        WARNING = 2

        def __init__(self, level: int) -> None: ...

    def __init__(self, info: dict[str, Any], interpreters: dict[str, Interpreter]) -> None:
        self._engines = {name: (info["engines"][name], interpreters[name]) for name in interpreters}

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        """What opens engines."""

        def deserialize(plan: bytes) -> Any:
            engine = self._engines[plan.decode()]
            return SimpleNamespace(create_execution_context=lambda: Context(*engine))

        return SimpleNamespace(deserialize_cuda_engine=deserialize)


class Context:
    """Of one engine; it refuses what TensorRT would."""

    def __init__(self, facts: dict[str, Any], interpreter: Interpreter) -> None:
        self._facts, self._interpreter = facts, interpreter
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Within the profile."""
        least, _, most = self._facts["inputs"][name]["range"]
        self._shapes[name] = shape
        return len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        """Where it lies."""
        self._addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Of an output."""
        declared = self._facts["outputs"][name]["shape"]
        if name == "logits":
            return (self._shapes["logit_rows"][0], declared[1])
        return (*self._shapes["positions"], declared[-1]) if name == "states" else tuple(declared)

    def execute_async_v3(self, stream: int) -> bool:
        """Now."""
        for name in self._facts["outputs"]:
            if name.startswith("present."):  # updated in place
                assert self._addresses[name] == self._addresses[name.replace("present", "cache")]
        outputs = self._interpreter.run({name: self._at(name, facts) for name, facts in self._facts["inputs"].items()})
        for name, facts in self._facts["outputs"].items():
            shape = outputs[name].shape
            _memory(self._addresses[name], shape, facts["dtype"])[...] = outputs[name]
        return True

    def _at(self, name: str, facts: dict[str, Any]) -> Array:
        return _memory(self._addresses[name], self._shapes.get(name, tuple(facts["shape"])), facts["dtype"])


def _memory(address: int, shape: tuple[int, ...], dtype: str) -> Array:
    kind = np.dtype(DTYPES[dtype])
    buffer = (ctypes.c_char * (int(np.prod(shape)) * kind.itemsize)).from_address(address)
    return np.frombuffer(buffer, kind).reshape(shape)


class Graph:
    """In place of a captured one: it computes again."""

    def __init__(self, runner: Any, body: Any, inputs: Any) -> None:
        self._body = body

    def __call__(self, inputs: Any) -> Any:
        return self._body(*inputs)


CUDA = {
    "is_available": lambda: True, "device_count": lambda: 1, "get_device_capability": lambda _: (12, 0),
    "set_device": lambda _: None, "Stream": lambda: SimpleNamespace(synchronize=lambda: None, cuda_stream=0),
    "device": lambda _: nullcontext(), "stream": lambda _: nullcontext(),
}  # fmt: skip
"""Of torch.cuda."""
