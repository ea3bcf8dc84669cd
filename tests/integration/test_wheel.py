"""The installed wheel works in any folder: configuration, data and model code come with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel unpacked, as pip does. What builds it is installed: no network has to be up."""
    folder = tmp_path_factory.mktemp("wheel")
    pip, options = [sys.executable, "-m", "pip"], ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    _run([*pip, "wheel", *options, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)])
    wheel = next(folder.glob("*.whl"))
    _run([*pip, "install", *options, "--target", str(folder / "site"), str(wheel)])
    return folder / "site"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["--help"], "build"),
        (["doctor"], "hydra-core"),
        (["plan", "+hw=b200", "model=deepseek_r1"], "GPU"),
        (["convert", "+hw=cpu", "quant=nvfp4"], "convert"),
        (["explain", "+hw=h200"], "engine"),
    ],
)
def test_commands_run_from_the_wheel(site: Path, tmp_path: Path, command: list[str], expected: str) -> None:
    out = _run([sys.executable, "-m", "pipeline", *command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)})
    assert expected in out


def test_the_wheel_is_the_one_that_ran(site: Path, tmp_path: Path) -> None:
    out = _run(
        [sys.executable, "-c", "import pipeline; print(pipeline.__file__)"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert str(site) in out


@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="there is no C++ compiler")
def test_the_wheel_brings_the_kernels(site: Path, tmp_path: Path) -> None:
    ask = "from pipeline import native; print(native.module().__file__, native.problem())"
    out = _run([sys.executable, "-c", ask], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)})
    assert out.startswith(str(site)) and out.endswith("None\n")


def _run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
