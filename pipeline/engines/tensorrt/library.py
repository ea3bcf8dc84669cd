"""The one place that imports TensorRT: two libraries with one network API.

`tensorrt` (11.x) builds for the data-centre GPU that is present, has plugins and a MoE layer; `tensorrt_rtx` builds for
a list of targets without any GPU, and has neither. A network does not know which it is made with. They differ in the import
(here), in targets, in how experts are lowered and in plugins (`targets.py`; `builder.py` hands targets over, `plugins.py` kernels).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from pipeline.core.errors import ConfigError, MissingToolError

__all__ = ["INSTALL", "LIBRARIES", "installed_version", "library_for", "listed", "load", "process_logger"]

LIBRARIES: dict[str, tuple[str, ...]] = {
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
"""Library -> the modules that carry its Python API; PyPI's wheels of TensorRT-RTX have the second one alone."""
DISTRIBUTIONS = {
    "tensorrt": ("tensorrt_cu13", "tensorrt", "tensorrt_cu13_bindings"),
    "tensorrt_rtx": ("tensorrt_rtx_cu13_bindings", "tensorrt_rtx"),
}
INSTALL = {
    "tensorrt": "pip install tensorrt-cu13==11.4.0.106, on a machine with that GPU",
    "tensorrt_rtx": "pip install 'r1-pipeline[rtx]'",
}
RTX_TARGETS = (75, 80, 86, 89, 120, 121)
"""Compute capabilities that TensorRT-RTX 1.7 builds for."""
TENSORRT_TARGETS = (80, 86, 89, 90, 100, 103, 110, 120, 121)
"""Those that TensorRT 11 runs on; it builds for the GPU of the machine it runs on."""


def library_for(sm: int, wanted: str = "auto") -> str:
    """The library that builds for compute capability `sm`; `auto` prefers the one that needs no GPU.

    Raises:
        ConfigError: none does, or `wanted` does not.
    """
    able = [name for name, targets in (("tensorrt_rtx", RTX_TARGETS), ("tensorrt", TENSORRT_TARGETS)) if sm in targets]
    if wanted != "auto" and wanted not in able:
        others = f"engine.tensorrt.library={able[0]} does" if able else "no library here does"
        raise ConfigError(f"engine.tensorrt.library={wanted} does not build for SM{sm}; {others}.")
    if not able:
        raise ConfigError(
            f"No TensorRT library builds for SM{sm}: tensorrt_rtx has {listed(RTX_TARGETS)}, tensorrt {listed(TENSORRT_TARGETS)}."
        )
    return able[0] if wanted == "auto" else wanted


def listed(targets: Iterable[int]) -> str:
    """SM90, SM120"""
    return ", ".join(f"SM{target}" for target in targets)


def installed_version(library: str) -> str | None:
    """Version of the library, without importing it; None where it is not installed."""
    if not any(find_spec(module) for module in LIBRARIES[library]):
        return None
    for name in DISTRIBUTIONS[library]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


@cache
def load(library: str) -> ModuleType:
    """The library's module.

    Raises:
        MissingToolError: it is not installed, or its shared libraries cannot be loaded.
    """
    for module in LIBRARIES[library]:
        if find_spec(module):
            try:
                return import_module(module)
            except (ImportError, OSError) as error:
                raise MissingToolError(f"{module} is installed but cannot be loaded ({error}): {INSTALL[library]}.") from error
    raise MissingToolError(f"{library} is not installed: {INSTALL[library]}.")


@cache
def process_logger(trt: ModuleType) -> Any:
    """The process's one logger, which never dies: TensorRT keeps a pointer to the first one it was given."""

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        """Warnings and errors, as (severity, text)."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[str, str]] = []

        def log(self, severity: Any, text: str) -> None:
            if int(severity) <= int(trt.ILogger.WARNING):
                self.lines.append((severity.name, text))

    return Logger()
