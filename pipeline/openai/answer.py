"""OpenAI's objects: whole answers, chunks of a stream, counts, and their form as server-sent events."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from pipeline.openai.reasoning import Delta

__all__ = ["DONE", "Answer", "ChatAnswer", "Choice", "TextAnswer", "event", "usage"]

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """A generation that is collected for an answer in one piece."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, delta: Delta) -> None:
        """Keep one more delta."""
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)


class Answer:
    """The objects of one request. `counted`: its stream ends with a chunk of counts, so the others say `usage: null`."""

    kind = chunk_kind = ""

    def __init__(self, request_id: str, model: str, counted: bool) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._counted = counted

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Chunks before the first text of a choice."""
        return []

    def chunk(self, index: int, delta: Delta, finish_reason: str | None = None) -> dict[str, Any]:
        """New text of one choice, or its end."""
        return self._chunk([self._part(index, delta, finish_reason)])

    def counts(self, counts: dict[str, int]) -> dict[str, Any]:
        """The last chunk of a stream that asked for it."""
        return self._chunk([]) | {"usage": counts}

    def whole(self, choices: list[Choice], counts: dict[str, int]) -> dict[str, Any]:
        """The answer in one piece."""
        parts = [self._whole(index, choice) for index, choice in enumerate(choices)]
        return {**self._head, "object": self.kind, "choices": parts, "usage": counts}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": None} if self._counted else chunk

    def _part(self, index: int, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """Of /v1/chat/completions. Thoughts are in `reasoning_content`, as DeepSeek's own API has them."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The chunk that names the role."""
        part = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([part])]

    def _part(self, index: int, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        text = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        text |= {"content": delta.content} if delta.content else {}
        return {"index": index, "delta": text, "logprobs": None, "finish_reason": finish_reason}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.content), "refusal": None}
        if reasoning := "".join(choice.reasoning):
            message["reasoning_content"] = reasoning
        return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}


class TextAnswer(Answer):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"

    def _part(self, index: int, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": delta.content, "logprobs": None, "finish_reason": finish_reason}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._part(index, Delta(content="".join(choice.content)), choice.finish_reason)


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's table of counts."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
