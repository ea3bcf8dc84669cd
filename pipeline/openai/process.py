"""The gateway as a process: its loop, its command line, and as the companion of a server that `serve` has started."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pipeline.config.schema import ServeConfig
from pipeline.core.errors import ConfigError, StageError
from pipeline.core.process import STOPS, die_with_parent
from pipeline.openai.app import make_app
from pipeline.openai.service import Service, Settings
from pipeline.triton.http import Endpoint
from pipeline.triton.smoke import entry, running

__all__ = ["Companion", "api_key", "beside", "command", "gateway_command", "run", "tokenizer_folder"]

KEEP_ALIVE = 75.0
"""Seconds that an idle connection is kept for the client's next request."""
BACKLOG = 1024
"""Connections that may wait to be accepted."""
GRACE = 5.0
"""Seconds that running answers get when the gateway is told to stop."""


def run(settings: Settings, host: str, port: int, emit: Callable[[str], None]) -> None:
    """Listen until SIGINT or SIGTERM; `emit` gets the URL once clients can connect.

    Raises:
        ConfigError: the tokenizer or the port cannot be used.
        StageError: a worker died; the others were stopped.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client holds one, and the usual limit is 1024
    service = Service(settings)
    with _listener(host, port, shared=False) as probe:  # among sockets that share, nobody would say that it is taken
        port = probe.getsockname()[1]
    with _listener(host, port, shared=settings.workers > 1) as listener:
        workers = [_fork(service, host, port) for _ in range(settings.workers - 1)]
        emit(f"openai   http://{_reachable(host)}:{port}/v1")
        try:
            asyncio.run(_serve(service, listener))
        finally:
            died = [_end(worker) for worker in workers]
    if any(died):
        raise StageError("A worker of the OpenAI gateway died, so all were stopped; its words are above.")


def api_key(variable: str | None) -> str:
    """The key in this environment variable; empty if none is wanted."""
    if not variable:
        return ""
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"The environment variable {variable}, which should hold the API key, is not set or empty: export it.")
    return key


def command(serve: ServeConfig, endpoint: Endpoint, model: str, tokenizer: Path) -> list[str]:
    """The command that starts the gateway beside a server; the key stays in the environment."""
    words = [sys.executable, "-m", "pipeline.openai", "--grpc", endpoint.grpc, "--model", model]
    words += ["--tokenizer", str(tokenizer), "--host", serve.host, "--port", str(serve.openai_port)]
    words += ["--metrics-url", endpoint.metrics_url]
    words += ["--api-key-env", serve.openai_api_key_env] if serve.openai_api_key_env else []
    words += ["--workers", str(serve.openai_workers)]
    return [*words, "--max-model-len", str(serve.max_model_len)] if serve.max_model_len else words


def gateway_command(serve: ServeConfig, source: Path | None, emit: Callable[[str], None]) -> int:
    """The gateway alone, in front of the server at serve.url; 0 after a clean stop. `source`: the checkpoint, if known."""
    endpoint, models = running(serve)
    folder = Path(serve.tokenizer) if serve.tokenizer else source
    if folder is None:
        raise ConfigError("The gateway needs the model's tokenizer: name its folder as serve.tokenizer=DIR.")
    settings = Settings(
        grpc=endpoint.grpc,
        model=entry(list(models)),
        tokenizer=folder,
        metrics_url=endpoint.metrics_url,
        api_key=api_key(serve.openai_api_key_env),
        max_model_len=serve.max_model_len,
        workers=serve.openai_workers,
    )
    run(settings, serve.host, serve.openai_port or 0, emit)
    return 0


def tokenizer_folder(repository: Path, model: str) -> Path:
    """Where a packaged model keeps its tokenizer."""
    found = sorted(repository.glob(f"{model}/**/tokenizer.json")) or sorted(repository.glob("*/**/tokenizer.json"))
    if not found:
        raise ConfigError(f"No model of {repository} has a tokenizer.json: name its folder as serve.tokenizer=DIR.")
    return found[0].parent


@dataclass(frozen=True, slots=True)
class Companion:
    """A gateway that runs beside its server."""

    process: subprocess.Popen[str]
    line: str
    """Its URL, for people."""

    def require_alive(self) -> None:
        """StageError once it has ended."""
        if (code := self.process.poll()) is not None:
            raise StageError(f"The OpenAI gateway ended by itself with code {code}; its words are above.")


@contextlib.contextmanager
def beside(serve: ServeConfig, endpoint: Endpoint, models: Iterable[str], repository: Path) -> Iterator[Companion | None]:
    """The gateway of serve.openai_port, in front of the server's entry model, while the block runs; None: not wanted."""
    if serve.openai_port is None:
        yield None
        return
    api_key(serve.openai_api_key_env)
    model = serve.model_name or entry(list(models))
    tokenizer = Path(serve.tokenizer) if serve.tokenizer else tokenizer_folder(repository, model)
    words = command(serve, endpoint, model, tokenizer)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=die_with_parent
    )
    try:
        assert process.stdout
        if not (line := process.stdout.readline().rstrip()):
            raise StageError(f"The OpenAI gateway did not start (code {process.wait()}); its words are above.")
        yield Companion(process, line)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE + 5)
        process.kill()
        process.wait()


class _Quiet(logging.Filter):
    """Drops the traceback that aiohttp logs for each request that is no HTTP: anybody can send those."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _serve(service: Service, listener: socket.socket) -> None:
    """One worker, until it is told to stop or another one dies."""
    logging.getLogger("aiohttp.server").addFilter(_Quiet())
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (*STOPS, signal.SIGCHLD):
        loop.add_signal_handler(number, stopped.set)
    # handler_cancellation: a client that leaves ends its handler, and so its generation.
    # auto_decompress off: a small body that unpacks into a large one is refused, not unpacked.
    runner = web.AppRunner(
        make_app(service), handler_cancellation=True, auto_decompress=False, access_log=None, keepalive_timeout=KEEP_ALIVE,
        shutdown_timeout=GRACE, handle_signals=False,
    )  # fmt: skip
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        await stopped.wait()
    finally:
        await runner.cleanup()


def _fork(service: Service, host: str, port: int) -> int:
    """One more worker with a socket of its own on the same port: the kernel spreads connections. Its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        die_with_parent()
        with _listener(host, port, shared=True) as listener:
            asyncio.run(_serve(service, listener))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end(worker: int) -> int:
    """Stop a worker; its status, which is not 0 if it had died."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGTERM)
    return os.waitpid(worker, 0)[1]


def _listener(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket. `shared`: other workers of ours may listen there too."""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        reason = "it is taken" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"Port {port} cannot be used on {host} ({reason}): choose another, or 0 for a free one.") from None


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
