"""The NEON level, compiled for AArch64 and run by an emulator: it must make the bytes of the portable level."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.native.build import FLAGS, SOURCES, compiler

PROGRAM = Path(__file__).parents[1] / "_utils" / "native_levels.cpp"
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def hashes(command: list[str], level: str, folder: Path, runner: list[str]) -> list[str]:
    """What the program prints: a hash of each result of each kernel."""
    program = folder / level
    sources = [str(PROGRAM), str(SOURCES / f"level_{level}.cpp"), f"-I{SOURCES}", f"-DLEVEL={level}_kernels"]
    subprocess.run([*command, *FLAGS, *sources, "-static", "-o", str(program)], check=True, timeout=300)
    done = subprocess.run([*runner, str(program)], check=True, timeout=300, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(
    not shutil.which(CROSS) or not shutil.which(EMULATOR),
    reason=f"needs {CROSS} and {EMULATOR} (apt-get install g++-aarch64-linux-gnu qemu-user)",
)
def test_neon_makes_the_bytes_of_the_portable_level(tmp_path: Path) -> None:
    wanted = hashes(compiler(), "scalar", tmp_path, [])
    assert len(wanted) > 100
    assert hashes([CROSS], "neon", tmp_path, [EMULATOR]) == wanted
