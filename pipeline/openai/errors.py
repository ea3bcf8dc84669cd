"""Errors in OpenAI's shape, and what Triton's errors become."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["ApiError", "from_triton"]

QUEUE_FULL = re.compile(r"requests wait already|requests run or wait|maximum queue size", re.IGNORECASE)
TOO_LONG = re.compile(
    r"KV pages|max_seq_len|max_num_tokens|max_input_len|max_model_len|maximum (context|sequence|input|model) length|prompt length",
    re.IGNORECASE,
)
"""Engines say it in their own words: the torch engine, TensorRT-LLM's executor and LLM API, vLLM."""
GONE = re.compile(r"shutting down|is stopping|was cancelled", re.IGNORECASE)
ABSENT = re.compile(r"unknown model|is not found|is not ready", re.IGNORECASE)
STATUS = {
    "INVALID_ARGUMENT": (400, None),
    "NOT_FOUND": (503, "model_not_loaded"),
    "UNAVAILABLE": (503, "server_unavailable"),
    "CANCELLED": (503, "server_unavailable"),
    "DEADLINE_EXCEEDED": (504, "timeout"),
}


class ApiError(Exception):
    """What a client is told: an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def from_triton(code: str, text: str) -> ApiError:
    """The error for a client, from the name of a gRPC status and its text. Errors inside a stream have no status (""), so
    the text must tell what it was; what it does not tell is the engine's failure."""
    if QUEUE_FULL.search(text):
        return ApiError(429, text, code="queue_full")
    if code in ("INVALID_ARGUMENT", "INTERNAL", "UNKNOWN", "") and TOO_LONG.search(text):
        return ApiError(400, text, code="context_length_exceeded")
    if not code:
        code = "UNAVAILABLE" if GONE.search(text) else "NOT_FOUND" if ABSENT.search(text) else ""
    status, name = STATUS.get(code, (500, "engine_error"))
    return ApiError(status, text, code=name)
