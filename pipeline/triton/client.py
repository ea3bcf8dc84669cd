"""A small client that asks the server what its model looks like, then speaks that model's dialect.

Two dialects exist: the names of TensorRT-LLM's ensemble and BLS models ("ensemble", which the torch engine shares), and
those of its LLM-API model ("llmapi": `streaming`, `sampling_param_max_tokens`, no batch dimension). Streams run over
gRPC: one call a stream on a shared channel, with a deadline on the whole call, and cancelled when the loop is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from pipeline.core.errors import ConfigError
from pipeline.triton.http import Endpoint, TritonError

__all__ = ["Chunk", "Client", "Stream", "TritonError"]

ENSEMBLE = {
    "stream": "stream",
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "seed",
    "stop_words": "stop_words",
    "ignore_eos": "ignore_eos",
    "count_tokens": "return_num_output_tokens",
}
LLMAPI = {
    "stream": "streaming",
    "max_tokens": "sampling_param_max_tokens",
    "temperature": "sampling_param_temperature",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "seed": "sampling_param_seed",
    "stop_words": "sampling_param_stop",
}
PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream and when it came, in seconds after the request was sent."""

    text: str
    seconds: float


class Stream(Iterator[Chunk]):
    """The chunks of one request. Leaving the `with` block, or `cancel`, ends it on the server too."""

    def __init__(self, call: Any, cumulative: bool) -> None:
        self._call, self._cumulative = call, cumulative
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
        text = outputs["text_output"][4:].decode()  # Guard: the first 4 bytes of a string are its length
        if "num_output_tokens" in outputs:
            self.tokens = int.from_bytes(outputs["num_output_tokens"], "little")
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
        response = message.infer_response
        return {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)}

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

    @property
    def decoupled(self) -> bool:
        """True if the model may answer a request with several responses."""
        return bool(self.config.get("model_transaction_policy", {}).get("decoupled", False))

    @cached_property
    def names(self) -> dict[str, str]:
        """Our option names -> the model's input names; an option that the model lacks is absent."""
        inputs = {tensor["name"] for tensor in self.config["input"]}
        dialect = LLMAPI if "sampling_param_max_tokens" in inputs else ENSEMBLE
        return {ours: theirs for ours, theirs in dialect.items() if theirs in inputs}

    @cached_property
    def cumulative(self) -> bool:
        """True if each chunk repeats the text so far. Measured once, by one short request both ways."""
        if "streaming" not in self.names.values():
            return False
        options = {"max_tokens": PROBE_TOKENS, "temperature": 0.0}
        whole = self.generate("The", **options)
        pieces = [chunk.text for chunk in self._start("The", {**options, "stream": True}, cumulative=False)]
        return len(pieces) > 1 and "".join(pieces) != whole and [piece for piece in pieces if piece][-1] == whole

    def body(self, prompt: str, **options: Any) -> dict[str, Any]:
        """The JSON body of generate and generate_stream."""
        return {"text_input": prompt, **{self._name(option): value for option, value in options.items()}}

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
        call = self._stub.ModelStreamInfer(iter([self._request(tensors)]), timeout=self.timeout)
        with Stream(call, cumulative=False) as stream:
            return [chunk.text for chunk in stream]

    def _start(self, prompt: str, options: dict[str, Any], cumulative: bool) -> Stream:
        if not self.decoupled:
            raise ConfigError(f"Model {self.model} is not decoupled: it cannot stream. Package it with decoupled true.")
        request = self._request(self.body(prompt, **options))
        return Stream(self._stub.ModelStreamInfer(iter([request]), timeout=self.timeout), cumulative)

    def _name(self, option: str) -> str:
        if option not in self.names:
            raise ConfigError(f"Model {self.model} has no input for {option}; it has {', '.join(sorted(self.names))}.")
        return self.names[option]

    def _request(self, tensors: dict[str, Any]) -> service_pb2.ModelInferRequest:
        kinds = {tensor["name"]: tensor["data_type"].removeprefix("TYPE_") for tensor in self.config["input"]}
        request = service_pb2.ModelInferRequest(model_name=self.model)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, value in tensors.items():
            kind = {"STRING": "BYTES"}.get(kinds.get(name, ""), kinds.get(name, "BYTES"))
            array = _array(value, kind)
            batch = [1] if self.config.get("max_batch_size", 0) > 0 else []
            request.inputs.add(name=name, datatype=kind, shape=[*batch, array.size])
            request.raw_input_contents.append(_raw(array, kind))
        return request


def _array(value: Any, kind: str) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if kind == "BYTES":
        values = [text.encode() if isinstance(text, str) else text for text in values]
    return np.array(values, dtype=triton_to_np_dtype(kind))


def _raw(array: np.ndarray, kind: str) -> bytes:
    return bytes(serialize_byte_tensor(array).item()) if kind == "BYTES" and array.size else array.tobytes()


def _rpc_sentence(error: grpc.RpcError) -> str:
    code, details = getattr(error, "code", lambda: None)(), getattr(error, "details", lambda: "")()
    return f"{code.name if code else 'UNKNOWN'}: {details}"
