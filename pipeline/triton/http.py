"""Triton over HTTP with the standard library: health, index, metadata, metrics, generate and generate_stream."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

__all__ = ["Endpoint", "TritonError"]

TIMEOUT = 60.0


class TritonError(RuntimeError):
    """The server's answer is an error: its status (200 for an error inside a good answer) and its sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one server listens."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def reachable(self) -> str:
        """`host` as a client writes it: a server on all interfaces is reached on the local one."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    @property
    def http_url(self) -> str:
        """http://host:port"""
        return f"http://{self.reachable}:{self.http_port}"

    @property
    def grpc(self) -> str:
        """host:port"""
        return f"{self.reachable}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Prometheus page."""
        return f"http://{self.reachable}:{self.metrics_port}/metrics"

    def ready(self, timeout: float = TIMEOUT) -> bool:
        """True if the server and all its models say, within so many seconds, that they are ready."""
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/health/ready", timeout=timeout):
                return True
        except OSError:
            return False

    def index(self) -> dict[str, str]:
        """State of each model in the repository."""
        return {model["name"]: model.get("state", "") for model in self._json("/v2/repository/index", {})}

    def config(self, model: str) -> dict[str, Any]:
        """The model's configuration as the server runs it."""
        config: dict[str, Any] = self._json(f"/v2/models/{model}/config")
        return config

    def metrics(self, *models: str) -> dict[str, float]:
        """Metrics by name, summed over labels; only those of `models` if any are given."""
        totals: dict[str, float] = {}
        with urllib.request.urlopen(self.metrics_url, timeout=TIMEOUT) as reply:
            for line in reply.read().decode().splitlines():
                found = re.match(r"([\w:]+)(\{.*\})? (\S+)$", line)
                if found and (not models or any(f'model="{model}"' in (found[2] or "") for model in models)):
                    totals[found[1]] = totals.get(found[1], 0.0) + float(found[3])
        return totals

    def generate(self, model: str, body: dict[str, Any], timeout: float = TIMEOUT) -> dict[str, Any]:
        """One whole answer. An error inside an answer of status 200 is raised like any other."""
        with self._open(f"/v2/models/{model}/generate", body, timeout) as reply:
            return _checked(json.loads(reply.read()), reply.status)

    def generate_stream(self, model: str, body: dict[str, Any], timeout: float = TIMEOUT) -> Iterator[dict[str, Any]]:
        """Server-sent events; leaving the loop closes the connection, which cancels the request."""
        with self._open(f"/v2/models/{model}/generate_stream", body, timeout) as reply:
            for line in reply:
                if line.startswith(b"data:"):
                    yield _checked(json.loads(line[5:]), reply.status)

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._open(path, body, TIMEOUT) as reply:
            return json.loads(reply.read())

    def _open(self, path: str, body: dict[str, Any] | None, timeout: float) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.http_url + path, data, {"Content-Type": "application/json"})
        try:
            reply: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise TritonError(error.code, _sentence(error.read())) from None
        except TimeoutError:
            raise TritonError(0, f"no answer from {path} within {timeout:g} s") from None
        return reply


def _checked(answer: dict[str, Any], status: int) -> dict[str, Any]:
    if "error" in answer:
        raise TritonError(status, str(answer["error"]))
    return answer


def _sentence(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
