"""CUDA kernels of `plugins/` as CPU functions: the same source, compiled by the host's C++ compiler over `cuda_on_cpu.h`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

__all__ = ["CudaOnCpu"]

HERE = Path(__file__).parent


class CudaOnCpu:
    """Kernels of one source. `signatures`: C types of each kernel's parameters, as in the source."""

    def __init__(self, source: Path, signatures: Mapping[str, str], defines: Mapping[str, int], folder: Path) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler to run CUDA kernels on the CPU with")
        main = folder / "kernels.cpp"
        main.write_text(
            f'#include "cuda_on_cpu.h"\n#include "{source}"\n' + "\n".join(_entry(*item) for item in signatures.items())
        )
        flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-w", f"-I{HERE}"]
        library = folder / "kernels.so"
        values = [f"-D{name}={value}" for name, value in defines.items()]
        subprocess.run([compiler, *flags, *values, str(main), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(self, kernel: str, grid: tuple[int, int, int], threads: int, *args: np.ndarray | float | int | None) -> None:
        """Run every block of the grid, one after the other. Arrays are passed as pointers, None as the null pointer."""
        entry = getattr(self._library, f"run_{kernel}")
        entry(*grid, threads, *(_argument(value) for value in args))


def _entry(kernel: str, types: str) -> str:
    """A C function that launches `kernel`."""
    names = [f"a{index}" for index in range(len(types.split(",")))]
    parameters = ", ".join(f"{kind.strip()} {name}" for kind, name in zip(types.split(","), names, strict=True))
    return (
        f'extern "C" void run_{kernel}(int x, int y, int z, int threads, {parameters}) {{\n'
        f"  dim3_ grid; grid.x = x; grid.y = y; grid.z = z;\n"
        f"  emulator::launch(grid, threads, [=] {{ {kernel}({', '.join(names)}); }});\n}}\n"
    )


def _argument(value: np.ndarray | float | int | None) -> ctypes._SimpleCData:
    if value is None:
        return ctypes.c_void_p()
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)
