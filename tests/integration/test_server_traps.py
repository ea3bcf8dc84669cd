"""What the real tritonserver (2.51) does with repositories that our checks refuse: why each of these checks is there.

The static check is switched off, so that the server itself answers; the engines are TEST DOUBLES.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core.errors import MissingToolError, StageError
from pipeline.core.stage import StageContext
from pipeline.share import share
from pipeline.triton import pbtxt, releases, server
from pipeline.triton.layouts import llmapi
from tests._utils import serving

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

NAME = "fake_r1"


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "check_repository", lambda repository, release: {NAME: None})


def repository(folder: Path, tag: str) -> Path:
    """The llmapi layout for a release, with the double of tensorrt_llm."""
    engine = serving.write_fake_bundle(folder / "engine")
    (folder / "package" / "repository").mkdir(parents=True)
    common = {"config": serving.serve_config(), "checkpoint": None, "progress": serving.Quiet()}
    ctx = StageContext(inputs={"engine": engine}, out=folder / "package", **common)
    llmapi.layout(ctx, releases.release(tag))
    serving.add_tensorrt_llm(folder / "package" / "repository" / NAME / "1")
    return folder / "package" / "repository"


def refusal(repository: Path, seconds: float = 120.0) -> str:
    """What the server's log says of a repository that it does not serve."""
    with pytest.raises(StageError) as caught, server.start(serving.serve_config(ready_timeout=seconds).serve, repository):
        pass
    return str(caught.value)


def test_a_field_of_a_newer_release_costs_the_whole_model(tmp_path: Path) -> None:
    said = refusal(repository(tmp_path, "25.09"))
    assert 'has no field named "model_metrics"' in said


def test_an_empty_repository_is_ready(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert re.search(r"The server holds \{\}, but fake_r1 should be READY", refusal(tmp_path / "empty"))


def test_a_missing_model_py_is_waited_for_until_our_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real, missed = repository(tmp_path, "24.10"), server._wait_ready, "Python model file not found"
    (folder / NAME / "1" / "model.py").unlink()

    def wait_ready(process: Any, endpoint: Any, timeout: float, log: Path) -> float:
        serving.wait(lambda: missed in log.read_text())  # the deadline is for what comes after it
        return real(process, endpoint, timeout, log)

    monkeypatch.setattr(server, "_wait_ready", wait_ready)
    said = refusal(folder, seconds=1)
    assert "not ready after serve.ready_timeout=1 seconds and was stopped" in said and missed in said


def test_a_model_that_would_stream_one_token_of_many_does_not_start(tmp_path: Path) -> None:
    """config.pbtxt without a policy and model.yaml with decoupled true: upstream's model serves it, one token a stream."""
    folder = repository(tmp_path, "24.10")
    config = pbtxt.read(folder / NAME / "config.pbtxt")
    config.ClearField("model_transaction_policy")
    pbtxt.write(folder / NAME / "config.pbtxt", config)
    assert yaml.safe_load((folder / NAME / "1" / "model.yaml").read_text())["triton_config"]["decoupled"] is True
    said = refusal(folder)
    assert "decoupled False and max_batch_size 0, triton_config of model.yaml says True and 0; make them equal" in said


def test_a_folder_beside_the_models_is_taken_for_one(tmp_path: Path) -> None:
    folder = repository(tmp_path, "24.10")
    (folder / "notes").mkdir()
    assert "'notes'" in refusal(folder)


def used_names() -> Iterator[tuple[str, str]]:
    for file in sorted(share("triton_repo").glob("*/1/*.py")):
        for name in re.findall(r"pb_utils\.Logger\.(\w+)", file.read_text(encoding="utf-8")):
            yield f"{file.parent.parent.name}/{file.name}", name


def test_models_log_with_names_that_the_backend_has() -> None:
    """`log_warning` is an AttributeError in the middle of a request."""
    found = list(used_names())
    assert found
    assert [item for item in found if item[1] not in releases.python_backend()["logger"]] == []
