"""Triton's python backend around the compiled engine: decoupled, continuous batching, one thread for the engine.

A request passes through `execute` (checked, tokenized, queued), the engine's thread (tokens, text, stop words) and
the outbox thread (responses). A watcher polls for clients that are gone and publishes the metrics.
Input and output names are those of TensorRT-LLM's ensemble, so its clients work unchanged. Differences, on purpose:
`max_tokens` may be left out (all that fits), and `exclude_input_in_output` is true unless the client says otherwise.
"""

from __future__ import annotations

import itertools
import json
import queue
import secrets
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from runtime import CompiledEngine
from sampler import Sampling
from scheduler import FinishEvent, Limits, QueueFullError, Request, Scheduler, Stats, TokenEvent
from text import Detokenizer, StopWords, TextCodec

WATCH_PERIOD = 0.02
"""Seconds between two looks at cancelled clients and metrics."""
MAX_STOP_WORDS = 16
Send = Callable[[Any, bool], None]
"""Takes a response and whether it is the request's last."""


@dataclass(slots=True)
class Options:
    """The inputs of one request, as the client sent them or defaulted."""

    prompt: str
    max_tokens: int | None = None
    stream: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_words: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    exclude_input_in_output: bool = True
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("text_input is empty; send at least one character")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature:g} must be 0 (greedy) or above")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (no limit) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p:g} must lie above 0 and be at most 1 (no limit)")
        if len(self.stop_words) > MAX_STOP_WORDS:
            raise ValueError(f"{len(self.stop_words)} stop_words were sent; at most {MAX_STOP_WORDS} are looked for")


class Reply:
    """One request's way back: turns its events into responses."""

    def __init__(self, options: Options, prompt_tokens: int, detokenizer: Detokenizer, send: Send) -> None:
        self._options, self._send = options, send
        self._detokenizer, self._stop = detokenizer, StopWords(options.stop_words)
        self._text = "" if options.exclude_input_in_output else options.prompt
        self._prompt_tokens, self._tokens = prompt_tokens, 0

    def on_event(self, event: TokenEvent | FinishEvent) -> bool:
        """Collect or stream a token's text; True once a stop word was found."""
        if isinstance(event, FinishEvent):
            self._finish(event)
            return True
        self._tokens += 1
        self._text += self._stop.feed(self._detokenizer.feed(event.token))
        if self._options.stream and self._text and not self._stop.found:
            self._send(_response(text_output=self._text), False)
            self._text = ""
        return self._stop.found

    def _finish(self, event: FinishEvent) -> None:
        if event.reason in ("error", "cancelled"):
            self._send(_failure(event), True)
            return
        outputs: dict[str, Any] = {"text_output": self._text + self._stop.flush()}
        if self._options.return_finish_reason:
            outputs["finish_reason"] = event.reason
        if self._options.return_num_input_tokens:
            outputs["num_input_tokens"] = self._prompt_tokens
        if self._options.return_num_output_tokens:
            outputs["num_output_tokens"] = self._tokens
        self._send(_response(**outputs), True)


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine and start the threads."""
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        self._engine = CompiledEngine.load(folder)
        self._codec = TextCodec(folder)
        info = self._engine.info
        self._eos = frozenset(info["eos_token_ids"])
        self._bos = info.get("bos_token_id") if _adds_bos(folder) else None
        self._scheduler = Scheduler(
            self._engine, Limits.of(info, int(config["parameters"]["max_queue"]["string_value"]))
        )
        self._ids = itertools.count(1)
        self._senders: dict[int, Any] = {}
        self._last_or_look = threading.Lock()
        self._outbox: queue.SimpleQueue[tuple[Any, Any, bool] | None] = queue.SimpleQueue()
        self._metrics = Metrics(args["model_name"], drafts=bool(info.get("drafts")))
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._deliver, self._watch)]
        for thread in self._threads:
            thread.start()
        self._scheduler.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests; their responses come from the outbox thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except Exception as error:
                self._send(sender, pb_utils.InferenceResponse(error=_triton_error(error)), last=True)

    def finalize(self) -> None:
        """Stop the threads; whatever still runs is answered with an error."""
        self._scheduler.stop()
        self._outbox.put(None)
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _submit(self, request: Any, sender: Any) -> None:
        options, number = read_options(request), next(self._ids)
        self._refuse_endless(options.prompt)
        prompt = self._codec.encode(options.prompt, self._bos)
        reply = Reply(options, len(prompt), Detokenizer(self._codec), self._sending(number, sender))
        seed = secrets.randbits(63) if options.seed is None else options.seed
        room = self._scheduler.limits.max_seq_len - len(prompt)
        self._senders[number] = sender
        try:
            self._scheduler.submit(
                Request(
                    id=number,
                    prompt=prompt,
                    max_tokens=max(room, 1) if options.max_tokens is None else options.max_tokens,
                    on_event=reply.on_event,
                    sampling=Sampling(options.temperature, options.top_k, options.top_p, seed),
                    eos=frozenset() if options.ignore_eos else self._eos,
                )
            )
        except BaseException:
            del self._senders[number]
            raise

    def _refuse_endless(self, text: str) -> None:
        """Megabytes of text would hold all other requests back while they are tokenized, only to be refused then."""
        least, most = len(text.encode()) // self._codec.longest, self._scheduler.limits.max_seq_len
        if least > most:
            raise ValueError(
                f"the prompt has {least} tokens or more, above the engine's max_seq_len of {most}; shorten the prompt"
            )

    def _sending(self, number: int, sender: Any) -> Send:
        def send(response: Any, last: bool) -> None:
            if last:
                self._senders.pop(number, None)
            self._outbox.put((sender, response, last))

        return send

    def _deliver(self) -> None:
        """Outbox thread: a send waits for Triton, so the engine's thread does not do it."""
        while item := self._outbox.get():
            sender, response, last = item
            if last:
                self._metrics.publish(self._scheduler.stats)
            try:
                self._send(sender, response, last)
            except Exception as error:
                pb_utils.Logger.log_warn(f"a response could not be sent: {error}")

    def _send(self, sender: Any, response: Any, last: bool) -> None:
        """Guard: Triton frees a request at its last response, and the whole server dies if it is then asked whether the
        request was cancelled. So the last response and that question exclude each other."""
        with self._last_or_look if last else nullcontext():
            sender.send(response, _flags(last))

    def _is_cancelled(self, number: int) -> bool:
        with self._last_or_look:
            sender = self._senders.get(number)
            return sender is not None and sender.is_cancelled()

    def _watch(self) -> None:
        """Watcher thread: cancel what no client waits for, publish the metrics."""
        while not self._stopping.wait(WATCH_PERIOD):
            for number in list(self._senders):
                if self._is_cancelled(number):
                    self._scheduler.cancel(number)
            if self._senders:
                self._metrics.publish(self._scheduler.stats)


class Metrics:
    """The scheduler's state as Triton metrics, sent when it changed. Silent where metrics are switched off.

    They are also sent before a request's last response, so a client that has its answer finds it in the metrics.
    """

    def __init__(self, model: str, *, drafts: bool = False) -> None:
        gauge, counter = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.COUNTER
        families = {
            "running": ("llm_requests_running", "Requests that hold a slot", gauge),
            "waiting": ("llm_requests_waiting", "Requests that wait for a slot", gauge),
            "pages_used": ("llm_kv_pages_used", "KV pages reserved by running requests", gauge),
            "tokens": ("llm_generated_tokens", "Tokens generated since the start", counter),
        }
        if drafts:
            families["drafted"] = ("llm_draft_tokens", "Tokens drafted by the MTP layer", counter)
            families["accepted"] = ("llm_draft_tokens_accepted", "Of those, the ones that the model chose, too", counter)
        self._counters = {key for key, (_, _, kind) in families.items() if kind == counter}
        self._last, self._lock = Stats(0, 0, 0, 0), threading.Lock()
        self._families: list[Any] = []
        self._metrics: dict[str, Any] = {}
        try:
            for key, (name, text, kind) in families.items():
                family = pb_utils.MetricFamily(name=name, description=text, kind=kind)
                self._families.append(family)
                self._metrics[key] = family.Metric(labels={"model": model})
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_info(f"custom metrics are off: {error}")
            self._metrics = {}

    def publish(self, read: Callable[[], Stats]) -> None:
        """Send what changed since the last call."""
        with self._lock:
            stats = read()
            for key, metric in self._metrics.items():
                new, old = getattr(stats, key), getattr(self._last, key)
                if new != old and key in self._counters:
                    metric.increment(new - old)
                elif new != old:
                    metric.set(new)
            self._last = stats


def _adds_bos(folder: Path) -> bool:
    """What tokenizer_config.json says of BOS in front of a prompt; DeepSeek's says yes."""
    path = folder / "tokenizer_config.json"
    return not path.is_file() or bool(json.loads(path.read_text(encoding="utf-8")).get("add_bos_token", True))


def read_options(request: Any) -> Options:
    """Check and convert the input tensors of a request."""
    given: dict[str, Any] = {"prompt": _strings(request, "text_input")[0]}
    kinds: dict[str, Callable[[Any], Any]] = {
        "max_tokens": int, "stream": bool, "temperature": float, "top_k": int, "top_p": float, "seed": int,
        "ignore_eos": bool,
        "exclude_input_in_output": bool, "return_finish_reason": bool, "return_num_input_tokens": bool,
        "return_num_output_tokens": bool,
    }  # fmt: skip
    for name, kind in kinds.items():
        if (tensor := pb_utils.get_input_tensor_by_name(request, name)) is not None:
            given[name] = kind(tensor.as_numpy().reshape(-1)[0])
    return Options(**given, stop_words=_strings(request, "stop_words"))


def _strings(request: Any, name: str) -> list[str]:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    values = [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()
    try:
        return [value.decode("utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _response(**outputs: Any) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, _array(value)) for name, value in outputs.items()])


def _array(value: str | int) -> np.ndarray:
    if isinstance(value, str):
        return np.array([[value.encode()]], dtype=np.object_)
    return np.array([[value]], dtype=np.int32)


def _failure(event: FinishEvent) -> Any:
    cancelled = event.reason == "cancelled"
    code = pb_utils.TritonError.CANCELLED if cancelled else pb_utils.TritonError.INTERNAL
    text = "the request was cancelled" if cancelled else event.error
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))


def _triton_error(error: Exception) -> Any:
    codes = {ValueError: pb_utils.TritonError.INVALID_ARG, QueueFullError: pb_utils.TritonError.UNAVAILABLE}
    return pb_utils.TritonError(str(error), codes.get(type(error), pb_utils.TritonError.INTERNAL))


def _flags(last: bool) -> int:
    return pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
