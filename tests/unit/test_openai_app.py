"""The gateway over a TEST DOUBLE of the model: what is refused and how, keys and ids, slow readers, clients that leave."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pipeline.openai import app as app_module
from pipeline.openai.app import make_app
from pipeline.openai.backend import Model, Piece
from pipeline.openai.errors import ApiError, from_triton
from pipeline.openai.service import Service, Settings
from pipeline.triton.dialect import Dialect

TINY = Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
INPUTS = ("text_input", "stream", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_words", "ignore_eos")


class Double:
    """A model that says `words`, or words without end; `error` comes after them."""

    def __init__(self, words: list[str] | None = None, error: Exception | None = None, pause: float = 0.0) -> None:
        self.words, self.error, self.pause = words, error, pause
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.said, self.left = 0, 0
        self.up = True

    async def ready(self) -> bool:
        return self.up

    async def close(self) -> None: ...

    async def model(self) -> Model:
        names = {name: name for name in INPUTS}
        return Model(Dialect("m", names, {}, dict.fromkeys(INPUTS, "BYTES"), frozenset(), False, True), False, 100)

    async def generate(self, prompt: str, options: Mapping[str, Any], *, stream: bool, request_id: str) -> AsyncIterator[Piece]:
        self.calls.append((prompt, dict(options)))
        try:
            await asyncio.sleep(self.pause)
            for word in iter(lambda: "word " * 200, None) if self.words is None else self.words:
                self.said += 1
                await asyncio.sleep(self.pause)
                yield Piece(word)
            if self.error:
                raise self.error
            yield Piece("", "stop", 3, len(self.words or []))
        except (GeneratorExit, asyncio.CancelledError):
            self.left += 1
            raise


def serving(
    test: Callable[[aiohttp.ClientSession, Double], Awaitable[None]], model: Double | None = None, **settings: Any
) -> None:
    """Run `test` against a gateway on a free port."""

    async def run() -> None:
        service = Service(Settings(grpc="127.0.0.1:1", model="m", tokenizer=TINY, **settings))
        runner = web.AppRunner(make_app(service), handler_cancellation=True, auto_decompress=False, shutdown_timeout=1)
        await runner.setup()
        await service.backend.close()
        double = service.backend = model or Double(["one ", "two"])  # type: ignore[assignment]
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            await asyncio.wait_for(test(session, double), 120)
        await runner.cleanup()

    asyncio.run(run())


async def post(session: aiohttp.ClientSession, body: Any, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with session.post(path, data=data, **more) as reply:
        return reply.status, await reply.json(content_type=None)


async def wait(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


# --- what is refused ------------------------------------------------------------------------------------------

BAD: list[tuple[Any, str | None, str]] = [
    (b"", None, "not valid JSON"),
    (b"{", None, "not valid JSON"),
    (b"[1]", None, "must be a JSON object"),
    (b'{"model": "m", "temperature": NaN}', None, "NaN is no JSON number"),
    (b'{"model": "\xff"}', None, "not valid UTF-8"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', None, "surrogate"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b'{"seed": ' + b"9" * 5000 + b"}", None, "not valid JSON"),
    ({"messages": CHAT["messages"]}, "model", "model is missing"),
    ({"model": "m"}, "messages", "messages is missing"),
    (CHAT | {"messages": []}, "messages", "messages is empty"),
    (CHAT | {"messages": "hi"}, "messages", "must be a list"),
    (CHAT | {"messages": ["hi"]}, "messages[0]", "must be an object"),
    (CHAT | {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "role='wizard' is not supported"),
    (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
    (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "not text"),
    (CHAT | {"max_tokens": 0}, "max_tokens", "at least 1"),
    (CHAT | {"max_tokens": -5}, "max_tokens", "at least 1"),
    (CHAT | {"max_tokens": 2**40}, "max_tokens", "too large"),
    (CHAT | {"max_tokens": 1.5}, "max_tokens", "whole number"),
    (CHAT | {"max_tokens": "5"}, "max_tokens", "whole number"),
    (CHAT | {"max_tokens": True}, "max_tokens", "whole number"),
    (CHAT | {"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "give one of them"),
    (CHAT | {"temperature": -0.1}, "temperature", "at least 0"),
    (CHAT | {"temperature": 2.1}, "temperature", "at most 2"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature", "finite"),
    (CHAT | {"top_p": 0}, "top_p", "above 0"),
    (CHAT | {"top_p": 1.01}, "top_p", "at most 1"),
    (CHAT | {"n": 0}, "n", "at least 1"),
    (CHAT | {"n": 17}, "n", "at most 16"),
    (CHAT | {"seed": 2**70}, "seed", "too large"),
    (CHAT | {"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
    (CHAT | {"stop": ["a", 1]}, "stop[1]", "must be text"),
    (CHAT | {"stream": "yes"}, "stream", "true or false"),
    (CHAT | {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    (CHAT | {"stream": True, "stream_options": {"other": True}}, "stream_options.other", "known are include_usage"),
    (CHAT | {"logprobs": True}, "logprobs", "not supported"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools", "not supported"),
    (CHAT | {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (CHAT | {"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    (CHAT | {"repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
    (CHAT | {"max_token": 5}, "max_token", "Unrecognized request argument"),
    (CHAT | {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "may not set bos_token"),
    (CHAT | {"model": ""}, "model", "empty"),
]


def test_a_bad_chat_is_refused_with_the_field_that_is_wrong() -> None:
    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        for body, param, says in BAD:
            status, answer = await post(session, body)
            error = answer["error"]
            assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error"), (body, answer)
            assert says in error["message"], (body, answer)
        assert model.calls == []
        assert (await post(session, CHAT))[0] == 200

    serving(test)


def test_a_bad_completion_is_refused_too() -> None:
    async def test(session: aiohttp.ClientSession, _: Double) -> None:
        for change, param, says in (
            ({"prompt": ""}, "prompt", "is empty"),
            ({"prompt": []}, "prompt", "not empty"),
            ({"prompt": ["a", ""]}, "prompt", "is empty"),
            ({"prompt": [1, 2, 3]}, "prompt", "token ids"),
            ({"prompt": [[1], [2]]}, "prompt", "token ids"),
            ({"prompt": ["a"] * 9, "n": 2}, "n", "at most 16"),
            ({"logprobs": 0}, "logprobs", "not supported"),
            ({"echo": True}, "echo", "not supported"),
            ({"messages": []}, "messages", "Unrecognized"),
        ):
            status, answer = await post(session, TEXT | change, "/v1/completions")
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert says in answer["error"]["message"]

    serving(test)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    extra = {"logprobs": False, "tools": [], "n": 1, "user": "u", "store": True, "presence_penalty": 0, "stop": None,
             "response_format": {"type": "text"}, "frequency_penalty": None, "metadata": {"a": "b"},
             "repetition_penalty": 1.0, "top_k": -1, "min_tokens": 0}  # fmt: skip

    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        assert (await post(session, CHAT | extra))[0] == 200
        [(_, options)] = model.calls
        defaults = {"temperature": 0.6, "top_p": 0.95}  # of tiny_r1
        assert options == defaults | {"top_k": 0, "max_tokens": 100 - 7}, "all that fits"

    serving(test)


def test_other_refusals_have_openai_s_shape() -> None:
    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        for path, body, more, status, says in (
            ("/v1/chat/completions", CHAT | {"model": "gpt"}, {}, 404, "'gpt' does not exist"),
            ("/v1/embeddings", CHAT, {}, 404, "Not Found"),
            ("/v1/models", CHAT, {}, 405, "Method Not Allowed"),
            ("/v1/chat/completions", b" " * (app_module.MAX_BODY + 1), {}, 413, "at most 16,777,216 bytes"),
            ("/v1/chat/completions", gzip.compress(b"{}"), {"headers": {"Content-Encoding": "gzip"}}, 415, "compressed"),
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x " * 200}]}, {}, 400, "may have 100"),
            ("/v1/completions", TEXT | {"prompt": "x" * 10**6, "max_tokens": 5}, {}, 400, "at least"),
        ):
            got, answer = await post(session, body, path, **more)
            assert got == status and says in answer["error"]["message"], answer
            assert set(answer["error"]) == {"message", "type", "param", "code"}
        model.up = False
        async with session.get("/health") as reply:
            assert reply.status == 503 and (await reply.json())["error"]["code"] == "server_unavailable"

    serving(test)


@pytest.mark.parametrize(("code", "text", "status", "name"), [
    ("UNAVAILABLE", "3 requests wait already, of at most serve.max_queue=3; try again later", 429, "queue_full"),
    ("UNAVAILABLE", "Exceeds maximum queue size", 429, "queue_full"),
    ("UNAVAILABLE", "failed to connect to all addresses", 503, "server_unavailable"),
    ("INVALID_ARGUMENT", "together 302, above the engine's max_seq_len of 256", 400, "context_length_exceeded"),
    ("INTERNAL", "The sum of prompt length (9) and max_tokens should not exceed max_num_tokens", 400, "context_length_exceeded"),
    ("", "prompt (10) is longer than the maximum model length of 8", 400, "context_length_exceeded"),
    ("", "3 requests wait already, of at most serve.max_queue=3; try again later", 429, "queue_full"),
    ("", "prompt and max_tokens need 9 KV pages, but the engine has 8; lower max_tokens", 400, "context_length_exceeded"),
    ("", "the server is stopping", 503, "server_unavailable"),
    ("", "Request for unknown model: 'm' is not found", 503, "model_not_loaded"),
    ("", "the engine failed (RuntimeError: x); restart the server", 500, "engine_error"),
    ("INVALID_ARGUMENT", "top_k=-1 must be 0 or above", 400, None),
    ("INTERNAL", "Stub process 'm_0_0' is not healthy.", 500, "engine_error"),
    ("DEADLINE_EXCEEDED", "Deadline Exceeded", 504, "timeout"),
    ("NOT_FOUND", "Request for unknown model", 503, "model_not_loaded"),
])  # fmt: skip
def test_triton_s_errors_get_their_status(code: str, text: str, status: int, name: str | None) -> None:
    error = from_triton(code, text)
    assert (error.status, error.code, error.message) == (status, name, text)
    assert ("Retry-After" in error.headers) == (status in (429, 503))


# --- keys, ids, errors inside a stream ------------------------------------------------------------------------


def test_the_key_is_asked_for_where_there_is_one() -> None:
    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cretx"}):
            status, answer = await post(session, CHAT, headers=header)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert model.calls == []
        assert (await post(session, CHAT, headers={"Authorization": "Bearer s3cret"}))[0] == 200
        async with session.get("/health") as reply:
            assert reply.status == 200, "a load balancer has no key"
        assert session._base_url
        reader, writer = await asyncio.open_connection("127.0.0.1", session._base_url.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert b"401" in await reader.readline()
        writer.close()

    serving(test, api_key="s3cret")


def test_a_plain_request_id_is_given_back_and_no_other() -> None:
    async def test(session: aiohttp.ClientSession, _: Double) -> None:
        for given, same in (("abc-1", True), ("with space", False), ("x" * 200, False)):
            async with session.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": given}) as reply:
                assert (reply.headers["x-request-id"] == given) is same
                assert (await reply.json())["id"].startswith("chatcmpl-")

    serving(test)


def test_an_error_before_the_first_text_has_its_status_and_one_after_it_is_an_event() -> None:
    error = ApiError(429, "full", code="queue_full")

    async def early(session: aiohttp.ClientSession, _: Double) -> None:
        status, answer = await post(session, CHAT | {"stream": True})
        assert (status, answer["error"]["code"]) == (429, "queue_full")

    async def late(session: aiohttp.ClientSession, _: Double) -> None:
        async with session.post("/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
            *_, last = [line for line in (await reply.text()).splitlines() if line]
        assert reply.status == 200 and json.loads(last.removeprefix("data: ")) == error.body()

    serving(early, Double([], error))
    serving(late, Double(["one"], error))


def test_a_stream_that_waits_long_begins_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    written, real = [], app_module._write

    async def write(response: web.StreamResponse, data: bytes) -> None:
        written.append(data)
        await real(response, data)

    class Late(Double):
        async def generate(self, *asked: Any, **options: Any) -> AsyncIterator[Piece]:
            await wait(lambda: written.count(b": keep-alive\n\n") > 3)
            async for piece in super().generate(*asked, **options):
                yield piece

    monkeypatch.setattr(app_module, "PING", 0.05)
    monkeypatch.setattr(app_module, "_write", write)

    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        for error in (None, ApiError(429, "full", code="queue_full")):
            written.clear()
            model.words, model.error = ([], error) if error else (["one"], None)
            async with session.post("/v1/completions", json=TEXT | {"stream": True}) as reply:
                assert reply.status == 200
                *first, last, end = [line for line in (await reply.text()).splitlines() if line]
            assert first[0] == ": keep-alive" and len(first) > 2
            assert end == "data: [DONE]" if error is None else json.loads(end[6:]) == error.body(), last

    serving(test, Late())


def test_a_mistake_of_the_gateway_s_own_has_the_shape_too(caplog: pytest.LogCaptureFixture) -> None:
    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        status, answer = await post(session, CHAT)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (500, "internal_error", "server_error")
        async with session.post("/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
            assert '"code":"internal_error"' in await reply.text()

    serving(test, Double(["one"], ZeroDivisionError("a bug")))
    assert "a bug" in caplog.text


def test_one_failed_choice_ends_the_others() -> None:
    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        status, answer = await post(session, CHAT | {"n": 4})
        assert (status, answer["error"]["message"]) == (500, "broken")
        assert len(model.calls) == 4

    serving(test, Double(["a", "b"], ApiError(500, "broken")))


def test_two_hundred_streams_and_a_connection_that_is_kept() -> None:
    async def one(session: aiohttp.ClientSession) -> str:
        async with session.post("/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
            lines = [line[6:] for line in (await reply.text()).splitlines() if line]
        assert lines.pop() == "[DONE]"
        return "".join(json.loads(line)["choices"][0]["delta"].get("reasoning_content", "") for line in lines)

    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        assert session._base_url
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(session._base_url, connector=connector) as many:
            assert await asyncio.gather(*(one(many) for _ in range(200))) == ["one two"] * 200
        reader, writer = await asyncio.open_connection("127.0.0.1", session._base_url.port)
        for _ in range(2):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        writer.close()

    serving(test, Double(["one ", "two"], pause=0.01))


def test_choices_of_one_stream_come_side_by_side() -> None:
    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        async with session.post("/v1/completions", json=TEXT | {"n": 3, "stream": True, "seed": -1}) as reply:
            events = [json.loads(line[6:]) for line in (await reply.text()).splitlines() if line.startswith("data: {")]
        texts = ["", "", ""]
        for [choice] in (event["choices"] for event in events):
            texts[choice["index"]] += choice["text"]
        assert texts == ["one two"] * 3
        assert [options["seed"] for _, options in model.calls] == [-1, 0, 1]

    serving(test, Double(["one ", "two"], pause=0.001))


# --- readers that are slow, or leave --------------------------------------------------------------------------


def slow_reader(session: aiohttp.ClientSession, body: dict[str, Any]) -> socket.socket:
    """A connection that has asked for a stream and reads nothing."""
    assert session._base_url
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", session._base_url.port))
    data = json.dumps(body).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    return connection


def test_a_slow_reader_holds_back_its_own_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "STALL", 2)

    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        with slow_reader(session, TEXT | {"stream": True}):
            said, still = 0, 0
            while still < 5:  # also if each of them lasts as long as a pause of the machine, the others go on meanwhile
                said, still = model.said, still + 1 if 0 < said == model.said else 0
                await asyncio.sleep(0.05)
            monkeypatch.setattr(app_module, "STALL", 100)  # no limit for the other one, which the machine may hold up
            assert said * 1000 < 16 * 2**20, "a model without end was read on although nobody takes its text"
            async with session.post("/v1/completions", json=TEXT | {"stream": True}) as reply:
                async for line in reply.content:
                    assert line
                    if model.said > said + 100:
                        break
            await wait(lambda: model.left == 2)  # the slow one was dropped after STALL, the other one has left

    serving(test, Double())


def test_a_client_that_leaves_ends_its_generation_also_before_the_first_text() -> None:
    async def test(session: aiohttp.ClientSession, model: Double) -> None:
        for number, stream in enumerate((True, False), 1):
            connection = slow_reader(session, TEXT | {"stream": stream})
            await wait(lambda number=number: len(model.calls) == number)
            connection.close()
            await wait(lambda number=number: model.left == number)

    serving(test, Double(["never"], pause=30))


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.2)

    async def test(session: aiohttp.ClientSession, _: Double) -> None:
        assert session._base_url
        reader, writer = await asyncio.open_connection("127.0.0.1", session._base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert b"408" in await reader.readline()
        writer.close()

    serving(test)
