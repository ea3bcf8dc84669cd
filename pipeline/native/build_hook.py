"""Hatchling's hook: a wheel, or an editable install, gets the compiled kernels; an sdist carries the sources.

Without a working compiler the package is built without them, and says so: everything then runs in numpy, with the same
bytes. `R1_NATIVE_REQUIRE=1` makes that an error instead.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["NativeBuildHook"]


class NativeBuildHook(BuildHookInterface):
    """Named by `path` in pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one of this platform; or leave it pure, with a warning."""
        if self.target_name != "wheel":
            return
        try:
            built = _load("build").build()
        except (OSError, subprocess.CalledProcessError, ImportError) as error:
            self.leave_out(error)
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(f"pipeline/native/{built.name}")

    def leave_out(self, error: Exception) -> None:
        """Go on without kernels, or stop where they were required."""
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        text = f"The native kernels of r1-pipeline were not built: {reason[-2000:]}"
        if os.environ.get("R1_NATIVE_REQUIRE") == "1":
            sys.exit(f"{text}\nInstall a C++17 compiler (apt-get install g++), or unset R1_NATIVE_REQUIRE.")
        print(f"{text}\nInstalling without them: conversion runs in numpy, with the same results, slowly.", file=sys.stderr)


def _load(name: str) -> ModuleType:
    """A file beside this one; the package itself cannot be imported while it is being built."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
