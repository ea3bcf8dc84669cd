"""Rendered launchers start the real tritonserver; the engine is a TEST DOUBLE (tests/_utils/fake_tensorrt_llm.py).

The package is that of eight B200. Only two things are put in between: `tritonserver` on PATH adds where the wheel's backend lies,
and mpirun and trtllm-llmapi-launch are doubles that run what rank 0 runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.core.errors import MissingToolError
from pipeline.core.stage import StageContext
from pipeline.triton import releases, server
from pipeline.triton.client import Client
from pipeline.triton.http import Endpoint
from scripts.render_examples import stage_outputs
from tests._utils import serving

try:
    INSTALLED = server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

MPIRUN = """#!/usr/bin/env bash
# A double: runs what rank 0 of the asked number of ranks runs.
ranks=0
while [[ "$1" != bash ]]; do
  if [[ "$1" == -n ]]; then ranks="$2"; fi
  shift
done
OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE="$ranks" exec "$@"
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    """Where the package's server will listen: nobody else is given these ports."""
    with server._reserved(serving.serve_config(host="127.0.0.1").serve) as at:
        yield at


@pytest.fixture(scope="module")
def package(endpoint, tmp_path_factory) -> Path:
    """The package, its repository as the installed release of Triton takes it."""
    named = [f"serve.{name}={getattr(endpoint, name)}" for name in ("http_port", "grpc_port", "metrics_port")]
    config = load(["+hw=b200", "model=deepseek_r1", *named])
    folder = tmp_path_factory.mktemp("launch")
    out = stage_outputs(config, folder)
    shutil.rmtree(out / "repository")
    (out / "repository").mkdir()
    ctx = StageContext(
        config=config, inputs={"engine": folder / "engine"}, checkpoint=None, out=out, progress=serving.Quiet()
    )
    import_module("pipeline.triton.layouts.llmapi").layout(ctx, releases.releases()[0])
    serving.add_tensorrt_llm(out / "repository" / "deepseek_r1" / "1")
    return out


def tools(folder: Path) -> Path:
    """A folder for PATH: tritonserver with its backend, mpirun and trtllm-llmapi-launch."""
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for file in INSTALLED.backend_files:
        (backend / file.name).symlink_to(file)
    flags = [*INSTALLED.flags, *([f"--backend-directory={backend.parent}"] if INSTALLED.backend_files else [])]
    exports = "".join(f"export {name}='{value}'\n" for name, value in INSTALLED.environment.items())
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "tritonserver").write_text(f'#!/usr/bin/env bash\n{exports}exec {INSTALLED.executable} "$@" {" ".join(flags)}\n')
    (bin_folder / "trtllm-llmapi-launch").write_text('#!/usr/bin/env bash\nexec "$@"\n')
    (bin_folder / "mpirun").write_text(MPIRUN)
    for tool in bin_folder.iterdir():
        tool.chmod(0o755)
    return bin_folder


@contextmanager
def started(script: Path, folder: Path):
    """The script's process, in a group of its own, ended by SIGTERM as an operator would."""
    names = ("PYTHONPATH", "PYTHONHOME", "SLURM_PROCID", "SLURM_NTASKS")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment["PATH"] = f"{tools(folder)}:{environment['PATH']}"
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(["bash", script], env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(150)  # Triton gives itself 60 s
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_held_up(process: subprocess.Popen, endpoint: Endpoint, log: Path) -> bool:
    """Waits until it is ready. True: Triton took a model's process for dead, as `server.start` says, and is to be started again."""
    deadline = time.monotonic() + 120
    while not endpoint.ready(server.READY_SECONDS):
        ended, said = process.poll() is not None, log.read_text(errors="replace")
        if ended and server.HELD_UP in said:
            return True
        assert not ended and time.monotonic() < deadline, said[-3000:]
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("script", ["single/bare.sh", "mpi/run.sh"])
def test_a_launcher_starts_a_server_that_streams_and_leaves_nothing_behind(package, endpoint, tmp_path, script):
    regions = f"aggregated_0_{endpoint.http_port}_0_*"
    for number in range(server.STARTS):
        folder = tmp_path / str(number)
        with started(package / "launch" / script, folder) as process:
            if is_held_up(process, endpoint, folder / "log"):
                continue
            assert list(Path("/dev/shm").glob(regions)), "shm-region-prefix-name is the instance's, the port's and the rank's"
            with Client(endpoint, "deepseek_r1", timeout=60) as client, client.stream("abc\n", max_tokens=9) as stream:
                chunks = [chunk.text for chunk in stream if chunk.text]
            assert len(chunks) == 9 and "".join(chunks) == "abcabcabc"
        break
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    serving.wait(lambda: not endpoint.ready())  # the server does not outlive its launcher
    serving.wait(lambda: not list(Path("/dev/shm").glob(regions)))
