"""What all test files share: one real build for this machine, made once, and the seed of what a test draws at random.

A run takes a fresh seed, prints it before the first test and again if one fails; the environment variable PIPELINE_TEST_SEED
repeats it. Each test gets a seed of its own from it and the test's name, so neither the order nor the workers matter.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEED = "PIPELINE_TEST_SEED"


def pytest_configure() -> None:
    os.environ.setdefault(SEED, str(secrets.randbelow(2**32)))  # workers inherit the environment


def pytest_report_header() -> str:
    return f"{SEED}={os.environ[SEED]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus and terminalreporter.verbosity < 0:  # which hides the header
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} draws the same numbers again")


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seeds what draws random numbers without a seed of its own, as far as it is imported."""
    seed = zlib.crc32(f"{os.environ[SEED]} {request.node.nodeid}".encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@dataclass(frozen=True)
class Run:
    """One finished command."""

    code: int
    out: str
    err: str

    def events(self) -> list[dict]:
        """The JSON lines of `--json`."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True)
class Workspace:
    """A working directory with a store of its own."""

    folder: Path

    def run(self, *words: str, timeout: float = 900) -> Run:
        """`python -m pipeline WORDS`, as a user would, in this folder."""
        done = subprocess.run(
            self.command(*words), cwd=self.folder, env=self.env(), capture_output=True, text=True, timeout=timeout
        )
        return Run(done.returncode, done.stdout, done.stderr)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pipeline", *words]

    def env(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(ROOT)}

    @property
    def store(self) -> Path:
        return self.folder / ".pipeline"

    def latest(self, stage: str) -> Path:
        """Output folder of the result used last."""
        return (self.store / "latest" / stage).resolve()

    def digests(self) -> dict[str, str]:
        """{stage: output digest} of the results used last."""
        manifests = {
            stage.name: json.loads((stage.resolve().parent / "manifest.json").read_text())
            for stage in sorted((self.store / "latest").iterdir())
        }
        return {stage: manifest["digest"] for stage, manifest in manifests.items()}


@pytest.fixture(scope="session")
def cpu_build(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """`python -m pipeline build +hw=cpu` on the embedded model, once for all workers: the others wait for the store's lock."""
    base = tmp_path_factory.getbasetemp()
    workspace = Workspace((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cpu_build")
    workspace.folder.mkdir(exist_ok=True)
    done = workspace.run("build", "+hw=cpu")
    assert done.code == 0, done.out + done.err
    return workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty working directory."""
    return Workspace(tmp_path)
