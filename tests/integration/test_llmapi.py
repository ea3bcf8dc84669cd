"""triton_repo/llmapi on a real tritonserver, with a stand-in for tensorrt_llm (tests/_utils/fake_tensorrt_llm.py).

What is proven is the contract with Triton: tensors, streaming, refusals, cancellation. Not proven: TensorRT-LLM itself.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.core.errors import MissingToolError, StageError
from pipeline.core.jsonio import write_json
from pipeline.core.stage import StageContext
from pipeline.engines.trtllm.build import build
from pipeline.planner.plan import make_plan
from pipeline.triton.client import Client, TritonError
from pipeline.triton.layouts.llmapi import layout
from pipeline.triton.server import find_server, start

FAKE = Path(__file__).parents[1] / "_utils" / "fake_tensorrt_llm.py"
CONFIG = load(["+hw=b200", "model=deepseek_r1", "serve.http_port=0", "serve.grpc_port=0", "serve.metrics_port=0"])
PROMPT = "The capital of France"


class Notes(list):
    """A `Progress`."""

    start = advance = note = list.append


@pytest.fixture(scope="module", autouse=True)
def tritonserver() -> None:
    try:
        find_server(CONFIG.serve)
    except MissingToolError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plan's and engine's real output, packaged, with the stand-in beside the model."""
    folder = tmp_path_factory.mktemp("llmapi")
    for name in ("plan", "convert", "engine", "package"):
        (folder / name).mkdir()
    (folder / "convert" / "config.json").write_text("{}")
    write_json(folder / "plan" / "deploy.json", make_plan(CONFIG, CONFIG.model.hf).deploy)
    common = {"config": CONFIG, "checkpoint": None, "progress": Notes()}
    build(StageContext(inputs={name: folder / name for name in ("plan", "convert")}, out=folder / "engine", **common))
    layout(StageContext(inputs={"engine": folder / "engine"}, out=folder / "package", **common))
    return folder / "package" / "repository"


@pytest.fixture(scope="module")
def client(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    served = tmp_path_factory.mktemp("served") / "repository"
    shutil.copytree(repository, served)
    shutil.copyfile(FAKE, served / "deepseek_r1" / "1" / "tensorrt_llm.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_ABORTS", str(served.parent / "aborts.log"))
        with start(CONFIG.serve, served) as server, Client(server.endpoint, "deepseek_r1") as client:
            yield client


def test_without_tensorrt_llm_the_server_does_not_start_and_says_why(repository):
    with pytest.raises(StageError, match="tensorrt_llm cannot be imported"), start(CONFIG.serve, repository):
        pass


def test_generates(client):
    assert client.decoupled
    assert client.generate(PROMPT) == PROMPT[::-1]
    assert client.generate(PROMPT, max_tokens=3) == PROMPT[::-1][:3]


def test_streams_only_new_text(client):
    with client.stream(PROMPT) as stream:
        pieces = [chunk.text for chunk in stream]
    assert "".join(pieces) == PROMPT[::-1]
    assert len([piece for piece in pieces if piece]) == len(PROMPT)
    assert not client.cumulative


def test_a_wrong_value_is_refused_with_a_sentence(client):
    with pytest.raises(TritonError, match="max_tokens=0 must be at least 1"):
        client.generate(PROMPT, max_tokens=0)


def test_a_failure_of_the_engine_reaches_the_client_and_the_next_request_works(client):
    with pytest.raises(TritonError, match="the engine failed"):
        client.generate("boom")
    assert client.generate("ab") == "ba"


def test_a_stream_that_is_left_is_aborted_in_the_engine(client):
    log = Path(os.environ["FAKE_ABORTS"])
    with client.stream("slow" + "x" * 60) as stream:
        next(stream)
        assert not log.exists()
    deadline = time.monotonic() + 5
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.read_text() == "aborted\n"
