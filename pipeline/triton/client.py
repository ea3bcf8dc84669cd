"""A small client that asks the server what its model looks like, then speaks that model's dialect.

Streams run over gRPC: one call a stream on a shared channel, with a deadline on the whole call, and cancelled when the
loop is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pipeline.core.errors import ConfigError
from pipeline.triton.dialect import Dialect, is_cumulative, outputs_of, text_of
from pipeline.triton.http import Endpoint, TritonError

__all__ = ["Chunk", "Client", "Stream", "TritonError"]

PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream and when it came, in seconds after the request was sent."""

    text: str
    seconds: float


class Stream(Iterator[Chunk]):
    """The chunks of one request. Leaving the `with` block, or `cancel`, ends it on the server too."""

    def __init__(self, call: Any, cumulative: bool, counts_chunks: bool = False) -> None:
        self._call, self._cumulative, self._counts_chunks = call, cumulative, counts_chunks
        self._begin, self._seen = time.perf_counter(), ""
        self.tokens: int | None = None
        """Output tokens, once the stream is over, if `count_tokens` was asked for."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __next__(self) -> Chunk:
        try:
            while "text_output" not in (outputs := self._outputs(next(self._call))):
                pass  # an empty response may say that the stream is over
        except grpc.RpcError as error:
            raise TritonError(0, _rpc_sentence(error)) from None
        text = text_of(outputs["text_output"])
        if "num_output_tokens" in outputs:
            count = int.from_bytes(outputs["num_output_tokens"], "little")
            self.tokens = count + (self.tokens or 0) if self._counts_chunks else count
        if self._cumulative:
            text, self._seen = text[len(self._seen) :], text
        return Chunk(text, time.perf_counter() - self._begin)

    def _outputs(self, message: service_pb2.ModelStreamInferResponse) -> dict[str, bytes]:
        """Raw outputs of one response by name."""
        if message.error_message:
            # Guard: let the server end the call. If it is cancelled now, Triton 2.51 may hold the model
            # until it is killed.
            list(self._call)
            raise TritonError(200, message.error_message)
        return outputs_of(message.infer_response)

    def cancel(self) -> None:
        """Tell the server that nobody listens any more."""
        self._call.cancel()


class Client:
    """Talks to one model. `timeout` bounds every request, in seconds."""

    def __init__(self, endpoint: Endpoint, model: str, timeout: float = 60.0) -> None:
        self.endpoint, self.model, self.timeout = endpoint, model, timeout
        self._channel = grpc.insecure_channel(endpoint.grpc, options=[("grpc.max_receive_message_length", -1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's configuration as the server runs it."""
        return self.endpoint.config(self.model)

    @cached_property
    def dialect(self) -> Dialect:
        """How the model spells our options."""
        return Dialect.of(self.config)

    @property
    def decoupled(self) -> bool:
        """True if the model may answer a request with several responses."""
        return self.dialect.decoupled

    @property
    def names(self) -> dict[str, str]:
        """Our option names -> the model's; an option that the model lacks is absent."""
        return {**self.dialect.names, **self.dialect.packed}

    @cached_property
    def cumulative(self) -> bool:
        """True if each chunk repeats the text so far. Measured once, by one short request both ways."""
        if not self.dialect.may_repeat:
            return False
        options = {"max_tokens": PROBE_TOKENS, "temperature": 0.0}
        whole = self.generate("The", **options)
        pieces = [chunk.text for chunk in self._start("The", {**options, "stream": True}, cumulative=False)]
        return is_cumulative(pieces, whole)

    def body(self, prompt: str, **options: Any) -> dict[str, Any]:
        """The JSON body of generate and generate_stream."""
        return self.dialect.tensors(prompt, **options)

    def generate(self, prompt: str, **options: Any) -> str:
        """The whole text of one request, over HTTP."""
        answer = self.endpoint.generate(self.model, self.body(prompt, **options), self.timeout)
        text = answer["text_output"]
        return str(text[0] if isinstance(text, list) else text)

    def stream(self, prompt: str, **options: Any) -> Stream:
        """Chunks over gRPC, each with only its new text."""
        return self._start(prompt, {**options, "stream": True}, self.cumulative)

    def infer(self, tensors: dict[str, Any]) -> list[str]:
        """Raw inputs over gRPC, by the model's own names; the texts of all responses."""
        call = self._stub.ModelStreamInfer(iter([self.dialect.request(tensors)]), timeout=self.timeout)
        with Stream(call, cumulative=False) as stream:
            return [chunk.text for chunk in stream]

    def _start(self, prompt: str, options: dict[str, Any], cumulative: bool) -> Stream:
        if not self.decoupled:
            raise ConfigError(f"Model {self.model} is not decoupled: it cannot stream. Package it with decoupled true.")
        request = self.dialect.request(self.body(prompt, **options))
        call = self._stub.ModelStreamInfer(iter([request]), timeout=self.timeout)
        return Stream(call, cumulative, counts_chunks=bool(self.dialect.packed))


def _rpc_sentence(error: grpc.RpcError) -> str:
    code, details = getattr(error, "code", lambda: None)(), getattr(error, "details", lambda: "")()
    return f"{code.name if code else 'UNKNOWN'}: {details}"
