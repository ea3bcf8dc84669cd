"""The HTTP side: routes, streams as server-sent events, keys, request ids, and every error in OpenAI's shape.

A stream's status is sent with its first text (or after PING seconds), so what the engine refuses still gets its own
status. A reader that is slow holds back its own generation alone (nothing is kept for it beyond the socket's buffers),
one that stops reading is dropped after STALL seconds, and one that leaves ends its generation in Triton.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress

import aiohttp
from aiohttp import web

from pipeline.openai.answer import DONE, Answer, ChatAnswer, Choice, TextAnswer, event
from pipeline.openai.choice import End
from pipeline.openai.errors import ApiError
from pipeline.openai.reasoning import Delta
from pipeline.openai.schema import ChatRequest, CompletionRequest, Request, parse
from pipeline.openai.service import Run, Service

__all__ = ["MAX_BODY", "make_app"]

MAX_BODY = 16 * 2**20
"""Bytes of a request."""
BODY_SECONDS = 60.0
"""Seconds that a client has to send its request's body."""
STALL = 60.0
"""Seconds that a stream waits for a reader that does not read."""
PING = 15.0
"""Seconds without a first text after which a stream begins with comments."""
PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""What x-request-id may be to be given back."""
SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
ID = web.RequestKey("id", str)
"""A request's own id."""
LOG = logging.getLogger("pipeline.openai")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(service: Service) -> web.Application:
    """The application of one service."""
    gateway = Gateway(service)
    app = web.Application(client_max_size=MAX_BODY, middlewares=[gateway.guard])
    app.router.add_post("/v1/chat/completions", gateway.chat)
    app.router.add_post("/v1/completions", gateway.complete)
    app.router.add_get("/v1/models", gateway.models)
    app.router.add_get("/v1/models/{model:.+}", gateway.one_model)
    app.router.add_get("/health", gateway.health)
    app.router.add_get("/metrics", gateway.metrics)
    app.on_startup.append(gateway.open)
    app.on_cleanup.append(gateway.close)
    return app


class Gateway:
    """The handlers of one application."""

    def __init__(self, service: Service) -> None:
        self._service, self._settings = service, service.settings
        self._created, self._running = int(time.time()), 0
        self._answered: Counter[tuple[str, int]] = Counter()

    async def open(self, _: web.Application) -> None:
        """Make the connection to the server."""
        self._service.connect()

    async def close(self, _: web.Application) -> None:
        """End the connection to the server."""
        await self._service.backend.close()

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every handler: its id, the key, errors as JSON, the counters."""
        request[ID] = uuid.uuid4().hex
        self._running += 1
        try:
            self._require_key(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _refusal(error)
        except Exception as error:  # whatever happens, the client gets OpenAI's shape
            failure = _failure(request, error)
            response = web.json_response(failure.body(), status=failure.status, headers=failure.headers)
        finally:
            self._running -= 1
        if not response.prepared:
            response.headers["x-request-id"] = _public_id(request)
        self._answered[_route(request), response.status] += 1
        return response

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        call = parse(ChatRequest, await _body(request))
        request_id = f"chatcmpl-{request[ID]}"
        answer = ChatAnswer(request_id, self._settings.name, call.include_usage)
        return await _respond(request, call, self._service.chat(call, request_id), answer)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        call = parse(CompletionRequest, await _body(request))
        request_id = f"cmpl-{request[ID]}"
        answer = TextAnswer(request_id, self._settings.name, call.include_usage)
        return await _respond(request, call, self._service.complete(call, request_id), answer)

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models"""
        return web.json_response({"object": "list", "data": [self._model()]})

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/NAME"""
        self._service.require_model(request.match_info["model"])
        return web.json_response(self._model())

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 while the model says it is ready."""
        if not await self._service.backend.ready():
            message = f"The model {self._settings.model} at {self._settings.grpc} is not ready."
            raise ApiError(503, message, code="server_unavailable")
        return web.json_response({"status": "ok"})

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics: the server's page, and the gateway's own counters."""
        page = await _fetch(self._settings.metrics_url) if self._settings.metrics_url else ""
        own = self._counters() if self._settings.workers == 1 else ["# The gateway's counters are left out: workers count apart."]
        return web.Response(text="\n".join([page, *own, ""]), content_type="text/plain", charset="utf-8")

    def _counters(self) -> list[str]:
        counts = [
            f'openai_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._answered.items())
        ]
        running = ["# TYPE openai_requests_running gauge", f"openai_requests_running {self._running}"]
        return ["# TYPE openai_requests_total counter", *counts, *running]

    def _model(self) -> dict[str, object]:
        length = self._settings.max_model_len
        more = {"max_model_len": length} if length else {}
        return {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "triton", **more}

    def _require_key(self, request: web.Request) -> None:
        key = self._settings.api_key
        if not key or not request.path.startswith("/v1/"):
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode("utf-8", "surrogateescape")  # as the header's bytes were decoded
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent, key.encode()):
            raise ApiError(401, "The API key is missing or wrong: send it as Authorization: Bearer KEY.", code="invalid_api_key")


# --- answers --------------------------------------------------------------------------------------------------


async def _respond(request: web.Request, call: Request, run: Run, answer: Answer) -> web.StreamResponse:
    if call.stream:
        return await _stream(request, _events(run, answer, call.include_usage))
    choices = [Choice() for _ in range(run.choices)]
    async with aclosing(run.items()) as items:
        async for number, item in items:
            if isinstance(item, End):
                choices[number].finish_reason = item.finish_reason
            else:
                choices[number].add(item)
    return web.json_response(answer.whole(choices, await run.counts()))


async def _events(run: Run, answer: Answer, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The stream's bytes, from the first text on."""
    opened = set[int]()
    async with aclosing(run.items()) as items:
        async for number, item in items:
            chunks = [] if number in opened else answer.opening(number)
            opened.add(number)
            delta, reason = (Delta(), item.finish_reason) if isinstance(item, End) else (item, None)
            chunks.append(answer.chunk(number, delta, reason))
            yield b"".join(map(event, chunks))
    if include_usage:
        yield event(answer.counts(await run.counts()))
    yield DONE


async def _stream(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE | {"x-request-id": _public_id(request)})
    async with aclosing(events):
        try:
            first = await _first(request, response, events)
            if not response.prepared:
                await response.prepare(request)
            await _write(response, first)
            async for data in events:
                await _write(response, data)
        except (TimeoutError, ConnectionError):
            if request.transport:
                request.transport.abort()
        except Exception as error:
            if not response.prepared:
                raise
            await _write(response, event(_failure(request, error).body()))  # the status is sent, so it can only be an event
    return response


async def _first(request: web.Request, response: web.StreamResponse, events: AsyncGenerator[bytes, None]) -> bytes:
    """The stream's first data. Until it comes the reader gets a comment every PING seconds, or proxies would hang up."""
    waiting = asyncio.ensure_future(anext(events))
    try:
        while not (await asyncio.wait({waiting}, timeout=PING))[0]:
            if not response.prepared:
                await response.prepare(request)
            await _write(response, b": keep-alive\n\n")
        return waiting.result()
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting})


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Waits while the reader is slow, but not for ever."""
    async with asyncio.timeout(STALL):
        await response.write(data)


# --- requests -------------------------------------------------------------------------------------------------


async def _body(request: web.Request) -> bytes:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "A compressed body is not supported: send plain JSON.")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"The body did not come within {BODY_SECONDS:g} s.") from None


def _failure(request: web.Request, error: Exception) -> ApiError:
    """What the client is told; what is not the client's fault is logged, with the request's id."""
    if not isinstance(error, ApiError):
        LOG.error("%s %s failed", request[ID], request.path, exc_info=error)
        return ApiError(500, "The gateway failed; its log says why.", code="internal_error")
    if error.status >= 500:
        LOG.warning("%s %s: %s %s", request[ID], request.path, error.status, error.message)
    return error


def _public_id(request: web.Request) -> str:
    """The client's own id of the request if it is plain text, else ours."""
    given = request.headers.get("x-request-id", "")
    return given if PLAIN_ID.fullmatch(given) else request[ID]


def _route(request: web.Request) -> str:
    """The route, not the path: a label of metrics that clients cannot invent."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "other"


def _refusal(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals (no such path, wrong method, body too large) as JSON."""
    message = error.reason
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message = f"The body is too large: at most {MAX_BODY:,} bytes."
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return web.json_response(ApiError(error.status, message).body(), status=error.status, headers=headers)


async def _fetch(url: str) -> str:
    with suppress(aiohttp.ClientError, TimeoutError):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session, session.get(url) as reply:
            return await reply.text()
    return f"# {json.dumps(url)} does not answer\n"
