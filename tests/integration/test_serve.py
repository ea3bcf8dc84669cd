"""The real tritonserver (CPU, python backend) and the real model code, over a TEST DOUBLE of the engine.

One server for the module holds two models: the torch layout with the double as its runtime, and a double of the LLM-API
model for the client's other dialect.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import ConfigError, MissingToolError
from pipeline.triton import pbtxt, server, smoke
from pipeline.triton.client import Client, Stream, TritonError
from tests._utils import serving
from tests._utils.serving import wait

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

MAX_QUEUE = 3
MANY = 180
"""Tokens, of which each slot may have so many at once: a slow text of them takes 36 s, longer than `wait` waits."""
CONFIG = serving.serve_config(
    max_queue=MAX_QUEUE, smoke_prompt="The 你好🙂 text comes again\n", smoke_tokens=40, smoke_requests=6
)


def add_llmapi_double(repository: Path) -> None:
    version = repository / "llmapi" / "1"
    version.mkdir(parents=True)
    shutil.copyfile(serving.FAKE_RUNTIME.with_name("fake_llmapi_model.py"), version / "model.py")
    inputs = [
        pbtxt.TensorSpec("text_input", "STRING", (-1,)),
        pbtxt.TensorSpec("streaming", "BOOL", optional=True),
        pbtxt.TensorSpec("sampling_param_max_tokens", "INT32", optional=True),
        pbtxt.TensorSpec("sampling_param_temperature", "FP32", optional=True),
    ]
    config = pbtxt.build(
        "llmapi", inputs=inputs, outputs=[pbtxt.TensorSpec("text_output", "STRING", (-1,))], parameters={}
    )
    pbtxt.write(version.parent / "config.pbtxt", config)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    folder = tmp_path_factory.mktemp("serve")
    engine = serving.write_fake_engine(folder / "engine", step_seconds=0.004)
    repository = serving.package_engine(engine, folder / "package", CONFIG, serving.FAKE_RUNTIME)
    add_llmapi_double(repository)
    before = set(repository.rglob("*"))
    with server.start(CONFIG.serve, repository) as started:
        yield started
        assert started.process.poll() is None, started.log.read_text()[-3000:]
    assert set(repository.rglob("*")) == before, "serving wrote into the packaged repository"
    assert list(Path("/dev/shm").glob(f"pipeline_{os.getpid()}_*")) == []


@pytest.fixture(scope="module")
def client(running: server.Server) -> Iterator[Client]:
    with Client(running.endpoint, "fake_r1", timeout=60) as client:
        yield client


def running_requests(client: Client) -> float:
    return client.endpoint.metrics("fake_r1")["llm_requests_running"]


def holds_nothing(client: Client) -> bool:
    """Neither slot nor pages: the metrics are sent one by one."""
    metrics = client.endpoint.metrics("fake_r1")
    return metrics["llm_requests_running"] == metrics["llm_kv_pages_used"] == 0


def test_every_contract_check_of_smoke_holds(running: server.Server) -> None:
    lines: list[str] = []
    report = smoke.smoke(running.endpoint, "fake_r1", CONFIG, lines.append)
    assert [check for check in report["checks"] if check["passed"] is not True] == [], "\n".join(lines)
    assert report["passed"] is True
    performance = report["performance"]
    assert performance["tokens"] == 6 * 40
    assert 0 < performance["tpot_ms"]["median"] <= performance["tpot_ms"]["p99"] < performance["ttft_ms"]["p99"] + 1000


def test_characters_of_several_tokens_come_whole(client: Client) -> None:
    with client.stream("你🙂好\n", max_tokens=18, count_tokens=True) as stream:
        pieces = [chunk.text for chunk in stream]
    assert [piece for piece in pieces if piece] == ["你", "🙂", "好", "你", "🙂"], "18 bytes end inside the second 好"
    assert stream.tokens == 18


def test_chunks_come_while_the_model_works(client: Client) -> None:
    assert serving.spread_over(lambda: client.stream("abc\n", max_tokens=30), 20 * 0.004)


def test_the_last_response_tells_reason_and_counts(client: Client) -> None:
    body = client.body("abcdef\n", max_tokens=50, stop_words=["efa"], stream=True)
    flags = dict.fromkeys(("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True)
    *others, last = client.endpoint.generate_stream("fake_r1", body | flags)
    assert "".join(event["text_output"] for event in [*others, last]) == "abcd"
    assert all("finish_reason" not in event for event in others)
    assert (last["finish_reason"], last["num_input_tokens"], last["num_output_tokens"]) == ("stop", 8, 7)


def test_eos_stops_and_can_be_ignored(client: Client) -> None:
    assert client.generate("ab\x04\n", max_tokens=8) == "ab"
    assert client.generate("ab\x04\n", max_tokens=8, ignore_eos=True) == "ab\x04ab\x04ab"


def test_the_prompt_is_given_back_only_if_asked_for(client: Client) -> None:
    body = client.body("ab\n", max_tokens=2) | {"exclude_input_in_output": False}
    assert client.endpoint.generate("fake_r1", body)["text_output"] == "ab\nab"


def test_without_max_tokens_the_sequence_is_filled(client: Client) -> None:
    answer = client.endpoint.generate("fake_r1", {"text_input": "ab\n", "return_num_output_tokens": True})
    assert answer["num_output_tokens"] == serving.INFO["max_seq_len"] - 4


def test_a_seed_gives_the_same_text_also_beside_others(client: Client) -> None:
    def run(seed: int) -> str:
        return client.generate("abcd", max_tokens=12, temperature=6.0, seed=seed)

    alone = [run(seed) for seed in (5, 6, 2**64 - 1)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, (5, 6, 2**64 - 1))) == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize(("tensors", "says"), [
    ({"text_input": ""}, "text_input is empty"),
    ({"text_input": b"\xff\xfea"}, "text_input is not valid UTF-8"),
    ({"text_input": "a", "max_tokens": 0}, "max_tokens=0 is too small"),
    ({"text_input": "a", "max_tokens": 300}, "together 302, above the engine's max_seq_len of 256"),
    ({"text_input": "a" * 300}, "the prompt has 301 tokens"),
    ({"text_input": "a", "temperature": -0.5}, "temperature=-0.5 must be 0"),
    ({"text_input": "a", "temperature": float("nan")}, "temperature=nan must be 0"),
    ({"text_input": "a", "top_p": 0.0}, "top_p=0 must lie above 0"),
    ({"text_input": "a", "top_p": 1.5}, "top_p=1.5 must lie above 0"),
    ({"text_input": "a", "top_k": -1}, "top_k=-1 must be 0"),
    ({"text_input": "a", "stop_words": [f"w{number}" for number in range(17)]}, "17 stop_words were sent; at most 16"),
    ({"text_input": ["a", "b"]}, "unexpected shape for input 'text_input'"),
    ({"text_input": "a", "max_token": 5}, "unexpected inference input 'max_token'"),
])  # fmt: skip
def test_bad_requests_get_a_sentence_and_the_server_lives_on(
    client: Client, tensors: dict[str, Any], says: str
) -> None:
    with pytest.raises(TritonError, match=says):
        client.infer(tensors)
    assert client.generate("ab\n", max_tokens=2) == "ab"


def test_http_answers_400_to_a_bad_request(client: Client) -> None:
    with pytest.raises(TritonError, match="top_k=-3") as caught:
        client.generate("a", top_k=-3)
    assert caught.value.status == 400


def test_an_error_inside_a_good_answer_is_an_error(client: Client) -> None:
    with pytest.raises(TritonError, match="exactly 1 response") as caught:
        client.generate("abc\n", max_tokens=5, stream=True)
    assert caught.value.status == 200


def test_an_option_that_the_model_lacks_is_refused_by_the_client(client: Client) -> None:
    with pytest.raises(ConfigError, match="no input for beam_width"):
        client.generate("abc", beam_width=4)


def test_the_slot_is_free_soon_after_a_cancel(client: Client) -> None:
    with client.stream("slow\n", max_tokens=MANY) as stream:
        next(stream)
        wait(lambda: running_requests(client) == 1)
    wait(lambda: holds_nothing(client))


def test_the_slot_is_free_soon_after_an_http_client_vanished(client: Client) -> None:
    body = json.dumps({"text_input": "slow\n", "max_tokens": MANY, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", client.endpoint.http_port)) as connection:
        head = f"POST /v2/models/fake_r1/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(4096)
        wait(lambda: running_requests(client) == 1)
    wait(lambda: running_requests(client) == 0)


def test_more_requests_than_slots_and_queue_are_refused(client: Client) -> None:
    def waiting() -> float:
        return client.endpoint.metrics("fake_r1")["llm_requests_waiting"]

    def start(count: int) -> list[Stream]:
        return [stack.enter_context(client.stream("slow\n", max_tokens=MANY)) for _ in range(count)]

    full = f"^{MAX_QUEUE} requests wait already, of at most serve.max_queue={MAX_QUEUE}; try again later$"
    with ExitStack() as stack:
        first = start(serving.INFO["max_batch_size"])
        wait(lambda: running_requests(client) == len(first))
        second = start(MAX_QUEUE)
        wait(lambda: waiting() == MAX_QUEUE)
        for _ in range(4):
            with pytest.raises(TritonError, match=full):
                client.generate("abc\n", max_tokens=2)
        for stream in first:
            stream.cancel()
        assert [next(stream).text for stream in second] == ["s"] * MAX_QUEUE
    wait(lambda: running_requests(client) == 0)


def test_a_deadline_bounds_a_stream(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.generate("ab\n", max_tokens=2) == "ab", "the client knows the model before it is in a hurry"
    with monkeypatch.context() as hasty, pytest.raises(TritonError, match="DEADLINE_EXCEEDED"):
        hasty.setattr(client, "timeout", 0.3)
        list(client.stream("slow\n", max_tokens=MANY))
    wait(lambda: running_requests(client) == 0)


def test_the_other_dialect_is_spoken_and_cumulative_text_is_cut(running: server.Server) -> None:
    with Client(running.endpoint, "llmapi", timeout=60) as client:
        assert client.names["max_tokens"] == "sampling_param_max_tokens"
        assert client.generate("x", max_tokens=3) == "x0 x1 x2 "
        assert client.cumulative is True
        assert [chunk.text for chunk in client.stream("x", max_tokens=3)] == ["x0 ", "x1 ", "x2 "]
