"""What all test files share: real builds for this machine, made once, their order, and the seed of what is drawn at random.

A run takes a fresh seed, prints it before the first test and again if one fails; the environment variable PIPELINE_TEST_SEED
repeats it. Each test gets a seed of its own from it and the test's name, so neither the order nor the workers matter.
"""

from __future__ import annotations

import gc
import json
import os
import random
import secrets
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests._utils import random_checkpoint

ROOT = Path(__file__).parents[1]
QUICK = ("+hw=cpu", "engine.torch.compiler=export", "verify.tokens=512", "checkpoint=../two_layers")
"""The words of `quick_build`, in the folder of a `Workspace`."""
LONG = (
    "engine_torch_build", "build", "plan_search", "plugins_nvrtc", "tensorrt_engine", "tensorrt_network", "engine_torch_plugins",
    "onnx", "bench_block", "native_neon", "plugins_fp4_allgather", "reference_model", "tensorrt_runtime", "verify", "recipes",
)  # fmt: skip
"""Files that take longest, longest first."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""A core has a worker already: threads of torch beside it wait for each other, in `verify` for half of the processor's time."""
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""An engine takes a thread a core all the same, in servers too: they sleep where they wait, not spin on a worker's core."""

SEED = "PIPELINE_TEST_SEED"


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEED, str(secrets.randbelow(2**32)))  # workers inherit the environment
    config.option.loadscopereorder = False  # xdist's own order is by how many tests a file has, which would undo the one below


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: the garbage collector does not walk through it again and again, a tenth of the processor's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where workers share the files, long ones start first, then those that wait for servers, so that no worker ends alone."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    tests, ranks = Counter(item.path for item in items), {f"test_{name}.py": rank for rank, name in enumerate(LONG)}

    def place(item: pytest.Item) -> tuple[int, bool, int, str]:
        path = item.path
        return ranks.get(path.name, len(LONG)), path.parent.name != "integration", -tests[path], path.as_posix()

    items.sort(key=place)


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


@pytest.fixture(autouse=True)
def _threads() -> None:
    """As many as the environment says: an engine that ran in this process sets its own number, one for each core, for good."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))


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
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def built(folder: Path, *words: str) -> Workspace:
    """A workspace in which `build WORDS` was run: the first worker builds, the others wait for the store's lock."""
    folder.mkdir(exist_ok=True)
    done = Workspace(folder).run("build", *words)
    assert done.code == 0, done.out + done.err
    return Workspace(folder)


@pytest.fixture(scope="session")
def cpu_build(shared_folder: Path) -> Workspace:
    """`python -m pipeline build +hw=cpu` on the embedded model."""
    return built(shared_folder / "cpu_build", "+hw=cpu")


@pytest.fixture(scope="session")
def two_layers(shared_folder: Path) -> Path:
    """A checkpoint with a layer of each kind."""
    with FileLock(shared_folder / "two_layers.lock"):
        if not (shared_folder / "two_layers").exists():
            random_checkpoint.write(shared_folder / "two_layers", {"num_hidden_layers": 2})
    return shared_folder / "two_layers"


@pytest.fixture(scope="session")
def quick_build(two_layers: Path) -> Workspace:
    """The same stages on two layers and without the C++ compiler: seconds instead of minutes."""
    return built(two_layers.parent / "quick_build", *QUICK)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty working directory."""
    return Workspace(tmp_path)
