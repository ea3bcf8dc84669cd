"""The package builds its kernels where a compiler works, and without one says what it left out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", ".gitignore", "pipeline", "plugins", "conf", "triton_repo")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project that nothing was built in."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copyfile(ROOT / part, folder / part)
    return folder


def wheel(checkout: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", str(out), str(checkout)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False)


def test_without_a_working_compiler_the_wheel_is_pure_and_says_so(checkout: Path, tmp_path: Path) -> None:
    done = wheel(checkout, tmp_path / "out", CXX="false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "native kernels of r1-pipeline were not built" in done.stdout + done.stderr
    (built,) = (tmp_path / "out").glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    shutil.unpack_archive(built, tmp_path / "site", "zip")
    ask = "from pipeline import native; print(native.available(), native.problem())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    told = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.startswith("False not built: install the package again")


def test_kernels_that_are_required_and_cannot_be_built_stop_the_build(checkout: Path, tmp_path: Path) -> None:
    done = wheel(checkout, tmp_path / "out", CXX="false", R1_NATIVE_REQUIRE="1")
    assert done.returncode != 0
    assert "apt-get install g++" in done.stdout + done.stderr


def test_the_sdist_carries_sources_and_nothing_built(checkout: Path, tmp_path: Path) -> None:
    (checkout / "pipeline" / "native" / "_kernels.cpython-39-other.so").write_bytes(b"stale")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path / "out"), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (tmp_path / "out").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pipeline/native/build_hook.py", "pipeline/native/src/module.cpp", "pipeline/native/src/simd_neon.h"} <= names
    assert not [name for name in names if name.endswith(".so")]
