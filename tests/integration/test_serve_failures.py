"""What goes wrong around a real tritonserver ends with a sentence: never a hang, never a silent pass.

The engine is a TEST DOUBLE that fails when it is told to.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, MissingToolError, StageError
from pipeline.triton import server, smoke
from pipeline.triton.client import Client, TritonError
from tests._utils import serving

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

ROOT = serving.MODEL_CODE.parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    engine = serving.write_fake_engine(tmp_path / "engine", step_seconds=0.004)
    return serving.package_engine(engine, tmp_path / "package", serving.serve_config(), serving.FAKE_RUNTIME)


def is_dead(client: Client) -> bool:
    """Whether the model's process has died of this request or of an earlier one, which may be cancelled before it gets there."""
    with pytest.raises((TritonError, TimeoutError), match=r"no answer from .* within 3 s|timed out|not healthy") as caught:
        client.generate("\x02", max_tokens=2)
    return "not healthy" in str(caught.value)


def test_a_failed_engine_and_a_crashed_model_are_told_from_a_good_one(repository: Path) -> None:
    """Two servers at once; the second one's engine fails, then its process dies, and Triton still says READY."""
    config = serving.serve_config(smoke_requests=2)
    with server.start(config.serve, repository) as good, server.start(config.serve, repository) as bad:
        assert good.endpoint != bad.endpoint
        with Client(bad.endpoint, "fake_r1", timeout=60) as client:
            with pytest.raises(TritonError, match=r"the engine failed .*told to fail.*restart the server"):
                client.generate("\x01", max_tokens=2)
            with pytest.raises(TritonError, match=r"the engine failed"):
                client.generate("healthy", max_tokens=2)
            assert bad.endpoint.ready()
            assert "told to fail" in bad.errors()
        assert smoke.smoke(good.endpoint, "fake_r1", config, lambda _: None)["passed"] is True
        with Client(good.endpoint, "fake_r1", timeout=3) as client:  # Triton takes one second to say it
            serving.wait(lambda: is_dead(client))
            assert good.endpoint.ready(), "readiness lies: this is why smoke asks for text"
        report = smoke.smoke(good.endpoint, "fake_r1", config, lambda _: None)
        failed = {check["name"]: check["detail"] for check in report["checks"] if check["passed"] is False}
        assert report["passed"] is False
        assert "not healthy" in failed["generate"]
        assert "performance" not in report


def test_a_model_that_never_loads_ends_at_the_deadline(repository: Path) -> None:
    with (repository / "fake_r1/1/model.py").open("a") as code:
        code.write("import time\ntime.sleep(3600)\n")
    begin = time.monotonic()
    with (
        pytest.raises(StageError, match=r"not ready after serve.ready_timeout=2 seconds and was stopped"),
        server.start(serving.serve_config(ready_timeout=2).serve, repository),
    ):
        pass
    assert time.monotonic() - begin < 60
    assert serving.processes_of(f"pipeline_{os.getpid()}_") == [], "named in the prefix of its shared memory"


def test_a_model_that_fails_to_load_is_quoted_without_the_usual_noise(repository: Path) -> None:
    (repository / "fake_r1/1/runtime.py").write_text("raise ImportError('no such engine library')\n")
    with (
        pytest.raises(StageError, match="before it was ready") as caught,
        server.start(serving.serve_config().serve, repository),
    ):
        pass
    assert "no such engine library" in str(caught.value)
    assert "CudaDriverHelper" not in str(caught.value)
    assert len(str(caught.value).splitlines()) < 15


def test_a_missing_model_py_is_found_before_the_server_starts(repository: Path) -> None:
    (repository / "fake_r1/1/model.py").unlink()
    with (
        pytest.raises(StageError, match=r"1/model.py is missing"),
        server.start(serving.serve_config().serve, repository),
    ):
        pass


def test_a_taken_port_is_named(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"serve.grpc_port={port} cannot be used on 127.0.0.1"),
            server.start(serving.serve_config(grpc_port=port).serve, repository),
        ):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_stops_with_0_on_a_signal(repository: Path, number: signal.Signals) -> None:
    code = (
        "import sys; from pathlib import Path; from tests._utils import serving; from pipeline.triton import server\n"
        "emit = lambda line: print(line, flush=True)\n"
        "sys.exit(server.serve_command(serving.serve_config(), Path(sys.argv[1]), emit))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(repository)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines[0].startswith("ready in"), lines
    assert "fake_r1" in lines[0]
    os.kill(process.pid, number)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert f"stopped by {number.name}" in rest


def test_smoke_starts_its_own_server_and_writes_its_report(repository: Path, tmp_path: Path) -> None:
    config, lines = serving.serve_config(smoke_requests=2, smoke_tokens=8), []
    assert smoke.smoke_command(config, repository, tmp_path, lines.append, live=None) == 0
    report = json.loads((tmp_path / "smoke.json").read_text())
    assert report["passed"] is True
    assert [line.split()[1] for line in lines[: len(report["checks"])]] == [check["name"] for check in report["checks"]]
