"""Triton's python backend around `tensorrt_llm.LLM` (PyTorch backend), with the tensors of upstream's llmapi model.

Written against the documented LLM API and tested with a stand-in for it; never run on a GPU. Differs from upstream's
model on purpose: while streaming, each response holds only the new text (the LLM API hands out all text so far), and
what it does not serve is refused instead of ignored.

`LLM` lives on an event loop in a thread of its own. Each request is a task there: it feeds the client, and ends the
generation when the client is gone (looked for every CANCEL_PERIOD) or when a request with its id says `stop`.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml
from sampling import Call, read_call, wants_stop

CANCEL_PERIOD = 0.1
"""Seconds between two looks at whether the client is gone."""
JOB_VARIABLES = ("OMPI_", "PMIX_", "PMI_")
"""Left by a launcher such as mpirun; LLM would take this process for one rank of that job."""


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read model.yaml, hold it against config.pbtxt, and start the engine."""
        folder = Path(args["model_repository"]) / args["model_version"]
        file = Path(os.environ.get("LLM_CONFIG_PATH", folder / "model.yaml"))
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        _same_policy(settings.pop("triton_config"), json.loads(args["model_config"]))
        for name in [name for name in os.environ if name.startswith(JOB_VARIABLES)]:
            del os.environ[name]
        llm, self._sampling_params = _tensorrt_llm()
        settings["model"] = str(folder / settings["model"])  # an absolute path stays what it is
        self._llm = llm(**settings)
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand the requests to the event loop; responses come from there."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                if wants_stop(tensors):
                    self._loop.call_soon_threadsafe(self._stop, request.request_id(), sender)
                    continue
                call = read_call(tensors)
                self._loop.call_soon_threadsafe(self._start, call, request.request_id(), sender)
            except Exception as error:  # whatever a request holds, it is answered and the server lives on
                sender.send(_refusal(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        """End the tasks, the loop and the engine."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._llm.shutdown()

    def _start(self, call: Call, request_id: str, sender: Any) -> None:
        stop = asyncio.Event()
        if request_id:
            self._stops[request_id] = stop
        task = self._loop.create_task(self._serve(call, stop, sender))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, request_id, stop))

    def _ended(self, task: asyncio.Task[None], request_id: str, stop: asyncio.Event) -> None:
        self._tasks.discard(task)
        if self._stops.get(request_id) is stop:
            del self._stops[request_id]

    def _stop(self, request_id: str, sender: Any) -> None:
        """Cancel the request with this id, and answer the one that asked."""
        if stop := self._stops.get(request_id):
            stop.set()
        sender.send(_response(text_output=""), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, call: Call, stop: asyncio.Event, sender: Any) -> None:
        """One request from its prompt to its last response."""
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            result = self._generate(call)
            text = "" if call.exclude_input else call.prompt
            async for delta in _deltas(result, lambda: stop.is_set() or sender.is_cancelled()):
                text += delta
                if call.streaming and text:
                    sender.send(_response(text_output=text))
                    text = ""
            outputs = _final_outputs(call, result.outputs[0])
            sender.send(_response(text_output=text, **outputs), flags=final)
        except asyncio.CancelledError:
            sender.send(_refusal(RuntimeError("the server is shutting down"), "UNAVAILABLE"), flags=final)
        except _Cancelled:
            sender.send(_refusal(RuntimeError("the request was cancelled"), "CANCELLED"), flags=final)
        except Exception as error:  # the engine's own refusals reach the client as they are
            sender.send(_refusal(error), flags=final)

    def _generate(self, call: Call) -> Any:
        logprobs = {"logprobs": 1} if call.cumulative_logprob else {}
        return self._llm.generate_async(
            call.prompt, sampling_params=self._sampling_params(**call.sampling, **logprobs), streaming=True
        )


class _Cancelled(Exception):  # noqa: N818
    """The client is gone, or another request said stop."""


async def _deltas(result: Any, unwanted: Callable[[], bool]) -> AsyncIterator[str]:
    """New text of each step. Aborts the generation when nobody waits for it any more."""
    sent, steps = 0, aiter(result)
    waiting: asyncio.Task[Any] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(_next(steps))
            done, _ = await asyncio.wait((waiting,), timeout=CANCEL_PERIOD)
            if unwanted():
                raise _Cancelled
            if not done:
                continue
            if (step := waiting.result()) is None:
                return
            waiting, completion = None, step.outputs[0]
            if completion.finish_reason == "cancelled":
                raise _Cancelled
            yield completion.text[sent:]
            sent = max(sent, len(completion.text))  # a stop word may have shortened it
    finally:
        if waiting:
            waiting.cancel()
        if not result.finished:
            result.abort()


async def _next(steps: AsyncIterator[Any]) -> Any:
    return await anext(steps, None)


def _tensorrt_llm() -> tuple[Any, Any]:
    """LLM and SamplingParams; only here, because the import takes the GPU."""
    try:
        from tensorrt_llm import LLM, SamplingParams
    except ImportError as error:
        raise RuntimeError(
            f"tensorrt_llm cannot be imported ({error}); serve this repository in a "
            "tritonserver:<tag>-trtllm-python-py3 container, or package for engine=torch"
        ) from error
    return LLM, SamplingParams


def _same_policy(wanted: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse a config.pbtxt that contradicts model.yaml: Triton obeys the first, this code would obey the second."""
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
    batch = int(config.get("max_batch_size", 0))
    if (decoupled, batch) != (wanted["decoupled"], wanted["max_batch_size"]):
        raise RuntimeError(
            f"config.pbtxt says decoupled {decoupled} and max_batch_size {batch}, model.yaml says "
            f"{wanted['decoupled']} and {wanted['max_batch_size']}; make them equal"
        )
    if not decoupled or batch:
        raise RuntimeError("this model streams, one prompt a request: decoupled must be true, max_batch_size 0")


def _final_outputs(call: Call, completion: Any) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    if call.finish_reason:
        outputs["finish_reason"] = str(completion.finish_reason)
    if call.stop_reason:
        outputs["stop_reason"] = "" if completion.stop_reason is None else str(completion.stop_reason)
    if call.cumulative_logprob:
        outputs["cumulative_logprob"] = np.array([completion.cumulative_logprob], np.float32)
    return outputs


def _response(**outputs: Any) -> Any:
    tensors = [
        pb_utils.Tensor(name, np.array([value.encode()], np.object_) if isinstance(value, str) else value)
        for name, value in outputs.items()
    ]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _refusal(error: Exception, code: str = "") -> Any:
    """An error response; `code` is the name of one of Triton's, where it is not chosen by the kind of error."""
    name = code or ("INVALID_ARG" if isinstance(error, ValueError) else "INTERNAL")
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, name)))
