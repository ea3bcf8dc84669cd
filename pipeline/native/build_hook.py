"""Hatchling's hook that compiles `src/` into `pipeline/native/_kernels`, beside this file.

One file for each instruction set, with its own flags; which of them runs is decided at run time. `CXX` and `CXXFLAGS`
are honoured. Without a working compiler the package is built without the kernels, and says so: everything then runs in
numpy, with the same bytes. `R1_NATIVE_REQUIRE=1` makes that an error instead.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
# No contraction of a * b + c: the kernels promise the roundings of numpy.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-w"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", "-mprefer-vector-width=512"]
LEVELS = {
    "x86_64": {"level_avx512": AVX512, "level_avx2": ["-mavx2", "-mf16c"]},
    "aarch64": {"level_neon": []},
}
LEVELS["AMD64"], LEVELS["arm64"] = LEVELS["x86_64"], LEVELS["aarch64"]


class NativeBuildHook(BuildHookInterface):
    """Compile for a wheel or an editable install; an sdist carries the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one of this platform; or leave it pure, with a warning."""
        if self.target_name != "wheel":
            return
        target = HERE / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
        try:
            if not is_current(target):
                target.unlink(missing_ok=True)
                compile_kernels(target)
        except (OSError, subprocess.CalledProcessError, ImportError) as error:
            self.leave_out(error)
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(f"pipeline/native/{target.name}")

    def leave_out(self, error: Exception) -> None:
        """Go on without kernels, or stop where they were required."""
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        text = f"The native kernels of r1-pipeline were not built: {reason[-2000:]}"
        if os.environ.get("R1_NATIVE_REQUIRE") == "1":
            sys.exit(f"{text}\nInstall a C++17 compiler (apt-get install g++), or unset R1_NATIVE_REQUIRE.")
        self.app.display_warning(f"{text}\nInstalling without them: conversion runs in numpy, with the same results, slowly.")


def is_current(target: Path) -> bool:
    """Whether an earlier build made it from these very sources: installers build more than once."""
    return target.exists() and sources_digest().encode() in target.read_bytes()


def compile_kernels(target: Path) -> None:
    """Compile every file, link them, and put the module in its place in one step."""
    levels = {"level_scalar": [], **LEVELS.get(platform.machine(), {})}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        units = [*levels.items(), ("module", module_flags())]
        objects = list(pool.map(lambda unit: compile_unit(*unit, Path(folder)), units))
        linked = Path(folder) / target.name
        extra = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        run([*compiler(), "-shared", "-s", *map(str, objects), *extra, "-o", str(linked)])
        partial = target.with_suffix(".part")
        shutil.copyfile(linked, partial)
        partial.replace(target)


def compile_unit(name: str, flags: list[str], folder: Path) -> Path:
    """One object file."""
    result = folder / f"{name}.o"
    run([*compiler(), *FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(result)])
    return result


def module_flags() -> list[str]:
    """For the binding: headers of Python and pybind11, and what the module is built from."""
    import pybind11

    includes = [sysconfig.get_paths()["include"], pybind11.get_include()]
    return [f'-DNATIVE_SOURCES="{sources_digest()}"', *(f"-I{folder}" for folder in includes)]


def sources_digest() -> str:
    """As the package computes it; the build cannot import the package, which is not installed yet."""
    spec = importlib.util.spec_from_file_location("digest", HERE / "digest.py")
    assert spec is not None and spec.loader is not None
    digest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digest)
    return digest.sources_digest(HERE)


def compiler() -> list[str]:
    """Command of the C++ compiler, with the user's flags."""
    names = [os.environ.get("CXX"), "g++", "clang++"]
    found = next((name for name in names if name and shutil.which(shlex.split(name)[0])), None)
    if found is None:
        raise FileNotFoundError("no C++ compiler was found (looked for $CXX, g++ and clang++)")
    return [*shlex.split(found), *shlex.split(os.environ.get("CXXFLAGS", ""))]


def run(command: list[str]) -> None:
    """Run, keeping what it says for the error."""
    subprocess.run(command, check=True, capture_output=True, text=True)
