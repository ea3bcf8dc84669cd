"""The served model over gRPC: one call a generation, in whichever layout the server holds.

Nothing is asked of the server before it is needed, so the gateway may start before the model is loaded and outlive a
restart of it. A generation that its reader leaves is cancelled in Triton, which frees its slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pipeline.openai.errors import ApiError, from_triton
from pipeline.triton.dialect import Dialect, is_cumulative, outputs_of, text_of

__all__ = ["Backend", "Model", "Piece"]

CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
QUICK = 10.0
"""Seconds for questions that need no generation."""
DEAD = "is not healthy"
"""Triton's words for a python model without a process: it fails new requests and never answers those that it had."""
PROBE = {"max_tokens": 8, "temperature": 0.0}
NO_LIMIT = {"top_k": 0, "top_p": 1}
DONE = {"end_id": "stop", "stop_words": "stop", "eos": "stop"}
"""Other engines' words for OpenAI's "stop"."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One response: its new text and, on the last one, what the model tells of the generation."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """What the server says about the model."""

    dialect: Dialect
    cumulative: bool
    """True if each response of a stream repeats the text so far."""
    max_model_len: int | None
    """Tokens of prompt and output together, if the configuration tells."""


class Backend:
    """One model of one server. `timeout`: seconds that a generation may take."""

    def __init__(self, address: str, model: str, timeout: float) -> None:
        self.address, self.name, self.timeout = address, model, timeout
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._model: Model | None = None
        self._asking = asyncio.Lock()
        self._suspect = False
        """An answer failed inside the model, which says it is ready even when its process has died."""
        self._running: set[Any] = set()
        """gRPC calls; those of a process that died would wait for ever."""

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close()

    async def ready(self) -> bool:
        """Whether the model says it is ready and, if an answer failed since the last time, gives one token to prove it."""
        try:
            reply = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self.name), timeout=QUICK)
            if reply.ready and self._suspect:
                pieces = self.generate("The", {"max_tokens": 1}, stream=False, request_id="health")
                self._suspect = not [piece async for piece in pieces]
        except (grpc.RpcError, ApiError):
            return False
        return bool(reply.ready)

    async def model(self) -> Model:
        """The model, asked for once; ApiError where the server does not answer."""
        async with self._asking:
            if self._model is None:
                self._model = await self._ask()
            return self._model

    async def generate(
        self, prompt: str, options: Mapping[str, Any], *, stream: bool, request_id: str
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of one generation. Closing the iterator cancels what is not finished.

        Raises:
            ApiError: what the server answers, or that it does not.
        """
        model = await self.model()
        wanted = {name: True for name in ("finish_reason", "count_prompt", "count_tokens") if model.dialect.has(name)}
        request = _request(model, prompt, {**options, **wanted, "stream": stream}, request_id)
        seen, counted = "", 0
        async with aclosing(self._responses(request, model.dialect.decoupled)) as responses:
            async for outputs in responses:
                piece = _piece(outputs)
                if model.cumulative and stream:
                    piece, seen = _only_new(piece, seen), piece.text or seen
                if model.dialect.packed:  # vLLM counts each response alone
                    counted += piece.completion_tokens or 0
                    piece = _counting(piece, counted)
                yield piece

    async def _responses(self, request: service_pb2.ModelInferRequest, decoupled: bool) -> AsyncGenerator[dict[str, bytes], None]:
        try:
            if not decoupled:
                yield outputs_of(await self._stub.ModelInfer(request, timeout=self.timeout))
                return
            async with aclosing(self._stream(request)) as stream:
                async for outputs in stream:
                    yield outputs
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.UNAVAILABLE:
                self._model = None  # the server may come back with another
            raise self._failure(code.name, details or code.name) from None

    async def _stream(self, request: service_pb2.ModelInferRequest) -> AsyncGenerator[dict[str, bytes], None]:
        # Guard: without `triton_grpc_error`, which would give a status: 2.51 dies of it when several requests fail at once.
        call = self._stub.ModelStreamInfer(_once(request), timeout=self.timeout)
        self._running.add(call)
        try:
            async for message in call:
                if message.error_message:
                    # Guard: let the server end the call. If it is cancelled now, Triton 2.51 may hold the model
                    # until it is killed.
                    async for _ in call:
                        pass
                    raise self._failure("", message.error_message)
                yield outputs_of(message.infer_response)
        except asyncio.CancelledError:
            if call in self._running:
                raise  # the reader has left
            raise ApiError(500, "The model's process died during this answer.", code="engine_error") from None
        finally:
            self._running.discard(call)
            call.cancel()

    def _failure(self, code: str, text: str) -> ApiError:
        """The error for the client; if the model's process is dead, the answers that wait for it are ended too."""
        failure = from_triton(code, text)
        self._suspect = self._suspect or failure.status == 500
        if DEAD in text:
            calls, self._running = self._running, set()
            for call in calls:
                call.cancel()
        return failure

    async def _ask(self) -> Model:
        question = service_pb2.ModelConfigRequest(name=self.name)
        try:
            reply = await self._stub.ModelConfig(question, timeout=QUICK)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND or "unknown model" in (error.details() or ""):
                message = f"The server at {self.address} has no model {self.name} loaded: {error.details()}"
                raise ApiError(503, message, code="model_not_loaded") from None
            message = f"The model server at {self.address} does not answer: {error.details()}"
            raise ApiError(503, message, code="server_unavailable") from None
        config = json_format.MessageToDict(reply.config, preserving_proto_field_name=True)
        dialect = Dialect.of(config)
        return Model(dialect, await self._is_cumulative(dialect), _max_model_len(config))

    async def _is_cumulative(self, dialect: Dialect) -> bool:
        """Measured by one short request both ways, and only for models that may be so."""
        if not (dialect.may_repeat and dialect.decoupled):
            return False
        texts, options = [], {name: value for name, value in PROBE.items() if dialect.has(name)}
        for stream in (False, True):
            request = dialect.request(dialect.tensors("The", **options, stream=stream))
            texts.append([_piece(outputs).text async for outputs in self._responses(request, True)])
        return is_cumulative(texts[1], "".join(texts[0]))


async def _once(request: service_pb2.ModelInferRequest) -> AsyncGenerator[service_pb2.ModelInferRequest, None]:
    yield request


def _request(model: Model, prompt: str, options: dict[str, Any], request_id: str) -> service_pb2.ModelInferRequest:
    """The message, or a refusal that names the option which this model lacks."""
    for name in [name for name in options if not model.dialect.has(name)]:
        if name == "stream" or options[name] == NO_LIMIT.get(name):
            del options[name]  # the model answers whole; it sets no limit anyway
        else:
            raise ApiError(
                400, f"{name} is not supported by the served model: leave it out.", param=name, code="unsupported_parameter"
            )
    if "seed" in options:
        options["seed"] %= 2**64
    return model.dialect.request(model.dialect.tensors(prompt, **options), request_id)


def _piece(outputs: Mapping[str, bytes]) -> Piece:
    reason = text_of(outputs["finish_reason"]) if outputs.get("finish_reason") else ""
    return Piece(
        text_of(outputs["text_output"]) if outputs.get("text_output") else "",
        DONE.get(reason, "" if reason == "None" else reason),
        _number(outputs, "num_input_tokens"),
        _number(outputs, "num_output_tokens"),
    )


def _number(outputs: Mapping[str, bytes], name: str) -> int | None:
    return int.from_bytes(outputs[name], "little") if outputs.get(name) else None


def _only_new(piece: Piece, seen: str) -> Piece:
    return Piece(piece.text[len(seen) :], piece.finish_reason, piece.prompt_tokens, piece.completion_tokens)


def _counting(piece: Piece, counted: int) -> Piece:
    return Piece(piece.text, piece.finish_reason, piece.prompt_tokens, counted)


def _max_model_len(config: Mapping[str, Any]) -> int | None:
    value = config.get("parameters", {}).get("max_seq_len", {}).get("string_value", "")
    return int(value) if value.isdecimal() else None
