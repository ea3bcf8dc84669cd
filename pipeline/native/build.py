"""Compiles `src/` into `_kernels`, beside this file. Standard library only, and pybind11 for the binding.

One file for each instruction set, with its own flags; which of them runs is decided at run time. `CXX` and `CXXFLAGS`
are honoured.
"""

from __future__ import annotations

import hashlib
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

__all__ = ["FLAGS", "LEVELS", "SOURCES", "build", "compiler", "sources_digest"]

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
TARGET = HERE / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
# No contraction of a * b + c: the kernels promise the roundings of numpy. The others change no result.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-w"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", "-mprefer-vector-width=512"]
_X86 = {"avx512": _AVX512, "avx2": ["-mavx2", "-mf16c"]}
LEVELS: dict[str, dict[str, list[str]]] = {
    "x86_64": _X86, "AMD64": _X86, "aarch64": {"neon": []}, "arm64": {"neon": []},
}  # fmt: skip
"""Flags of the levels that a processor family may have beside the portable one."""


def build() -> Path:
    """The compiled module, made if it is not that of these very sources: installers ask more than once."""
    if not (TARGET.exists() and sources_digest().encode() in TARGET.read_bytes()):
        TARGET.unlink(missing_ok=True)
        _compile(TARGET)
    return TARGET


def sources_digest() -> str:
    """SHA-256 of names and contents of the C++ files and of this file; the module carries that of its own sources."""
    found = hashlib.sha256()
    for file in [Path(__file__), *sorted(SOURCES.glob("*.[ch]*"))]:
        content = file.read_bytes()
        found.update(f"{file.name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def compiler() -> list[str]:
    """Command of the C++ compiler, with the user's flags."""
    names = [os.environ.get("CXX"), "g++", "clang++"]
    found = next((name for name in names if name and shutil.which(shlex.split(name)[0])), None)
    if found is None:
        raise FileNotFoundError("no C++ compiler was found (looked for $CXX, g++ and clang++)")
    return [*shlex.split(found), *shlex.split(os.environ.get("CXXFLAGS", ""))]


def _compile(target: Path) -> None:
    """Every file on its own, then the module, which appears in one step."""
    levels = {f"level_{name}": flags for name, flags in LEVELS.get(platform.machine(), {}).items()}
    units = {"module": _module_flags(), "level_scalar": [], **levels}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(name)
        objects = list(pool.map(lambda unit: _compile_unit(*unit, folder), units.items()))
        extra = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-s"]
        _run([*compiler(), "-shared", *map(str, objects), *extra, "-o", str(folder / target.name)])
        partial = target.with_suffix(".part")
        shutil.copyfile(folder / target.name, partial)
        partial.replace(target)


def _compile_unit(name: str, flags: list[str], folder: Path) -> Path:
    result = folder / f"{name}.o"
    _run([*compiler(), *FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(result)])
    return result


def _module_flags() -> list[str]:
    """For the binding: headers of Python and pybind11, and what the module is built from."""
    import pybind11

    includes = [sysconfig.get_paths()["include"], pybind11.get_include()]
    return [f'-DNATIVE_SOURCES="{sources_digest()}"', *(f"-I{folder}" for folder in includes)]


def _run(command: list[str]) -> None:
    """Run, keeping what it says for the error."""
    subprocess.run(command, check=True, capture_output=True, text=True)
