"""What a request may say: OpenAI's fields with their types and limits, and a sentence for everything else.

A field that would change the answer and is not served (tools, logprobs, ...) is refused unless it says "no"; one that
changes nothing (user, metadata, ...) is accepted; a name that nobody knows is refused, because it is a typing error.
Beyond OpenAI's: `top_k`, `ignore_eos`, `chat_template_kwargs` and `separate_reasoning`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pipeline.core.limits import MOST_TOKENS, limited, mistakes
from pipeline.openai.errors import ApiError
from pipeline.openai.template import RESERVED

__all__ = ["ChatRequest", "CompletionRequest", "Request", "parse"]

MOST_CHOICES = 16
"""Generations of one request: prompts times n."""
MOST_STOPS = 4
ROLES = ("system", "developer", "user", "assistant")
COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that may be half a character."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,), "best_of": (None, 1), "echo": (None, False), "function_call": (None, "none", "auto"),
    "functions": (None, []), "include_reasoning": (None, True), "length_penalty": (None, 1, 1.0), "logit_bias": (None, {}),
    "logprobs": (None, False), "min_p": (None, 0, 0.0), "min_tokens": (None, 0), "modalities": (None, ["text"]),
    "prediction": (None,), "reasoning_effort": (None,), "repetition_penalty": (None, 1, 1.0),
    "response_format": (None, {"type": "text"}), "skip_special_tokens": (None, True), "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"), "tools": (None, []), "top_logprobs": (None, 0), "use_beam_search": (None, False),
    "verbosity": (None, "medium"), "web_search_options": (None,),
}  # fmt: skip
"""Fields of OpenAI and of vLLM that are not served -> the values that ask for nothing, which benchmark clients send."""
IGNORED = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
})  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Request:
    """What chats and completions have in common. None: not given."""

    model: str = limited(empty=False)
    max_tokens: int | None = limited(None, least=1, most=MOST_TOKENS)
    temperature: float | None = limited(None, least=0, most=2)
    top_p: float | None = limited(None, above=0, most=1)
    top_k: int | None = limited(None, least=-1, most=2**31 - 1)
    """-1 and 0: no limit."""
    seed: int | None = limited(None, least=-(2**63), most=2**64 - 1)
    stop: str | list[str] | None = None
    n: int | None = limited(None, least=1, most=MOST_CHOICES)
    presence_penalty: float | None = limited(None, least=-2, most=2)
    frequency_penalty: float | None = limited(None, least=-2, most=2)
    stream: bool | None = None
    stream_options: dict[str, bool] | None = limited(None, keys=("include_usage", "include_obfuscation"))
    ignore_eos: bool | None = None

    @property
    def stops(self) -> list[str]:
        """Stop words, none of them empty."""
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [word for word in words if word]

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self) -> dict[str, Any]:
        """The engine's options that the request names."""
        names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if "top_k" in options:
            options["top_k"] = max(options["top_k"], 0)
        for name in ("presence_penalty", "frequency_penalty"):
            if not options.get(name):  # 0 asks for nothing, and not every model has an input for it
                options.pop(name, None)
        if self.ignore_eos:
            options["ignore_eos"] = True
        return options | ({"stop_words": self.stops} if self.stops else {})

    def check(self) -> None:
        """What no limit of a single field says."""
        if len(self.stops) > MOST_STOPS:
            _refuse(f"stop has {len(self.stops)} words: give at most {MOST_STOPS}.", "stop")
        if self.stream_options is not None and not self.stream:
            _refuse("stream_options is only allowed with stream=true: leave it out, or stream.", "stream_options")


@dataclass(slots=True, kw_only=True)
class ChatRequest(Request):
    """POST /v1/chat/completions"""

    messages: list[Any] = limited()
    max_completion_tokens: int | None = limited(None, least=1, most=MOST_TOKENS)
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None

    def check(self) -> None:
        """Also brings `messages` into the form that templates read."""
        Request.check(self)
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                _refuse("max_tokens and max_completion_tokens say the same: give one of them.", "max_tokens")
            self.max_tokens = self.max_completion_tokens
        if taken := RESERVED & set(self.chat_template_kwargs or {}):
            _refuse(f"chat_template_kwargs may not set {', '.join(sorted(taken))}: leave it out.", "chat_template_kwargs")
        if not self.messages:
            _refuse("messages is empty: give at least one message.", "messages")
        self.messages = [_message(message, f"messages[{number}]") for number, message in enumerate(self.messages)]


@dataclass(slots=True, kw_only=True)
class CompletionRequest(Request):
    """POST /v1/completions"""

    prompt: Any = limited()

    @property
    def prompts(self) -> list[str]:
        """One or several texts."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def check(self) -> None:
        """Also sets OpenAI's default of max_tokens."""
        Request.check(self)
        if not isinstance(self.prompt, str) and not (isinstance(self.prompt, list) and self.prompt):
            _refuse("prompt must be a text, or a list of texts that is not empty.", "prompt")
        if any(not isinstance(text, str) for text in self.prompts):
            _refuse("prompt holds token ids, which the served model does not take: send text.", "prompt")
        if "" in self.prompts:
            _refuse("prompt is empty: send at least one character.", "prompt")
        if (choices := len(self.prompts) * (self.n or 1)) > MOST_CHOICES:
            _refuse(f"prompts times n is {choices}: at most {MOST_CHOICES} a request, so send several requests.", "n")
        self.max_tokens = self.max_tokens or COMPLETION_TOKENS


R = TypeVar("R", bound=Request)


def parse(kind: type[R], raw: bytes) -> R:
    """The request in the body `raw`.

    Raises:
        ApiError: 400, with the field that is wrong.
    """
    body = _json(raw)
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name, value in body.items():
        _require_known(name, value, known)
    for name, field in known.items():
        if name not in body and field.default is dataclasses.MISSING:
            _refuse(f"{name} is missing: it is required.", name, "missing_required_parameter")
    request = kind(**{name: value for name, value in body.items() if name in known})
    for sentence in mistakes(request):
        _refuse(sentence, re.split(r"[= ]", sentence.removeprefix("There is no key "))[0].rstrip(":"))
    request.check()
    return request


def _json(raw: bytes) -> dict[str, Any]:
    """The object, in strict JSON: no NaN, no lone surrogates, no nesting that ends the interpreter's stack."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if SURROGATE.search(raw):
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"The body is not valid UTF-8: {error.reason} at byte {error.start}.")
    except UnicodeEncodeError:
        _refuse("The body holds half of a surrogate pair (\\ud800 to \\udfff), which is no character.")
    except RecursionError:
        _refuse("The body is nested too deeply.")
    except ValueError as error:
        _refuse(f"The body is not valid JSON: {error}.")
    if not isinstance(body, dict):
        _refuse("The body must be a JSON object.")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _require_known(name: str, value: Any, known: dict[str, Any]) -> None:
    if name in known or name in IGNORED:
        return
    if name not in NEUTRAL:
        _refuse(f"Unrecognized request argument supplied: {name[:80]}", name[:80], "unknown_parameter")
    if not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[name]):
        _refuse(f"{name} is not supported by this server: leave it out.", name, "unsupported_parameter")


def _message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, dict):
        _refuse(f"{place} must be an object with role and content.", place)
    role = message.get("role")
    if role not in ROLES:
        _refuse(f"{place}.role={str(role)[:40]!r} is not supported: choose one of {', '.join(ROLES)}.", f"{place}.role")
    if message.get("tool_calls") or message.get("function_call"):
        _refuse(f"{place} has tool calls, which this server does not support.", place, "unsupported_parameter")
    content = _content(message.get("content"), role, f"{place}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(content: Any, role: str, place: str) -> str:
    """A text, or the texts of content parts, a line each."""
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(f"{place} must be a text or a list of text parts.", place)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            _refuse(f"{place} holds a part that is not text: this model reads text alone.", place)
    return "\n".join(part["text"] for part in content)


def _refuse(message: str, param: str | None = None, code: str | None = "invalid_value") -> NoReturn:
    raise ApiError(400, message, param=param, code=code if param else None)
