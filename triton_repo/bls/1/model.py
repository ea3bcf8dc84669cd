"""Triton's python backend: the llmapi model under the names of TensorRT-LLM's ensemble and BLS models.

Each request has a thread of its own, which waits for the engine's responses and hands them on as they come; the engine
limits how many run. Upstream's BLS model waits inside `execute` and so serves one request an instance.
A client that is gone is looked for every CANCEL_PERIOD; its generation is ended by a second request with the same id that
says `stop`, which every release of Triton can send.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from names import Call, translate

CANCEL_PERIOD = 0.05
"""Seconds between two looks at whether clients are gone."""
ERROR = "error_output"
"""Output of the engine that says "CODE: sentence"."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read which model to call, and start the watcher."""
        self._engine = json.loads(args["model_config"])["parameters"]["tensorrt_llm_model_name"]["string_value"]
        self._senders: dict[str, Any] = {}
        self._last_or_look = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Give each request a thread; its responses come from there."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                call = translate({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
                threading.Thread(target=self._serve, args=(call, sender), daemon=True).start()
            except Exception as error:  # whatever a request holds, it is answered and the server lives on
                sender.send(_failure(str(error), _code(error)), flags=FINAL)

    def finalize(self) -> None:
        """Stop the watcher; Triton has waited for the requests."""
        self._stopping.set()
        self._watcher.join()

    def _serve(self, call: Call, sender: Any) -> None:
        """One request from its inputs to its last response."""
        ident = uuid.uuid4().hex
        self._senders[ident] = sender
        last: Any = None
        try:
            for outputs in self._ask(call.inputs, call.outputs, ident):
                if call.streaming:
                    sender.send(_response(outputs))
                else:
                    last = _response(outputs)
        except _EngineError as error:
            last = _failure(*error.args)
        except Exception as error:
            last = _failure(str(error), _code(error))
        self._finish(ident, sender, last)

    def _finish(self, ident: str, sender: Any, last: Any) -> None:
        """Guard: Triton frees a request at its last response, and the whole server dies if it is then asked whether the
        request was cancelled. So the last response and that question exclude each other."""
        with self._last_or_look:
            del self._senders[ident]
            if last is None:
                sender.send(flags=FINAL)
            else:
                sender.send(last, flags=FINAL)

    def _ask(self, inputs: dict[str, np.ndarray], outputs: list[str], ident: str) -> Iterator[dict[str, np.ndarray]]:
        """Outputs of each response of the engine; _EngineError if one of them is an error.

        Guard: errors are asked for as outputs. Triton 24.10 loses one that comes after the first response, and this thread
        would wait for it for ever.
        """
        request = pb_utils.InferenceRequest(
            model_name=self._engine,
            request_id=ident,
            requested_output_names=[*outputs, ERROR],
            inputs=[pb_utils.Tensor(name, array) for name, array in (inputs | {"errors_as_output": np.array([True])}).items()],
        )
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise _EngineError(response.error().message(), response.error().code())
            found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            if ERROR in found:
                code, _, sentence = found[ERROR][0].decode().partition(": ")
                raise _EngineError(sentence, getattr(pb_utils.TritonError, code))
            if found:
                yield found

    def _watch(self) -> None:
        """Watcher thread: end the generation of what no client waits for."""
        while not self._stopping.wait(CANCEL_PERIOD):
            for ident in [ident for ident in list(self._senders) if self._is_cancelled(ident)]:
                try:
                    list(self._ask({"text_input": np.array([b""], np.object_), "stop": np.array([True])}, ["text_output"], ident))
                except Exception as error:
                    pb_utils.Logger.log_warn(f"a request could not be stopped: {error}")

    def _is_cancelled(self, ident: str) -> bool:
        with self._last_or_look:
            sender = self._senders.get(ident)
            return sender is not None and sender.is_cancelled()


class _EngineError(Exception):
    """The engine's own error: its sentence and Triton's code."""


def _response(outputs: dict[str, np.ndarray]) -> Any:
    tensors = [pb_utils.Tensor(name, array.reshape(1, -1)) for name, array in outputs.items()]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _failure(sentence: str, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(sentence, code))


def _code(error: Exception) -> int:
    return int(pb_utils.TritonError.INVALID_ARG if isinstance(error, ValueError) else pb_utils.TritonError.INTERNAL)
