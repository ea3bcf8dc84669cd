"""Finding tritonserver, its command line, and what of its log is quoted."""

from __future__ import annotations

import socket
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import ServeConfig
from pipeline.core.errors import ConfigError, MissingToolError, StageError
from pipeline.triton import checks, server, smoke
from pipeline.triton.http import Endpoint, TritonError, _checked
from tests._utils import serving

SERVE = serving.serve_config().serve


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without tritonserver."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server, "CONTAINER_PATH", tmp_path / "nothing")
    monkeypatch.setattr(server.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("bare")
def test_without_a_server_the_way_out_is_named() -> None:
    with pytest.raises(MissingToolError, match=r"pip install --no-deps nvidia-pytriton==0.7.0 'numpy<2'"):
        server.find_server(SERVE)


@pytest.mark.usefixtures("bare")
def test_a_server_on_path_and_in_a_container_needs_nothing_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = tmp_path / "tritonserver"
    executable.touch(mode=0o755)
    assert server.find_server(SERVE) == server.Installation(executable)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(server, "CONTAINER_PATH", executable)
    found = server.find_server(SERVE)
    assert (found.executable, found.flags, found.environment, found.backend_files) == (executable, (), {}, ())


@pytest.mark.parametrize(("says", "ends", "starts"), [(server.HELD_UP, 2, 3), (server.HELD_UP, 9, 3), ("failed to load", 9, 1)])
def test_a_server_that_died_of_a_model_that_was_held_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, ends: int, starts: int
) -> None:
    """Triton 2.51 dies if a model's process does not move for more than a second while it loads; its double, `ends` times."""
    count, program = tmp_path / "count", tmp_path / "tritonserver"
    lines = ("#!/bin/sh", f"echo >> {count}", f"echo '{says}'", f"[ $(wc -l < {count}) -le {ends} ] && exit 134", "exec sleep 600")
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    (tmp_path / "repository").mkdir()
    monkeypatch.setattr(server, "check_repository", lambda repository, release: {})
    monkeypatch.setattr(server, "_require_models", lambda endpoint, models, log: None)
    monkeypatch.setattr(server, "_has_metrics", lambda endpoint: True)
    monkeypatch.setattr(Endpoint, "ready", lambda self, timeout: len(count.read_text()) > ends if count.exists() else False)
    config = serving.serve_config(server=str(program)).serve
    refused = pytest.raises(StageError, match=f"code 134 before it was ready:\n *{says}") if ends > starts else nullcontext()
    with refused, server.start(config, tmp_path / "repository"):
        pass
    assert len(count.read_text()) == starts


def test_a_configured_server_must_exist() -> None:
    with pytest.raises(MissingToolError, match=r"serve.server=/no/such is not a file"):
        server.find_server(serving.serve_config(server="/no/such").serve)


def test_a_host_that_is_not_ours_is_named_instead_of_a_port() -> None:
    config = ServeConfig(host="203.0.113.7", http_port=0, grpc_port=0, metrics_port=0)
    refused = pytest.raises(ConfigError, match=r"serve\.host=203\.0\.113\.7 is no address of this machine: 127\.0\.0\.1")
    with refused, server._reserved(config):
        pass


def test_no_one_else_gets_a_port_before_the_server_listens() -> None:
    with server._reserved(ServeConfig(http_port=0, grpc_port=0, metrics_port=0)) as at, socket.socket() as other:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind((at.host, at.grpc_port))
        for port in (at.http_port, at.grpc_port, at.metrics_port):
            socket.create_server((at.host, port)).close()  # with SO_REUSEADDR, as Triton


def test_a_server_whose_metrics_cannot_be_read_yet_is_not_ready() -> None:
    with server._reserved(ServeConfig(http_port=0, grpc_port=0, metrics_port=0)) as at:
        assert not server._has_metrics(at)
        with socket.create_server((at.host, at.metrics_port)):
            assert server._has_metrics(at)


def test_a_configured_server_must_be_a_program(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").write_text("text")
    with pytest.raises(MissingToolError, match="is not a file that can be run"):
        server.find_server(ServeConfig(server=str(tmp_path / "tritonserver")))


def test_the_wheel_refuses_python_3_13_and_numpy_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub = tmp_path / "stub"
    stub.touch()
    monkeypatch.setattr(server.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(MissingToolError, match=r"numpy 2.1.0 crashes .*numpy below 2"):
        server._require_python("3.11", stub)
    monkeypatch.setattr(server.sys, "version_info", (3, 13, 1))
    with pytest.raises(MissingToolError, match=r"cannot serve from Python 3.13"):
        server._require_python("3.13", stub)


def test_a_missing_libpython_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.sysconfig, "get_config_var", lambda name: "/nowhere")
    monkeypatch.setattr(server.subprocess, "run", lambda *args, **rest: type("Done", (), {"stdout": ""}))
    with pytest.raises(MissingToolError, match=r"libpython3.12.so.1.0 is missing.*apt-get install libpython3.12"):
        server._require_libpython("3.12")


def test_the_command_line_of_a_container(tmp_path: Path) -> None:
    command = server._command(server.Installation(Path("/opt/t")), Endpoint("0.0.0.0", 1, 2, 3), tmp_path, "x_")
    assert command == [
        "/opt/t", f"--model-repository={tmp_path}/repository", "--http-address=0.0.0.0", "--http-port=1",
        "--grpc-address=0.0.0.0", "--grpc-port=2", "--metrics-address=0.0.0.0", "--metrics-port=3",
        "--exit-on-error=true", "--exit-timeout-secs=5",
        "--disable-auto-complete-config", "--backend-config=python,shm-region-prefix-name=x_",
    ]  # fmt: skip


def test_the_copy_is_links_and_the_original_stays(tmp_path: Path) -> None:
    (tmp_path / "r/m/1").mkdir(parents=True)
    (tmp_path / "r/m/1/model.py").write_text("x")
    server.copy_repository(tmp_path / "r", tmp_path / "copy")
    assert (tmp_path / "copy/m/1/model.py").samefile(tmp_path / "r/m/1/model.py")
    (tmp_path / "copy/m/1/__pycache__").mkdir()
    assert [path.name for path in (tmp_path / "r/m/1").iterdir()] == ["model.py"]


def test_the_log_is_quoted_without_the_usual_noise(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'I1129 18:02:19.0 1 a.cc:1] "loading"\n'
        'E1129 18:02:19.0 1 server.cc:241] "CudaDriverHelper has not been initialized."\n'
        'E1129 18:02:19.0 1 b.cc:2] "failed to load m"\nerror: creating server: Internal - failed to load all models\n'
    )
    assert server.meaningful(log).splitlines() == [
        '  E1129 18:02:19.0 1 b.cc:2] "failed to load m"',
        "  error: creating server: Internal - failed to load all models",
    ]  # fmt: skip
    log.write_text("only this\n")
    assert server.meaningful(log) == "  only this"
    assert server.meaningful(tmp_path / "none") == "  (the log is empty)"


def test_an_error_inside_a_good_answer_is_raised() -> None:
    with pytest.raises(TritonError, match="exactly 1") as caught:
        _checked({"error": "exactly 1"}, 200)
    assert caught.value.status == 200


@pytest.mark.parametrize("url", ["nohost", "host:", ":8000", "http://host:port"])
def test_a_wrong_url_is_refused(url: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"must be HOST:PORT"),
        smoke._endpoint(serving.serve_config(url=url).serve, tmp_path),
    ):
        pass


def test_a_url_is_the_http_port_and_the_others_come_from_the_config(tmp_path: Path) -> None:
    config = serving.serve_config(url="http://gpu7:9000/", grpc_port=9001, metrics_port=9002).serve
    with smoke._endpoint(config, tmp_path) as endpoint:
        assert endpoint == Endpoint("gpu7", 9000, 9001, 9002)


def test_the_model_that_clients_talk_to() -> None:
    assert smoke.entry(["only"]) == "only"
    assert smoke.entry(["preprocessing", "tensorrt_llm", "ensemble"]) == "ensemble"
    assert smoke.entry(["deepseek_r1", "tensorrt_llm"]) == "deepseek_r1"
    assert smoke.entry(["tensorrt_llm"]) == "tensorrt_llm"
    with pytest.raises(ConfigError, match="a, b"):
        smoke.entry(["a", "b"])


def test_p99_and_median() -> None:
    assert smoke._spread([0.001 * number for number in range(1, 201)]) == {"median": 100.5, "p99": 199.0}
    assert smoke._spread([]) == {"median": 0.0, "p99": 0.0}


class Streaming:
    """A client and its server, which makes `tokens` of 100 until the client reads, and as many `after` it has left."""

    def __init__(self, *streams: tuple[int, int]) -> None:
        self.left, self.model, self.names, self.endpoint = list(streams), "m", {"stream": "stream"}, self
        self.running = self.generated = 0

    def metrics(self, *models: str) -> dict[str, float]:
        return {"llm_requests_running": self.running, "llm_generated_tokens": self.generated}

    @contextmanager
    def stream(self, prompt: str, **options: Any):
        tokens, after = self.left.pop(0)
        self.running, self.generated = tokens < 100, self.generated + tokens
        yield iter(["first"])
        self.running, self.generated = 0, self.generated + after


@pytest.mark.parametrize(("streams", "tries"), [([(5, 3)], 1), ([(100, 0), (5, 95), (5, 3)], 3), ([(5, 95)] * 9, checks.TRIES)])
def test_a_stream_that_was_over_before_its_client_left_says_nothing_of_cancelling(
    streams: list[tuple[int, int]], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "METRICS_LAG", 0)
    client: Any = Streaming(*streams)
    probe = checks.Probe(client, SERVE, room=100, exact=True, live=None)
    if streams[-1] == (5, 3):
        assert "8 of 100 tokens generated" in checks.cancel(probe)
    else:
        with pytest.raises(checks.Broken, match=f"all 100 tokens were generated although nobody listened, {tries} times"):
            checks.cancel(probe)
    assert len(streams) - len(client.left) == tries
