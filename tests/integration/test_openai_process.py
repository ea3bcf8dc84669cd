"""The gateway's process beside its server: which of them starts first, dies, and comes back. The engine is a TEST DOUBLE."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.core.errors import ConfigError, MissingToolError, StageError
from pipeline.openai.companion import beside
from pipeline.triton import pbtxt, server
from pipeline.triton.http import Endpoint
from tests._utils import serving
from tests._utils.gateway import MAX_QUEUE, ROOM, config, healthy, write_tokenizer

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

DEAD = "process died|is not healthy"
"""The gateway's words for a request that the process had, and Triton's for a later one; which is which, the moment decides."""


def add_model(repository: Path, name: str, double: str, inputs: dict[str, str], **policy: Any) -> None:
    """A model that is not of our layouts: its code, and a config of these inputs, the first of them required."""
    (repository / name / "1").mkdir(parents=True)
    shutil.copyfile(serving.FAKE_RUNTIME.with_name(double), repository / name / "1" / "model.py")
    first, *others = pbtxt.specs(inputs)
    written = [first, *(replace(spec, optional=True) for spec in others)]
    dims = "" if policy.get("max_batch_size") else "[-1]"
    model = pbtxt.build(name, inputs=written, outputs=pbtxt.specs({"text_output": f"STRING{dims}"}), parameters={}, **policy)
    pbtxt.write(repository / name / "config.pbtxt", model)


def test_models_of_others_are_spoken_to_as_they_are(tmp_path: Path) -> None:
    """Upstream's LLM-API model repeats the text so far in each chunk; an ensemble without streams answers whole."""
    repository, tokenizer = tmp_path / "repository", write_tokenizer(tmp_path / "tokenizer")
    llmapi = {"text_input": "STRING[-1]", "streaming": "BOOL", "sampling_param_max_tokens": "INT32"}
    add_model(repository, "upstream", "fake_llmapi_model.py", llmapi)
    whole = {"text_input": "STRING", "max_tokens": "INT32"}
    add_model(repository, "whole", "fake_whole_model.py", whole, max_batch_size=1, decoupled=False)
    expected = {"upstream": ["x0 ", "x1 ", "x2 "], "whole": ["xxx"]}
    with server.start(config().serve, repository) as started:
        for model, pieces in expected.items():
            serve = config(model_name=model, tokenizer=str(tokenizer)).serve
            with beside(serve, started.endpoint, started.models, repository) as companion:
                assert companion
                with openai.OpenAI(base_url=companion.line.split()[-1], api_key="any", max_retries=0) as client:
                    ask = {"model": model, "prompt": "x", "max_tokens": 3}
                    answer = client.completions.create(**ask)
                    stream = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
                    assert answer.choices[0].text == "".join(pieces) and [text for text in stream if text] == pieces
                    assert answer.usage.completion_tokens == len("".join(pieces)), "counted by the tokenizer, a byte a token"
                    with pytest.raises(openai.BadRequestError, match="seed is not supported by the served model"):
                        client.completions.create(**ask, seed=1)


def test_a_gateway_outlives_its_server(tmp_path: Path) -> None:
    """Started first, it says 503 until the model is there, breaks a stream off with an error, and goes on afterwards."""
    [port], tokenizer = serving.free_ports(1), write_tokenizer(tmp_path / "tokenizer")
    words = ["--grpc", f"127.0.0.1:{port}", "--model", "fake_r1", "--tokenizer", str(tokenizer), "--port", "0", "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-m", "pipeline.openai", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with openai.OpenAI(base_url=process.stdout.readline().split()[-1], api_key="any", max_retries=0, timeout=60) as client:
        ask = {"model": "fake_r1", "messages": [{"role": "user", "content": "slow"}], "max_tokens": 400}
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="does not answer") as caught:
                client.chat.completions.create(**ask, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (503, "server_unavailable")
        serve = serving.serve_config(grpc_port=port, max_queue=MAX_QUEUE)
        engine = serving.write_fake_engine(tmp_path / "engine", step_seconds=0.004, max_seq_len=ROOM, num_pages=257)
        repository = serving.package_engine(engine, tmp_path / "package", serve, serving.FAKE_RUNTIME)
        for _ in range(2):
            with server.start(serve.serve, repository) as started:
                begun = list[Any]()
                serving.wait(lambda begun=begun: healthy(client) and begins(client, ask, begun))  # each worker finds back by itself
                [chunks] = begun
                os.killpg(started.process.pid, signal.SIGKILL)
                with pytest.raises(openai.APIError):
                    list(chunks)
                assert not healthy(client)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_worker_may_pause_but_not_die(tmp_path: Path) -> None:
    """A worker that is stopped and goes on is no reason to end; one that is killed ends all."""
    [port], tokenizer = serving.free_ports(1), write_tokenizer(tmp_path / "tokenizer")
    words = ["--grpc", f"127.0.0.1:{port}", "--model", "any", "--tokenizer", str(tokenizer), "--port", "0", "--workers", "2"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-m", "pipeline.openai", *words], **piped, text=True)
    assert process.stdout and process.stderr
    url = process.stdout.readline().split()[-1]
    [worker] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    for number, state in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "S")):
        os.kill(worker, number)
        serving.wait(lambda state=state: Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0] == state)
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
        assert not healthy(client) and process.poll() is None
    os.kill(worker, signal.SIGKILL)
    assert process.wait(60) == 3 and "A worker of the OpenAI gateway died" in process.stderr.read()


def test_a_model_whose_process_died_is_not_healthy(tmp_path: Path) -> None:
    """Triton goes on to say that it is ready."""
    serve = config(tokenizer=str(write_tokenizer(tmp_path / "tokenizer"))).serve
    engine = serving.write_fake_engine(tmp_path / "engine")
    repository = serving.package_engine(engine, tmp_path / "package", config(), serving.FAKE_RUNTIME)
    with server.start(serve, repository) as started, beside(serve, started.endpoint, started.models, repository) as companion:
        assert companion
        with openai.OpenAI(base_url=companion.line.split()[-1], api_key="any", max_retries=0, timeout=60) as client:
            assert healthy(client)
            ask = {"model": "fake_r1", "max_tokens": 2}
            with ThreadPoolExecutor(1) as pool:
                killer = pool.submit(lambda: client.completions.create(**ask, prompt="\x02"))
                serving.wait(lambda: not answers(client, ask), 60)
                with pytest.raises(openai.InternalServerError, match=DEAD):
                    killer.result()
            assert started.endpoint.ready() and not healthy(client)


def answers(client: openai.OpenAI, ask: dict[str, Any]) -> bool:
    """Whether the model's process seems to live; a request that was there when it died waits until a later one is told."""
    try:
        client.with_options(timeout=3).completions.create(**ask, prompt="a")
    except openai.APITimeoutError:
        return True
    except openai.InternalServerError as error:
        assert re.search(DEAD, error.message) and error.status_code == 500
        return False
    return True


def begins(client: openai.OpenAI, ask: dict[str, Any], streams: list[Any]) -> bool:
    """Whether an answer has come and a stream has had its first chunk; it is put to the others."""
    try:
        client.chat.completions.create(**ask | {"max_tokens": 3})
        chunks = iter(client.chat.completions.create(**ask, stream=True))
        next(chunks)
    except openai.InternalServerError:
        return False
    streams.append(chunks)
    return True


def test_what_cannot_be_started_or_has_ended_is_said(tmp_path: Path) -> None:
    nowhere = Endpoint("127.0.0.1", 1, 1, 1)  # it is not asked before the first client comes

    def start(**serve: Any) -> None:
        with beside(config(**serve).serve, nowhere, ["fake_r1"], tmp_path):
            pass

    with pytest.raises(ConfigError, match="environment variable NO_SUCH_KEY"):
        start(openai_api_key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match=r"has a tokenizer.json: name its folder as serve.tokenizer=DIR"):
        start()
    with beside(config(tokenizer=str(write_tokenizer(tmp_path))).serve, nowhere, ["fake_r1"], tmp_path) as companion:
        assert companion
        companion.require_alive()
        companion.process.kill()
        companion.process.wait()
        with pytest.raises(StageError, match="gateway ended by itself with code -9"):
            companion.require_alive()
