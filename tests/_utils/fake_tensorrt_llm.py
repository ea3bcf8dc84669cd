"""TEST DOUBLE of `tensorrt_llm`: just the calls of its documented LLM API that our Triton model makes.

`LLM.generate_async(prompt, sampling_params=, streaming=)` returns an object that is iterated asynchronously and yields
itself; `outputs[0].text` is all text so far; `abort()` ends it with finish_reason "cancelled". A token is a byte, so a
character takes up to four, and the text ends in U+FFFD while one is incomplete. The answer is the prompt reversed, or, if
the prompt has a newline, what stands before it, for ever. EOT (0x04) is EOS; a prompt that begins with "slow" takes 0.2 s a
step, others FAKE_STEP seconds; "boom" fails in the engine, "mid" does after three tokens, "die" kills the process.
FAKE_ABORTS names a file that gets one line for each generation that is aborted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ALLOWED = {
    "best_of", "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed", "stop", "bad",
    "logprobs", "min_tokens", "length_penalty", "repetition_penalty", "end_id", "pad_id", "ignore_eos", "guided_decoding",
}  # fmt: skip
EOS = 4


class GuidedDecodingParams:
    """Keeps what it is given; exactly one guide, as in the original."""

    def __init__(self, **guide: Any) -> None:
        if guide.keys() - {"json", "regex", "grammar", "json_object", "structural_tag"} or len(guide) != 1:
            raise ValueError(f"unexpected guide {guide}")
        self.guide = guide


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
        self.prompt_token_ids = list(prompt.encode())
        self._values, self._prompt = params.values, prompt
        self._tokens = _answer(prompt)
        self._pause = 0.2 if prompt.startswith("slow") else float(os.environ.get("FAKE_STEP", "0"))
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
        if self._prompt.startswith("die"):
            os._exit(1)
        if self._prompt.startswith("boom") or (self._prompt.startswith("mid") and len(self.outputs[0].token_ids) > 2):
            self.finished = True
            raise RuntimeError("the engine failed")
        self._step(self.outputs[0])
        self.finished = self.outputs[0].finish_reason is not None
        return self

    def _step(self, output: CompletionOutput) -> None:
        token = next(self._tokens, None)
        if self.aborted:
            output.finish_reason = "cancelled"
        elif token is None or (token == EOS and not self._values.get("ignore_eos")):
            output.finish_reason = "stop"
        else:
            output.token_ids.append(token)
            output.text = bytes(output.token_ids).decode(errors="replace")
            output.cumulative_logprob = -float(len(output.token_ids)) if "logprobs" in self._values else None
            if len(output.token_ids) == self._values.get("max_tokens", 32):
                output.finish_reason = "length"
            for word in self._values.get("stop", []):
                if word in output.text:
                    output.text, output.finish_reason = output.text[: output.text.index(word)], "stop"
                    output.stop_reason = word


class LLM:
    """Keeps its arguments in `arguments` and its generations in `results`."""

    def __init__(self, model: str, **arguments: Any) -> None:
        self.model, self.arguments = model, arguments
        self.results: list[RequestOutput] = []
        self.down = False

    def generate_async(self, inputs: str, sampling_params: SamplingParams, *, streaming: bool = False) -> RequestOutput:
        assert streaming
        wanted, room = sampling_params.values.get("max_tokens", 32), self.arguments.get("max_seq_len", 2**20)
        if len(inputs.encode()) + wanted > room:
            raise ValueError(f"The sum of prompt length and max_tokens ({wanted}) should not exceed max_seq_len ({room})")
        self.results.append(RequestOutput(inputs, sampling_params))
        return self.results[-1]

    def shutdown(self) -> None:
        self.down = True


def _answer(prompt: str) -> Iterator[int]:
    before, newline, _ = prompt.partition("\n")
    return itertools.cycle(before.encode()) if newline else iter(prompt[::-1].encode())
