"""Fixtures that more than one test file shares: one real build for this machine, made once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
