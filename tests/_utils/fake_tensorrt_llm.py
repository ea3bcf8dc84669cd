"""A stand-in for `tensorrt_llm`: just the calls of its documented LLM API that our Triton model makes.

`LLM.generate_async(prompt, sampling_params=, streaming=)` returns an object that is iterated asynchronously and yields
itself; `outputs[0].text` is all text so far; `abort()` ends it with finish_reason "cancelled". The text is the prompt
reversed, one character a step; a prompt that begins with "slow" takes 50 ms a step, "boom" fails in the engine.
FAKE_ABORTS names a file that gets one line for each generation that is aborted.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

ALLOWED = {
    "best_of", "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed", "stop",
    "logprobs",
}  # fmt: skip


class SamplingParams:
    """Keeps what it is given; unknown names are an error, as in the original."""

    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - ALLOWED:
            raise TypeError(f"unexpected arguments {sorted(unknown)}")
        self.values = values


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class RequestOutput:
    """One generation."""

    def __init__(self, prompt: str, params: SamplingParams) -> None:
        self._rest = list(reversed(prompt))[: params.values.get("max_tokens", 32)]
        self._limited = len(self._rest) < len(prompt)
        self._pause = 0.05 if prompt.startswith("slow") else 0.0
        self._fails = prompt.startswith("boom")
        self._logprobs = "logprobs" in params.values
        self.outputs = [CompletionOutput()]
        self.aborted = False
        self.finished = False

    def abort(self) -> None:
        self.aborted = True
        if log := os.environ.get("FAKE_ABORTS"):
            with open(log, "a", encoding="utf-8") as file:
                file.write("aborted\n")

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(self._pause)
        if self._fails:
            self.finished = True
            raise RuntimeError("the engine failed")
        output = self.outputs[0]
        if self.aborted:
            output.finish_reason, self.finished = "cancelled", True
        else:
            output.text += self._rest.pop(0)
            output.cumulative_logprob = -float(len(output.text)) if self._logprobs else None
            if not self._rest:
                output.finish_reason, self.finished = ("length" if self._limited else "stop"), True
        return self


class LLM:
    """Keeps its arguments in `arguments` and its generations in `results`."""

    def __init__(self, model: str, **arguments: Any) -> None:
        self.model, self.arguments = model, arguments
        self.results: list[RequestOutput] = []
        self.down = False

    def generate_async(self, inputs: str, sampling_params: SamplingParams, *, streaming: bool = False) -> RequestOutput:
        assert streaming
        self.results.append(RequestOutput(inputs, sampling_params))
        return self.results[-1]

    def shutdown(self) -> None:
        self.down = True
