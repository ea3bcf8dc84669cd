"""The contract of a served model, one function a clause: it returns what it saw, or raises what is wrong.

They run in the order of `CHECKS` against any server, whoever built the model. What a model cannot show (an option it
does not have, a metric it does not publish) is skipped with the reason.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TextIO

from pipeline.config.schema import ServeConfig
from pipeline.triton.client import Client, TritonError

__all__ = ["CHECKS", "Broken", "Probe", "Skipped"]

UNICODE_PROMPT = "用中文介绍一下你自己 🙂🚀 —"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CANCEL_SECONDS = 10.0
TRIES = 5
"""How often a stream is left, as a fast model may be at its end before a slow client has left it."""
METRICS_LAG = 0.2
"""Seconds within which earlier requests have left the metrics."""
RUNNING = ("llm_requests_running", "vllm:num_requests_running")
GENERATED = ("llm_generated_tokens", "vllm:generation_tokens_total")
"""What our models and vLLM's backend call the same metric."""


class Broken(Exception):  # noqa: N818
    """The server does not keep this clause."""


class Skipped(Exception):  # noqa: N818
    """The model cannot show this clause."""


@dataclass
class Probe:
    """A model under test."""

    client: Client
    serve: ServeConfig
    room: int
    """Tokens that certainly fit into a sequence after a short prompt."""
    exact: bool
    """True if a request's text does not depend on its neighbours (float32); else half of them must agree."""
    live: TextIO | None
    """Where streamed text is shown while it comes."""
    called: tuple[str, ...] = ()
    """Models that this one calls, whose metrics are its own."""

    @property
    def greedy(self) -> dict[str, Any]:
        """Options of a reproducible request."""
        return {"max_tokens": min(self.serve.smoke_tokens, self.room), "temperature": 0.0}

    @cached_property
    def text(self) -> str:
        """The whole answer to the prompt, at temperature 0."""
        return self.client.generate(self.serve.smoke_prompt, **self.greedy)

    def has(self, option: str) -> bool:
        """True if the model has an input for `option`."""
        return option in self.client.names

    def metrics(self) -> dict[str, float]:
        """Metrics of the model and those it calls; empty where the page cannot be reached."""
        try:
            return self.client.endpoint.metrics(self.client.model, *self.called)
        except OSError:
            return {}

    def metric(self, names: tuple[str, ...]) -> float | None:
        """The first of `names` that the model publishes."""
        values = self.metrics()
        return next((values[name] for name in names if name in values), None)


def ready(probe: Probe) -> str:
    _require(probe.client.endpoint.ready(), "the server says it is not ready")
    return "server and models are ready"


def index(probe: Probe) -> str:
    states = probe.client.endpoint.index()
    _require(states.get(probe.client.model) == "READY", f"the index says {states}")
    return ", ".join(f"{name} {state}" for name, state in sorted(states.items()))


def metadata(probe: Probe) -> str:
    _require(probe.client.decoupled, "the model is not decoupled, so it cannot stream")
    missing = {"max_tokens", "stream", "temperature"} - set(probe.client.names)
    _require(not missing, f"the model has no input for {', '.join(sorted(missing))}")
    return f"decoupled, with {', '.join(sorted(probe.client.names))}"


def generate(probe: Probe) -> str:
    _require(probe.text.strip() != "", f"the answer to {probe.serve.smoke_prompt!r} is empty")
    again = probe.client.generate(probe.serve.smoke_prompt, **probe.greedy)
    _require(again == probe.text, f"the same request gave {again!r} after {probe.text!r}, at temperature 0")
    return f"{len(probe.text)} characters, twice the same"


def grpc_stream(probe: Probe) -> str:
    pieces = []
    for chunk in probe.client.stream(probe.serve.smoke_prompt, **probe.greedy):
        pieces.append(chunk.text)
        if probe.live:
            print(chunk.text, end="", file=probe.live, flush=True)
    if probe.live:
        print(file=probe.live, flush=True)
    return _same_text(pieces, probe.text)


def generate_stream(probe: Probe) -> str:
    body = probe.client.body(probe.serve.smoke_prompt, **probe.greedy, stream=True)
    pieces = [_first(event["text_output"]) for event in probe.client.endpoint.generate_stream(probe.client.model, body)]
    return _same_text([pieces[-1]] if probe.client.cumulative else pieces, probe.text, least=1)


def unicode(probe: Probe) -> str:
    whole = probe.client.generate(UNICODE_PROMPT, **probe.greedy)
    pieces = [chunk.text for chunk in probe.client.stream(UNICODE_PROMPT, **probe.greedy)]
    return _same_text(pieces, whole, least=1)


def concurrency(probe: Probe) -> str:
    prompts = [f"{probe.serve.smoke_prompt} {number}" for number in range(probe.serve.smoke_requests)]
    alone = [probe.client.generate(prompt, **probe.greedy) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: probe.client.generate(prompt, **probe.greedy), prompts))
    same = sum(one == other for one, other in zip(alone, together, strict=True))
    _require(
        same >= (len(prompts) if probe.exact else len(prompts) / 2), f"only {same} of {len(prompts)} texts are the same"
    )
    return f"{same} of {len(prompts)} concurrent texts are those of single requests"


def max_tokens(probe: Probe) -> str:
    few = max(1, probe.greedy["max_tokens"] // 4)
    short = probe.client.generate(probe.serve.smoke_prompt, **{**probe.greedy, "max_tokens": few})
    _require(probe.text.startswith(short), f"{few} tokens gave {short!r}, which is no beginning of {probe.text!r}")
    if not probe.has("count_tokens"):
        return f"{few} tokens are a beginning of the text"
    with probe.client.stream(
        probe.serve.smoke_prompt, **{**probe.greedy, "max_tokens": few}, count_tokens=True
    ) as stream:
        list(stream)
    _require(0 < (stream.tokens or 0) <= few, f"max_tokens={few} gave {stream.tokens} tokens")
    return f"max_tokens={few} gave {stream.tokens} tokens, a beginning of the text"


def stop_words(probe: Probe) -> str:
    words = re.findall(r"[^\W_]{2,}", probe.text)
    if not probe.has("stop_words") or len(words) < 2:
        raise Skipped("the model has no stop words" if words else "the text has no words to stop at")
    word = words[len(words) // 2]
    stopped = probe.client.generate(probe.serve.smoke_prompt, **probe.greedy, stop_words=[word])
    _require(word not in stopped, f"the stop word {word!r} is in {stopped!r}")
    _require(
        probe.text[: probe.text.index(word)].startswith(stopped.rstrip()), f"{stopped!r} is no beginning of the text"
    )
    return f"stopped at {word!r} after {len(stopped)} characters"


def cancel(probe: Probe) -> str:
    if probe.metric(RUNNING) is None or probe.metric(GENERATED) is None:
        raise Skipped(f"the model publishes no {RUNNING[0]}")
    for _ in range(TRIES):
        if seen := _leave(probe):
            return seen
    raise Broken(f"all {probe.room} tokens were generated although nobody listened, {TRIES} times")


def _leave(probe: Probe) -> str:
    """What happens after a client has left its stream; empty if all tokens are there: it may have been held up."""
    options = {**probe.greedy, "max_tokens": probe.room} | ({"ignore_eos": True} if probe.has("ignore_eos") else {})
    time.sleep(METRICS_LAG)
    running, generated = probe.metric(RUNNING) or 0, probe.metric(GENERATED) or 0

    def busy() -> bool:
        return (probe.metric(RUNNING) or 0) > running

    def made() -> float:
        return (probe.metric(GENERATED) or 0) - generated

    with probe.client.stream(probe.serve.smoke_prompt, **options) as stream:
        next(stream)
        _wait(lambda: busy() or made() >= probe.room, "no slot is taken")
        begin = time.monotonic()
    _wait(lambda: not busy(), "the slot is still taken")
    freed, tokens = time.monotonic() - begin, made()
    if tokens >= probe.room:
        return ""
    return f"slot free {freed:.2f} s after the client left, {tokens:.0f} of {probe.room} tokens generated"


def bad_input(probe: Probe) -> str:
    prompt = probe.serve.smoke_prompt
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "empty prompt": ("", {}),
        "max_tokens 100000000": (prompt, {"max_tokens": 100_000_000}),
        "max_tokens 0": (prompt, {"max_tokens": 0}),
        "temperature -1": (prompt, {"temperature": -1.0}),
    }
    if probe.client.dialect.packed:  # vLLM ends such a request at max_model_len, however long that takes
        del wrong["max_tokens 100000000"]
    for name, (text, options) in wrong.items():
        answer = _refusal(lambda text=text, options=options: probe.client.generate(text, **{**probe.greedy, **options}))
        _require(answer is not None, f"{name} was accepted")
        _require("Stub process" not in str(answer), f"{name} killed the model: {answer}")
    _require(
        probe.client.generate(prompt, **probe.greedy) == probe.text, "the server gives other text after bad requests"
    )
    return f"{', '.join(wrong)}: refused, and the server lives on"


def error_inside_200(probe: Probe) -> str:
    """`generate` on a streaming request answers 200 with an error in its body; a client must not take it for text."""
    error = _refusal(lambda: probe.client.generate(probe.serve.smoke_prompt, **probe.greedy, stream=True))
    if error is None:
        raise Skipped("the server answers such a request")
    return f"status {error.status}: {error}"[:120]


def counters(probe: Probe) -> str:
    before = probe.metrics()
    if not before:
        raise Skipped("the metrics page cannot be reached")
    probe.client.generate(probe.serve.smoke_prompt, **probe.greedy)
    watched = [name for name in ("nv_inference_request_success", *GENERATED) if name in before]

    def moved() -> bool:
        after = probe.metrics()
        return all(after[name] > before[name] for name in watched)

    _wait(moved, f"{' and '.join(watched)} did not go up")
    return f"{' and '.join(watched)} went up"


CHECKS: tuple[Callable[[Probe], str], ...] = (
    ready, index, metadata, generate, grpc_stream, generate_stream, unicode, concurrency, max_tokens, stop_words,
    cancel, bad_input, error_inside_200, counters,
)  # fmt: skip


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise Broken(sentence)


def _same_text(pieces: list[str], whole: str, least: int = 2) -> str:
    text, count = "".join(pieces), sum(piece != "" for piece in pieces)
    _require(text.count(REPLACEMENT) <= whole.count(REPLACEMENT), f"a character was split between chunks: {text!r}")
    _require(text == whole, f"the stream says {text!r}, the whole answer {whole!r}")
    _require(count >= least, f"the text came in {count} chunk, which is no stream")
    return f"{count} chunks add up to the whole text"


def _first(value: str | list[str]) -> str:
    return value[0] if isinstance(value, list) else value


def _refusal(request: Callable[[], Any]) -> TritonError | None:
    try:
        request()
    except TritonError as error:
        return error
    return None


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + CANCEL_SECONDS
    while not condition():
        _require(time.monotonic() < end, f"{otherwise} after {CANCEL_SECONDS:g} s")
        time.sleep(0.02)
