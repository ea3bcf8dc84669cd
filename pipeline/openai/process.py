"""The gateway as a process: its socket, its loop, and its workers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pipeline.core.errors import ConfigError, StageError
from pipeline.core.process import STOPS, die_with_parent
from pipeline.openai.app import make_app
from pipeline.openai.service import Service, Settings

__all__ = ["run"]

KEEP_ALIVE = 75.0
"""Seconds that an idle connection is kept for the client's next request."""
BACKLOG = 1024
"""Connections that may wait to be accepted."""


def run(settings: Settings, host: str, port: int, emit: Callable[[str], None]) -> None:
    """Listen until SIGINT or SIGTERM; `emit` gets the URL once clients can connect and signals are heard.

    Raises:
        ConfigError: the tokenizer or the port cannot be used.
        StageError: a worker died; the others were stopped.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client holds one, and the usual limit is 1024
    service = Service(settings)
    if port:  # among sockets that share, nobody would say that it is taken
        _listener(host, port, shared=False).close()
    with _listener(host, port, shared=settings.workers > 1) as listener:
        port = listener.getsockname()[1]
        workers = [_fork(service, host, port) for _ in range(settings.workers - 1)]
        try:
            asyncio.run(_serve(service, listener, lambda: emit(f"openai   http://{_reachable(host)}:{port}/v1")))
        finally:
            died = [_end(worker) for worker in workers]
    if any(died):
        raise StageError("A worker of the OpenAI gateway died, so all were stopped; its words are above.")


class _Quiet(logging.Filter):
    """Drops the traceback that aiohttp logs for each request that is no HTTP: anybody can send those."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _serve(service: Service, listener: socket.socket, tell: Callable[[], None] = lambda: None) -> None:
    """One worker, until it is told to stop or another one dies. `tell` is called once it serves."""
    logging.getLogger("aiohttp.server").addFilter(_Quiet())
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in STOPS:
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGCHLD, lambda: _a_worker_ended() and stopped.set())
    # handler_cancellation: a client that leaves ends its handler, and so its generation.
    # auto_decompress off: a small body that unpacks into a large one is refused, not unpacked.
    runner = web.AppRunner(
        make_app(service), handler_cancellation=True, auto_decompress=False, access_log=None, keepalive_timeout=KEEP_ALIVE,
        shutdown_timeout=service.settings.grace, handle_signals=False,
    )  # fmt: skip
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        tell()
        if not _a_worker_ended():  # before its signal was listened to
            await stopped.wait()
    finally:
        await runner.cleanup()


def _a_worker_ended() -> bool:
    """Whether one may be waited for: one that only pauses, or goes on, sends the same signal."""
    with contextlib.suppress(ChildProcessError):  # there are none
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


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


def _end(worker: int) -> bool:
    """Stop a worker; whether it had died before."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGTERM)
    return os.waitpid(worker, 0)[1] not in (0, signal.SIGTERM)


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
