"""Compiled kernels of the weight formats: the same bytes as `pipeline.formats`, a few hundred times as fast.

`src/` is compiled by the package's own build (`build_hook.py`) into `_kernels`; without a compiler the package installs
without it, and `pipeline.formats.fast` computes everything in numpy. `R1_NATIVE` forces a level (avx512, avx2, neon,
scalar), or `off`. Kernels release the GIL and write into the caller's buffers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.native.build import SOURCES, sources_digest

__all__ = ["VARIABLE", "available", "kernels", "levels", "module", "problem", "say_if_slow"]

VARIABLE = "R1_NATIVE"


def available() -> bool:
    """Whether compiled kernels are there and not switched off."""
    return kernels() is not None


def kernels(level: str | None = None) -> Any | None:
    """The kernels of a level (of `R1_NATIVE`, else the best that this processor runs); None where there are none."""
    wanted = level or os.environ.get(VARIABLE) or None
    if wanted == "off" or problem() is not None:
        return None
    names = levels()
    if wanted is not None and wanted not in names:
        raise ConfigError(f"{VARIABLE}={wanted}: this processor runs {', '.join(names)}; choose one of them, or off.")
    return module().level(wanted or names[0])


def levels() -> tuple[str, ...]:
    """Instruction sets that this processor and this build have in common, the best first; none without the build."""
    return () if problem() is not None else tuple(module().levels())


def module() -> ModuleType:
    """The compiled module; ImportError without it."""
    from pipeline.native import _kernels

    return _kernels


@cache
def problem() -> str | None:
    """Why there are no compiled kernels, in a sentence; None where there are."""
    again = "install the package again (pip install -e .) where a C++17 compiler is"
    try:
        built_from = module().sources
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) or "_kernels" in str(error)
        return f"not built: {again}" if missing else f"not loadable ({error}): {again}"
    if SOURCES.is_dir() and built_from != sources_digest():
        return f"built from other sources than those beside it: {again}"
    return None


def say_if_slow(say: Callable[[str], None]) -> None:
    """What a user should know before numpy computes for hours; nothing where there are kernels, or `off` was asked for."""
    if why := problem():
        say(f"numpy gives the same bytes as the compiled kernels, about 65 times slower; they are {why}.")
