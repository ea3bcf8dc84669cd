"""From a network definition to an engine file: targets, profile, progress, cancelling, and a stream to disk.

Runs in a process of its own (`worker.py`), because TensorRT ends the process on some mistakes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.core.errors import StageError
from pipeline.engines.tensorrt.definition import Definition
from pipeline.engines.tensorrt.library import installed_version
from pipeline.engines.tensorrt.listing import kind_of, layers_of
from pipeline.engines.tensorrt.network.collectives import KIND as COLLECTIVE

__all__ = ["build", "describe", "fingerprint"]


def build(
    net: Definition, library: str, targets: Sequence[int], path: Path, *, refit: bool, advance: Callable[[int], None],
    stopped: Callable[[], bool],
) -> None:  # fmt: skip
    """Write the engine to `path`. `advance` gets percent points; `stopped` says whether to give up.

    Raises:
        StageError: TensorRT refused, with its first reason.
        KeyboardInterrupt: `stopped` said so.
    """
    trt = net.trt
    net.builder.max_threads = 1  # else threads race for addresses, by which TensorRT orders some of an engine's tables
    config = net.builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if refit:
        config.set_flag(trt.BuilderFlag.REFIT)
    _set_targets(net, config, library, targets)
    _set_profile(net, config)
    monitor = _monitor(trt, advance, stopped)
    config.progress_monitor = monitor
    with path.open("wb") as file:
        ok = net.builder.build_serialized_network_to_stream(net.definition, config, _writer(trt, file))
    if monitor.cancelled:
        raise KeyboardInterrupt
    if not ok:
        path.unlink()
        raise net.fail(f"to build {path.stem}")


def _set_targets(net: Definition, config: Any, library: str, targets: Sequence[int]) -> None:
    """TensorRT-RTX takes a list; TensorRT builds for the GPU that it finds."""
    if library == "tensorrt":
        return
    config.num_compute_capabilities = len(targets)
    for index, sm in enumerate(targets):
        kind = getattr(net.trt.ComputeCapability, f"SM{sm}", None)
        if kind is None or not config.set_compute_capability(kind, index):
            raise StageError(
                f"{library} {installed_version(library)} does not build for SM{sm}: choose other engine.tensorrt.targets."
            )


def _set_profile(net: Definition, config: Any) -> None:
    """One profile: the ranges of every input."""
    profile = net.builder.create_optimization_profile()
    for name, (least, usual, most) in net.ranges.items():
        profile.set_shape(name, least, usual, most)
    for name, values in net.shape_inputs.items():
        profile.set_shape_input(name, *([value] for value in values))
    if config.add_optimization_profile(profile) < 0:
        raise net.fail("the ranges of the inputs")


def _writer(trt: Any, file: Any) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc, name-defined]
        """Chunks of at most 64 MiB, as they come."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            return int(file.write(data))

    return Writer()


def _monitor(trt: Any, advance: Callable[[int], None], stopped: Callable[[], bool]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        """Percent of the outermost phase and of the phase right inside it. Nothing here may raise: TensorRT would go on."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.cancelled = False
            self._phases: list[list[Any]] = []
            self._told = 0

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            self._phases.append([name, 0, max(num_steps, 1)])

        def phase_finish(self, name: str) -> None:
            self._phases = [phase for phase in self._phases if phase[0] != name]
            if not self._phases:
                self._tell(100)

        def step_complete(self, name: str, step: int) -> bool:
            for phase in self._phases:
                if phase[0] == name:
                    phase[1] = step + 1
            outer, inner = self._phases[0], self._phases[1] if len(self._phases) > 1 else ["", 0, 1]
            self._tell(int(99 * min(1, (outer[1] + min(1, inner[1] / inner[2])) / outer[2])))
            self.cancelled = self.cancelled or stopped()
            return not self.cancelled

        def _tell(self, percent: int) -> None:
            if percent > self._told:
                advance(percent - self._told)
                self._told = percent

    return Monitor()


def describe(net: Definition) -> dict[str, Any]:
    """Inputs and outputs as the runtime has to bind them, what the ranks exchange, and what the network is."""
    return {
        "inputs": {tensor.name: _tensor(net, tensor) for tensor in _each(net.definition, "input")},
        "outputs": {tensor.name: _tensor(net, tensor) for tensor in _each(net.definition, "output")},
        "collectives": list(_collectives(net)),
        "layers": net.definition.num_layers,
        "plugins": net.plugins.plain() if net.plugins else None,
        "network": fingerprint(net),
    }


def _each(definition: Any, kind: str) -> list[Any]:
    count = getattr(definition, f"num_{kind}s")
    return [getattr(definition, f"get_{kind}")(index) for index in range(count)]


def _tensor(net: Definition, tensor: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
    if tensor.name in net.ranges:
        facts["range"] = [list(shape) for shape in net.ranges[tensor.name]]
    if tensor.name in net.binds:
        facts["binds"] = net.binds[tensor.name]
    if tensor.name in net.shape_inputs:
        facts["values"] = list(net.shape_inputs[tensor.name])
    return facts


def _collectives(net: Definition) -> Iterator[dict[str, Any]]:
    """Each with what this rank brings; `row_bytes` are those of what one token brings."""
    for layer, inputs, _ in layers_of(net):
        if kind_of(layer) == COLLECTIVE:
            brought = inputs[0]
            shape, size = list(brought.shape), net.numpy[brought.dtype].itemsize
            row = size * math.prod(dim for dim in shape if dim > 0)
            yield {"collective": layer.metadata, "dtype": brought.dtype.name, "shape": shape, "row_bytes": row}


def fingerprint(net: Definition) -> str:
    """SHA-256 over every layer (its name, type, inputs, outputs, their types and shapes), the ranges, and, where weights are
    inputs, the constants that are left. So what was interpreted is known to be what was built, and alike segments to be alike."""
    digest = hashlib.sha256(repr((sorted(net.ranges.items()), sorted(net.shape_inputs.items()))).encode())
    for layer, inputs, outputs in layers_of(net):
        told = [layer.name, kind_of(layer), layer.metadata, *("" if tensor is None else tensor.name for tensor in inputs)]
        told += [f"{tensor.name} {tensor.dtype.name} {tuple(tensor.shape)}" for tensor in outputs]
        digest.update("\0".join(told).encode() + b"\n")
        if net.external is not None and kind_of(layer) == "CONSTANT":
            digest.update(net.constants[outputs[0].name]().tobytes())
    return digest.hexdigest()
