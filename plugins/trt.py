"""Plugins of TensorRT: what every `plugins/<name>/trt.py` declares, and how `tensorrt.plugin` gets it ahead of time.

One kernel, as PTX for one compute capability, lies in the engine with its grid and its whole numbers as expressions of the inputs'
shapes; where the engine runs neither Python nor this package is needed. TensorRT hands a kernel its inputs, then whole numbers of
32 bits, then its outputs: `arranged` puts the parameters of a kernel into that order and makes constants of the rest.
What takes more than one launch, or arguments that only the host can make, is in `trt_class.py`.

Nothing here was run by TensorRT: the declarations went through `tensorrt.plugin` of 11.4 with stand-ins for its libraries, and
the kernels through NVRTC.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.core.errors import StageError
from plugins.nvrtc import FLAGS, compile_source, compiler_version, source_text

__all__ = [
    "NAMESPACE", "Kernel", "Plugin", "arranged", "call", "digest", "ptx", "register", "sizes", "uncovered",
]  # fmt: skip

NAMESPACE = "r1_pipeline"
Size = Any
"""An int, or an expression of `tensorrt.plugin`: of both, +, * and // by an int are used."""
Sizes = Mapping[str, Sequence[Size]]
"""Input -> its dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of a .cu file for some shapes."""

    source: Path
    name: str
    macros: Mapping[str, int]
    grid: tuple[Size, Size, Size]
    threads: int
    numbers: Mapping[str, Size] = field(default_factory=dict)
    """Parameters that follow from shapes, 32 bits each."""
    constants: Mapping[str, float | int | str] = field(default_factory=dict)
    """Parameters that are known when the kernel is compiled; a pointer as an expression of others."""
    shared: int = 0
    """Bytes of dynamic shared memory."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plugin:
    """An op as TensorRT sees it. Functions get the inputs' sizes by name, then the attributes."""

    name: str
    inputs: Mapping[str, str]
    """Name -> `DataType`; names are the kernel's where it has them."""
    outputs: Mapping[str, str]
    attributes: Mapping[str, type]
    shapes: Callable[..., Sequence[Sequence[Size]]]
    """Of the outputs."""
    reference: Callable[..., Sequence[Any]]
    """The op in torch, inputs in order, attributes by name: what the interpreter computes and, without a `kernel`, the GPU."""
    kernel: Callable[..., Kernel] | None
    """None: the op is launched from the host (`trt_class.py`)."""
    refusal: Callable[..., str]
    """Why there is no kernel for these sizes; empty where there is one. Dynamic sizes are -1."""
    least_sm: int
    """The oldest compute capability, x10, that has the instructions."""
    only_sm: int = 0
    """The only one, where kernels have instructions that no other has."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Output -> the input that it is written over."""
    tactics: Sequence[int] = ()
    """Variants that TensorRT may time; `kernel` gets the chosen one as `tactic`, 0 where there is no choice."""


def uncovered(plugin: Plugin, sm: int) -> str:
    """Why there is no kernel for this compute capability; empty where there is one."""
    if plugin.only_sm:
        return "" if sm == plugin.only_sm else f"the kernel is for SM{plugin.only_sm} alone, not SM{sm}"
    return "" if sm >= plugin.least_sm else f"the kernel needs SM{plugin.least_sm} or newer, not SM{sm}"


def sizes(plugin: Plugin, shapes: Sequence[Sequence[Size]]) -> dict[str, tuple[Size, ...]]:
    """The inputs' dimensions by name."""
    return {name: tuple(shape) for name, shape in zip(plugin.inputs, shapes, strict=True)}


def arranged(plugin: Plugin, kernel: Kernel) -> bytes:
    """The kernel's source with its parameters in TensorRT's order.

    Raises:
        StageError: it has no such kernel, or a parameter that nothing gives a value.
    """
    text = source_text(kernel.source).decode()
    entry = re.search(rf"^{kernel.name}\(([^)]*)\) \{{$", text, re.MULTILINE)
    if entry is None:
        raise StageError(f"{kernel.source.name} of {plugin.name} has no kernel {kernel.name}(…) {{ at the beginning of a line.")
    declared = {part.split()[-1].lstrip("*"): " ".join(part.split()) for part in entry[1].split(",")}
    order = [*plugin.inputs, *kernel.numbers, *plugin.outputs]
    if astray := sorted(declared.keys() - set(order) - kernel.constants.keys()):
        raise StageError(f"{kernel.name} of {plugin.name} has parameters that its trt.py gives no value: {', '.join(astray)}.")
    listed = ", ".join(declared.get(name, f"const void* {name}") for name in order)
    constants = "".join(f"\n  {_constant(declared[name], value)};" for name, value in kernel.constants.items())
    return f"{text[: entry.start()]}{kernel.name}({listed}) {{{constants}{text[entry.end() :]}".encode()


def _constant(declared: str, value: float | int | str) -> str:
    if isinstance(value, str):
        return f"{declared} = {value}"
    return f"const {declared} = " + (f"(float){value.hex()}" if isinstance(value, float) else str(int(value)))


def _options(kernel: Kernel, target: str) -> tuple[str, ...]:
    return f"--gpu-architecture={target}", *FLAGS, *(f"-D{name}={value}" for name, value in sorted(kernel.macros.items()))


@functools.cache
def _compiled(source: bytes, options: tuple[str, ...]) -> bytes:
    return compile_source(source, options, ptx=True).rstrip(b"\0")


def ptx(plugin: Plugin, kernel: Kernel, sm: int) -> bytes:
    """The kernel for one compute capability, which TensorRT embeds; needs NVRTC, no GPU."""
    return _compiled(arranged(plugin, kernel), _options(kernel, f"compute_{sm}"))


def digest(plugin: Plugin, kernel: Kernel, sm: int, attributes: Mapping[str, Any]) -> str:
    """SHA-256 of all that makes the kernel: source, macros, compute capability, compiler, launch and attributes."""
    launch = kernel.threads, kernel.shared, sorted(kernel.numbers), sorted(attributes.items())
    parts = arranged(plugin, kernel), _options(kernel, f"compute_{sm}"), compiler_version(), launch
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def call(plugin: Plugin, attributes: Mapping[str, Any], known: str) -> str:
    """What a plugin's layer carries as its metadata: which op it is, with what, and the digest of its kernel."""
    return json.dumps({"plugin": plugin.name, "attributes": dict(attributes), "digest": known}, sort_keys=True)


def _launch_parameters(trtp: Any, kernel: Kernel) -> tuple[Any, Any]:
    """`KernelLaunchParams` and the expressions of the whole numbers."""
    grid = dict(zip(("grid_x", "grid_y", "grid_z"), kernel.grid, strict=True))
    numbers = trtp.SymIntExprs(len(kernel.numbers))
    for index, value in enumerate(kernel.numbers.values()):
        numbers[index] = trtp.SymInt32(value)
    return trtp.KernelLaunchParams(block_x=kernel.threads, shared_mem=kernel.shared, **grid), numbers


def register(plugin: Plugin, sm: int) -> Any:
    """Tell `tensorrt.plugin` of it, once a process, with kernels for one compute capability; what makes its layers."""
    import_module("numpy.typing")  # which tensorrt.plugin 11.4 uses without importing it
    trtp = import_module("tensorrt.plugin")
    known = getattr(trtp.op, NAMESPACE, None)
    if known is None or not hasattr(known, plugin.name):
        identity = f"{NAMESPACE}::{plugin.name}"
        trtp.register(identity, lazy_register=True)(_describe(trtp, plugin))
        trtp.aot_impl(identity)(_implement(trtp, plugin, sm))
        if plugin.tactics:
            trtp.autotune(identity)(_choices(trtp, plugin))
    return getattr(getattr(trtp.op, NAMESPACE), plugin.name)


def _signed(function: Callable[..., Any], plugin: Plugin, trtp: Any, rest: Mapping[str, Any], returns: Any) -> Callable[..., Any]:
    """The function with the signature that `tensorrt.plugin` reads: inputs, attributes, `rest`."""
    types = {**dict.fromkeys(plugin.inputs, trtp.TensorDesc), **plugin.attributes, **rest}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in types.items()]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return function


def _outputs(trtp: Any, plugin: Plugin) -> Any:
    return tuple[tuple(trtp.TensorDesc for _ in plugin.outputs)]  # type: ignore[misc]


def _describe(trtp: Any, plugin: Plugin) -> Callable[..., Any]:
    kinds = import_module("tensorrt").DataType

    def describe(*inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        given = dict(zip(plugin.inputs, inputs, strict=True))
        shapes = plugin.shapes(sizes(plugin, [each.shape_expr for each in inputs]), **attributes)
        return tuple(
            given[plugin.aliases[name]].aliased() if name in plugin.aliases
            else trtp.from_shape_expr(tuple(shape), getattr(kinds, dtype))
            for (name, dtype), shape in zip(plugin.outputs.items(), shapes, strict=True)
        )  # fmt: skip

    return _signed(describe, plugin, trtp, {}, _outputs(trtp, plugin))


def _implement(trtp: Any, plugin: Plugin, sm: int) -> Callable[..., Any]:
    count, make = len(plugin.inputs), plugin.kernel
    assert make is not None

    def implement(*given: Any) -> tuple[str, bytes, Any, Any]:
        attributes = dict(zip(plugin.attributes, given[count:-2], strict=True))
        shapes = [
            [known if known >= 0 else symbol for known, symbol in zip(each.shape, each.shape_expr, strict=True)]
            for each in given[:count]
        ]
        variant = {"tactic": given[-1]} if plugin.tactics else {}
        kernel = make(sizes(plugin, shapes), **attributes, **variant)
        return kernel.name, ptx(plugin, kernel, sm), *_launch_parameters(trtp, kernel)

    rest = {"outputs": _outputs(trtp, plugin), "tactic": int}
    return _signed(implement, plugin, trtp, rest, tuple[str, bytes, trtp.KernelLaunchParams, trtp.SymIntExprs])


def _choices(trtp: Any, plugin: Plugin) -> Callable[..., Any]:
    kinds = (*plugin.inputs.values(), *plugin.outputs.values())
    types = ",".join({"FLOAT": "FP32", "HALF": "FP16"}.get(kind, kind) for kind in kinds)

    def choices(*_: Any) -> list[Any]:
        return [trtp.AutoTuneCombination(types, "LINEAR", list(plugin.tactics))]

    rest = {"outputs": _outputs(trtp, plugin)}
    return _signed(choices, plugin, trtp, rest, list[trtp.AutoTuneCombination])
