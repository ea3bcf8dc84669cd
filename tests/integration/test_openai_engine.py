"""`python -m pipeline serve` with OpenAI's API over the compiled engine: tiny_r1 thinks and answers as its template asks."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from pipeline.core.errors import MissingToolError
from pipeline.triton import server
from pipeline.triton.client import Client
from pipeline.triton.http import Endpoint
from tests._utils import serving
from tests.conftest import Workspace

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

CHECKPOINT = Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1"
CHATS = [
    [{"role": "user", "content": "What is `copyfile` in `shutil`?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is `join` in `os.path`?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA function."},
        {"role": "user", "content": "What is `copytree` in `shutil`?"},
    ],
]
TOKENS = 160
FREE = [f"serve.{name}_port=0" for name in ("http", "grpc", "metrics", "openai")]


@contextmanager
def served(workspace: Workspace, *words: str) -> Iterator[dict[str, str]]:
    """`serve` until the block ends: its lines by their first word."""
    command = workspace.command("serve", "+hw=cpu", *words)
    process = subprocess.Popen(command, cwd=workspace.folder, env=workspace.env(), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    lines = dict[str, str]()
    for line in process.stdout:
        lines[line.split()[0]] = line.split()[-1]
        if line.startswith("openai "):
            break
    try:
        yield lines
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, process.stdout.read()


@pytest.fixture(scope="module")
def lines(cpu_build: Workspace) -> Iterator[dict[str, str]]:
    with served(cpu_build, *FREE) as lines:
        yield lines


@pytest.fixture(scope="module")
def client(lines: dict[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=lines["openai"], api_key="any", max_retries=0, timeout=300) as client:
        yield client


def port(lines: dict[str, str], name: str) -> int:
    return int(lines[name].removesuffix("/metrics").rpartition(":")[2])


def test_the_answer_is_the_model_s_to_transformers_prompt(lines: dict[str, str], client: openai.OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    endpoint = Endpoint("127.0.0.1", *(port(lines, name) for name in ("http", "grpc", "metrics")))
    with Client(endpoint, "tiny_r1", timeout=300) as direct:
        for chat in CHATS:
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            with direct.stream(prompt, max_tokens=TOKENS, temperature=0.0, count_tokens=True) as stream:
                thought, closed, said = "".join(chunk.text for chunk in stream).partition("</think>")
            answer = client.chat.completions.create(model="tiny_r1", messages=chat, max_tokens=TOKENS, temperature=0)
            message = answer.choices[0].message
            assert closed and said.strip(), "the model is expected to end its thought and to go on"
            assert (message.reasoning_content, message.content) == (thought.strip(), said.lstrip())
            assert answer.usage.prompt_tokens == len(tokenizer(prompt, add_special_tokens=False).input_ids)
            assert answer.usage.completion_tokens == stream.tokens
            assert answer.choices[0].finish_reason == ("length" if stream.tokens == TOKENS else "stop")


def test_streams_at_once_are_the_whole_answers_in_many_pieces(client: openai.OpenAI) -> None:
    def whole(number: int) -> tuple[str, str]:
        ask = {"model": "tiny_r1", "messages": CHATS[number % 2], "max_tokens": TOKENS, "seed": number}
        message = client.chat.completions.create(**ask).choices[0].message
        return message.reasoning_content, message.content

    def stream(number: int) -> tuple[str, str]:
        ask = {"model": "tiny_r1", "messages": CHATS[number % 2], "max_tokens": TOKENS, "seed": number}
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**ask, stream=True)]
        thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        contents = [delta.content or "" for delta in deltas]
        assert sum(map(bool, thoughts)) + sum(map(bool, contents)) > TOKENS // 4
        return "".join(thoughts), "".join(contents)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(stream, range(8))) == list(pool.map(whole, range(8)))


def test_a_stop_word_inside_the_answer(client: openai.OpenAI) -> None:
    ask = {"model": "tiny_r1", "messages": CHATS[0], "max_tokens": TOKENS, "temperature": 0}
    text = client.chat.completions.create(**ask).choices[0].message.content
    word = text.split()[3]
    stopped = client.chat.completions.create(**ask, stop=word).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(word)], "stop")


def test_the_gateway_alone_in_front_of_a_server_that_runs(cpu_build: Workspace, lines: dict[str, str]) -> None:
    ports = [f"serve.{name}_port={port(lines, name)}" for name in ("grpc", "metrics")]
    with served(cpu_build, f"serve.url=127.0.0.1:{port(lines, 'http')}", *ports, "serve.openai_port=0") as more:
        assert set(more) == {"openai"} and more["openai"] != lines["openai"]
        with openai.OpenAI(base_url=more["openai"], api_key="any", max_retries=0) as client:
            answer = client.completions.create(model="tiny_r1", prompt="The Python", max_tokens=5)
        assert answer.usage.completion_tokens == 5
