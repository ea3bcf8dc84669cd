"""What an engine is compiled with: torch, a C++ compiler, this processor. Nothing here imports torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError, MissingToolError
from pipeline.core.gpu import compute_capabilities, require_cuda

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.core.stage import Determinism

__all__ = ["INSTALL_CXX", "cpu_features", "cxx", "determinism", "requires", "resolve_compiler", "toolchain"]

INSTALL_CXX = "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora, RHEL)"
CPU_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip
"""Instruction sets that Inductor looks for when it picks how wide its loops are, as Linux spells them."""


def toolchain(config: Config) -> dict[str, str]:
    """Name -> version of what shapes the engine's bytes."""
    try:
        versions = {name: metadata.version(name) for name in ("torch", "numpy", "ml_dtypes")}
    except metadata.PackageNotFoundError as error:
        raise MissingToolError(f"engine=torch needs {error.name}, which is not installed: pip install {error.name}.") from error
    assert config.engine.torch is not None
    compiler = resolve_compiler(config.engine.torch.compiler)
    if config.engine.torch.device == "cuda":
        versions["gpu"] = " ".join(sorted({f"sm_{major}{minor}" for major, minor in compute_capabilities()}))
    if compiler == "aoti":
        versions |= {"c++": cxx()[1], "cpu": " ".join(cpu_features())}
    return versions | {"compiler": compiler, "machine": platform.machine()}


def requires(config: Config) -> None:
    """Refuse device=cuda where no GPU can compile and run it: its grouped products need Hopper or newer, in bfloat16."""
    assert config.engine.torch is not None
    settings = config.engine.torch
    if settings.device != "cuda":
        return
    if settings.dtype != "bfloat16":
        raise ConfigError(f"engine.torch.dtype={settings.dtype} is not for device=cuda: set engine.torch.dtype=bfloat16.")
    require_cuda(
        "engine.torch.device", (9, 0), "an engine is compiled on the kind of GPU that runs it. Build it there, or set "
        "engine.torch.device=cpu engine.torch.dtype=float32; convert and verify need no GPU.",
    )  # fmt: skip


def determinism(config: Config) -> Determinism:
    """On a GPU Inductor picks among kernels by timing them; on a CPU the same key gives the same bytes."""
    assert config.engine.torch is not None
    return "numeric" if config.engine.torch.device == "cuda" else "bitwise"


def resolve_compiler(wanted: str) -> str:
    """`auto` is aoti where a C++ compiler works, else export; aoti without one is refused."""
    path, version = cxx()
    if wanted == "aoti" and not path:
        raise MissingToolError(
            f"engine.torch.compiler=aoti needs a C++ compiler that works, and {version}: {INSTALL_CXX}, "
            "or set engine.torch.compiler=export, which needs none and is slower."
        )
    return ("aoti" if path else "export") if wanted == "auto" else wanted


@cache
def cxx() -> tuple[str, str]:
    """Path and version line of the C++ compiler: $CXX, else g++, else clang++. Without one an empty path and why."""
    reasons = []
    for name in dict.fromkeys(filter(None, (os.environ.get("CXX"), "g++", "clang++"))):
        path = shutil.which(name)
        if path and _compiles(path):
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            return path, text.splitlines()[0]
        reasons.append(f"{name} {'cannot build a shared library' if path else 'is not on PATH'}")
    return "", " and ".join(reasons)


def _compiles(path: str) -> bool:
    """Whether the compiler, its C++ library and its linker are there."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe.cpp").write_text("#include <cstddef>\nstd::size_t probe() { return 0; }\n")
        command = [path, "-shared", "-fPIC", "-o", "probe.so", "probe.cpp"]
        return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


@cache
def cpu_features() -> tuple[str, ...]:
    """Those of CPU_FEATURES that this machine has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(name for name in CPU_FEATURES if name in flags)
