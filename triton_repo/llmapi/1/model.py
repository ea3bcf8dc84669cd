"""Triton's python backend around `tensorrt_llm.LLM` (PyTorch backend), with the tensors of upstream's llmapi model.

Written against the documented LLM API and tested with a stand-in for it; never run on a GPU. Differs from upstream's
model on purpose: while streaming, each response holds only the new text (the LLM API hands out all text so far) and no
half of a character, what it does not serve is refused instead of ignored, and so is what no longer fits into the queue.

`LLM` lives on an event loop in a thread of its own. Each request is a task there: it feeds the client, and ends the
generation when the client is gone (looked for every cancellation_check_period_ms) or when a request with its id says `stop`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from ensemble import translate
from sampling import Call, read_call, wants_stop
from settings import read_settings

HALF = "\N{REPLACEMENT CHARACTER}"
"""Ends the text while the last character's tokens are not all there."""


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings and start the engine."""
        settings = read_settings(args)
        llm, self._sampling_params, self._guided = _tensorrt_llm()
        self._llm = llm(**settings.engine)
        self._settings, self._room = settings, threading.BoundedSemaphore(settings.max_requests)
        self._metrics = Metrics(args["model_name"])
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
                if self._settings.ensemble:
                    tensors = translate(tensors)
                if wants_stop(tensors):
                    self._loop.call_soon_threadsafe(self._stop, request.request_id(), sender)
                    continue
                call = self._possible(read_call(tensors))
                if not self._room.acquire(blocking=False):
                    raise _FullError("as many requests run or wait as may; try again later, or raise serve.max_queue")
                self._loop.call_soon_threadsafe(self._start, call, request.request_id(), sender)
            except Exception as error:  # whatever a request holds, it is answered and the server lives on
                sender.send(_refusal(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _possible(self, call: Call) -> Call:
        """The call, if the engine is set up for what it asks."""
        if call.guide and not self._settings.guides:
            raise ValueError("guided_decoding_guide: the engine has no guided_decoding_backend; set it in its arguments")
        return call

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
        self._metrics.running.set(len(self._tasks))
        task.add_done_callback(lambda task: self._ended(task, request_id, stop))

    def _ended(self, task: asyncio.Task[None], request_id: str, stop: asyncio.Event) -> None:
        self._tasks.discard(task)
        self._metrics.running.set(len(self._tasks))
        if self._stops.get(request_id) is stop:
            del self._stops[request_id]

    def _stop(self, request_id: str, sender: Any) -> None:
        """Cancel the request with this id, and answer the one that asked."""
        if stop := self._stops.get(request_id):
            stop.set()
        sender.send(self._response(text_output=""), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, call: Call, stop: asyncio.Event, sender: Any) -> None:
        """One request from its prompt to its last response. Its place is free before that: who has it may ask again."""
        last = await self._answer(call, stop, sender)
        self._room.release()
        sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _answer(self, call: Call, stop: asyncio.Event, sender: Any) -> Any:
        """The last response, after the others were sent."""
        try:
            result = self._generate(call)
            text = "" if call.exclude_input else call.prompt
            async for delta in self._deltas(result, call, lambda: stop.is_set() or sender.is_cancelled()):
                text += delta
                if call.streaming and text:
                    sender.send(self._response(text_output=text))
                    text = ""
            return self._response(text_output=text, **_final_outputs(call, result))
        except asyncio.CancelledError:
            return _refusal(RuntimeError("the server is shutting down"), "UNAVAILABLE")
        except _Cancelled:
            return _refusal(RuntimeError("the request was cancelled"), "CANCELLED")
        except Exception as error:  # the engine's own refusals reach the client as they are
            return _refusal(error)

    async def _deltas(self, result: Any, call: Call, unwanted: Callable[[], bool]) -> AsyncIterator[str]:
        """New text of each step. Aborts the generation when nobody waits for it any more."""
        sent, steps = 0, aiter(result)
        waiting: asyncio.Task[Any] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(_next(steps))
                done, _ = await asyncio.wait((waiting,), timeout=self._settings.cancel_period)
                if unwanted():
                    raise _Cancelled
                if not done:
                    continue
                if (step := waiting.result()) is None:
                    return
                waiting, completion = None, step.outputs[0]
                if completion.finish_reason == "cancelled":
                    raise _Cancelled
                ready = completion.text if result.finished else _certain(completion.text, call.sampling.get("stop", ()))
                yield ready[sent:]
                sent = max(sent, len(ready))
        finally:
            self._metrics.tokens.increment(len(result.outputs[0].token_ids))
            if waiting:
                waiting.cancel()
            if not result.finished:
                result.abort()

    def _response(self, **outputs: str | int | float) -> Any:
        shape = (1, 1) if self._settings.ensemble else (1,)
        tensors = [pb_utils.Tensor(name, _array(value).reshape(shape)) for name, value in outputs.items()]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _generate(self, call: Call) -> Any:
        more: dict[str, Any] = {"logprobs": 1} if call.cumulative_logprob else {}
        if call.guide:
            more["guided_decoding"] = self._guided(**call.guide)
        return self._llm.generate_async(
            call.prompt, sampling_params=self._sampling_params(**call.sampling, **more), streaming=True
        )


class _Cancelled(Exception):  # noqa: N818
    """The client is gone, or another request said stop."""


class _FullError(Exception):
    """There is no room for another request."""


class Metrics:
    """Gauge and counter of this model; both do nothing where the server's metrics are switched off."""

    def __init__(self, model: str) -> None:
        self._families: list[Any] = []  # Guard: a metric dies with its family
        self.running = self._metric("llm_requests_running", "Requests running or waiting", "GAUGE", model)
        self.tokens = self._metric("llm_generated_tokens", "Tokens generated since the start", "COUNTER", model)

    def _metric(self, name: str, text: str, kind: str, model: str) -> Any:
        try:
            family = pb_utils.MetricFamily(name=name, description=text, kind=getattr(pb_utils.MetricFamily, kind))
            self._families.append(family)
            return family.Metric(labels={"model": model})
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_info(f"custom metrics are off: {error}")
            return _Silent()


class _Silent:
    def set(self, value: float) -> None: ...

    def increment(self, value: float) -> None: ...


async def _next(steps: AsyncIterator[Any]) -> Any:
    return await anext(steps, None)


def _certain(text: str, stop_words: Iterable[str]) -> str:
    """What later steps cannot change: no half of a character at the end, and no beginning of a stop word."""
    text = text.rstrip(HALF)
    held = max((size for word in stop_words for size in range(1, len(word)) if text.endswith(word[:size])), default=0)
    return text[: len(text) - held]


def _tensorrt_llm() -> tuple[Any, Any, Any]:
    """LLM, SamplingParams and GuidedDecodingParams; only here, because the import takes the GPU."""
    try:
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.llmapi import GuidedDecodingParams
    except ImportError as error:
        raise RuntimeError(
            f"tensorrt_llm cannot be imported ({error}); serve this repository in a "
            "tritonserver:<tag>-trtllm-python-py3 container, or package for engine=torch"
        ) from error
    return LLM, SamplingParams, GuidedDecodingParams


def _final_outputs(call: Call, result: Any) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    completion = result.outputs[0]
    if call.finish_reason:
        outputs["finish_reason"] = str(completion.finish_reason)
    if call.stop_reason:
        outputs["stop_reason"] = "" if completion.stop_reason is None else str(completion.stop_reason)
    if call.cumulative_logprob:
        outputs["cumulative_logprob"] = float(completion.cumulative_logprob)
    if call.num_input_tokens:
        outputs["num_input_tokens"] = len(result.prompt_token_ids)
    if call.num_output_tokens:
        outputs["num_output_tokens"] = len(completion.token_ids)
    return outputs


def _array(value: str | int | float) -> np.ndarray:
    if isinstance(value, str):
        return np.array([value.encode()], np.object_)
    return np.array([value], np.int32 if isinstance(value, int) else np.float32)


def _refusal(error: Exception, code: str = "") -> Any:
    """An error response; `code` is the name of one of Triton's, where it is not chosen by the kind of error."""
    kinds = {ValueError: "INVALID_ARG", _FullError: "UNAVAILABLE"}
    name = code or next((name for kind, name in kinds.items() if isinstance(error, kind)), "INTERNAL")
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, name)))
