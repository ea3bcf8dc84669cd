"""tritonserver as a process of ours: found, started on a private copy of the repository, watched, stopped.

Two kinds of installation are known. A container of NVIDIA has everything in place. The nvidia-pytriton wheel brings
Triton 2.51 for CPUs and needs four things right: a backend folder with the stub of this Python version (a symlink: the
stub finds its libraries relative to its real place), this interpreter first on PATH, its libpython on LD_LIBRARY_PATH,
and numpy below 2 (2.51 crashes on every string with numpy 2).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from types import FrameType

from pipeline.config.schema import Config, ServeConfig
from pipeline.core.errors import ConfigError, MissingToolError, StageError
from pipeline.core.process import STOPS, die_with_parent, undisturbed
from pipeline.triton.check import check_repository
from pipeline.triton.dialect import Dialect
from pipeline.triton.http import Endpoint

__all__ = ["Installation", "Server", "find_server", "serve_command", "start"]

CONTAINER_PATH = Path("/opt/tritonserver/bin/tritonserver")
INSTALL_LINE = "pip install --no-deps nvidia-pytriton==0.7.0 'numpy<2'"
WHEEL = "24.10"
"""Release of Triton that the wheel holds."""
POLL = 0.05
READY_SECONDS = 2.0
"""For the answer whether it is ready, while it starts."""
EXIT_TIMEOUT = 5
"""Seconds that requests in flight get when the server is told to stop."""
HELD_UP, STARTS = "boost::interprocess::lock_exception", 3
"""Last words of a Triton that took a model's process for dead, as it was held up for a second while it started: it is started
again. One whose model has really died says so."""
HARMLESS = (
    "CudaDriverHelper has not been initialized",
    "unable to create stream for ensemble",
    "NVML",
    "DCGM",
    "pinned_memory",
)
"""Error lines that every start without a GPU prints."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver and what it needs around it."""

    executable: Path
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    backend_files: tuple[Path, ...] = ()
    """Files of the python backend to be linked into a folder of our own; none: the server's default folder."""
    release: str | None = None
    """Release of Triton, where it is known before the server runs."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    endpoint: Endpoint
    models: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path
    ready_seconds: float

    def errors(self) -> str:
        """The lines of the log that say what went wrong."""
        return meaningful(self.log)


# --- finding it -----------------------------------------------------------------------------------------------


def find_server(config: ServeConfig) -> Installation:
    """serve.server, else PATH, else the container's place, else the wheel of this interpreter."""
    if config.server:
        if not shutil.which(path := Path(config.server).absolute()):
            raise MissingToolError(f"serve.server={config.server} is not a file that can be run: give the path of tritonserver.")
        return _wheel(path) if "pytriton" in path.parts else Installation(path)
    if found := shutil.which("tritonserver"):
        return Installation(Path(found))
    if CONTAINER_PATH.is_file():
        return Installation(CONTAINER_PATH)
    if spec := util.find_spec("pytriton"):
        return _wheel(Path(str(spec.origin)).parent / "tritonserver" / "bin" / "tritonserver")
    raise MissingToolError(
        f"No tritonserver was found: not on PATH, not at {CONTAINER_PATH}, and nvidia-pytriton is not installed here.\n"
        f"Run inside NVIDIA's tritonserver container, or on a CPU: {INSTALL_LINE}"
    )


def _wheel(executable: Path) -> Installation:
    root = executable.parents[1]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    _require_python(version, stub)
    backend = root / "backends" / "python"
    libraries = _require_libpython(version)
    return Installation(
        executable=executable,
        flags=("--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"),
        environment={
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [libraries, os.environ.get("LD_LIBRARY_PATH")])),
        },
        backend_files=(backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub),
        release=WHEEL,
    )


def _require_python(version: str, stub: Path) -> None:
    if sys.version_info >= (3, 13) or not stub.is_file():
        raise MissingToolError(
            f"The nvidia-pytriton wheel cannot serve from Python {version}: its stub is for 3.10 to 3.12 "
            "(on 3.13 every string input crashes it). Use Python 3.12, or a container."
        )
    if int(metadata.version("numpy").split(".")[0]) >= 2:
        raise MissingToolError(
            f"numpy {metadata.version('numpy')} crashes the nvidia-pytriton wheel on every string input; "
            f"it needs numpy below 2: {INSTALL_LINE}"
        )


def _require_libpython(version: str) -> str:
    """Folder of libpython of this interpreter; empty where the system's loader finds it by itself."""
    name = f"libpython{version}.so.1.0"
    folder = Path(sysconfig.get_config_var("LIBDIR") or "")
    if (folder / name).is_file():
        return str(folder)
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    if name not in listed:
        raise MissingToolError(
            f"{name} is missing, which Triton's python backend loads: apt-get install libpython{version}"
        )
    return ""


# --- running it -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def start(config: ServeConfig, repository: Path) -> Iterator[Server]:
    """A ready server on `repository`; stopped, and everything of it removed, when the block ends."""
    installation = find_server(config)
    models = tuple(sorted(check_repository(repository, installation.release)))
    with _reserved(config) as endpoint, contextlib.ExitStack() as running:
        for left in reversed(range(STARTS)):
            process, log = running.enter_context(_process(installation, endpoint, repository))
            try:
                seconds = _wait_ready(process, endpoint, config.ready_timeout, log)
                break
            except StageError:
                if not left or HELD_UP not in log.read_text(errors="replace"):
                    raise
                running.close()
        _require_models(endpoint, models, log)
        yield Server(endpoint, models, process, log, seconds)


@contextlib.contextmanager
def _process(installation: Installation, endpoint: Endpoint, repository: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server that starts, and its log, in a folder of its own."""
    prefix = f"pipeline_{os.getpid()}_{secrets.token_hex(4)}_"
    with tempfile.TemporaryDirectory(prefix="pipeline_triton_", ignore_cleanup_errors=True) as folder:
        work, log = Path(folder), Path(folder) / "server.log"
        copy_repository(repository, work / "repository")
        command = _command(installation, endpoint, work, prefix)
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, env=environment | installation.environment, cwd=work, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        try:
            yield process, log
        finally:
            with undisturbed():
                _stop(process)
                for left in Path("/dev/shm").glob(f"{prefix}*"):
                    left.unlink(missing_ok=True)


def copy_repository(repository: Path, target: Path) -> None:
    """A tree of links: the stub writes __pycache__ beside model.py, and the original must stay as it is."""

    def link(source: str, copy: str) -> None:
        try:
            os.link(source, copy)
        except OSError:
            os.symlink(os.path.realpath(source), copy)

    shutil.copytree(repository, target, copy_function=link)


def _command(installation: Installation, endpoint: Endpoint, work: Path, prefix: str) -> list[str]:
    """Auto-completion stays off, as upstream's launcher has it: config.pbtxt says everything."""
    command = [str(installation.executable), f"--model-repository={work / 'repository'}"]
    if installation.backend_files:
        folder = work / "backends" / "python"
        folder.mkdir(parents=True)
        for file in installation.backend_files:
            (folder / file.name).symlink_to(file)
        command.append(f"--backend-directory={folder.parent}")
    for service, port in (
        ("http", endpoint.http_port),
        ("grpc", endpoint.grpc_port),
        ("metrics", endpoint.metrics_port),
    ):
        command += [f"--{service}-address={endpoint.host}", f"--{service}-port={port}"]
    command += ["--exit-on-error=true", f"--exit-timeout-secs={EXIT_TIMEOUT}", "--disable-auto-complete-config"]
    return [*command, f"--backend-config=python,shm-region-prefix-name={prefix}", *installation.flags]


@contextlib.contextmanager
def _reserved(config: ServeConfig) -> Iterator[Endpoint]:
    """The configured ports, 0 replaced by free ones, and none of them taken, nor given to others while Triton starts.

    Its sockets say SO_REUSEADDR as those here do, so they may have the same address.
    """
    try:
        family = socket.getaddrinfo(config.host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise ConfigError(
            f"serve.host={config.host} is no address of this machine ({error.strerror}): 127.0.0.1 is this machine alone."
        ) from None
    with contextlib.ExitStack() as stack:
        ports = []
        for name in ("http_port", "grpc_port", "metrics_port"):
            wanted = getattr(config, name)
            probe = stack.enter_context(socket.socket(family))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, wanted))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise ConfigError(
                        f"serve.host={config.host} is no address of this machine: 127.0.0.1 is this machine alone, 0.0.0.0 "
                        "every network of it."
                    ) from None
                raise ConfigError(
                    f"serve.{name}={wanted} cannot be used on {config.host} ({error.strerror}): "
                    "choose another port, or 0."
                ) from None
            ports.append(probe.getsockname()[1])
        yield Endpoint(config.host, *ports)


def _wait_ready(process: subprocess.Popen[bytes], endpoint: Endpoint, timeout: float, log: Path) -> float:
    begin = time.monotonic()
    while not (endpoint.ready(READY_SECONDS) and _has_metrics(endpoint)):
        if process.poll() is not None:
            raise StageError(
                f"tritonserver ended with code {process.returncode} before it was ready:\n{meaningful(log)}"
            )
        if time.monotonic() - begin > timeout:
            raise StageError(
                f"tritonserver was not ready after serve.ready_timeout={timeout:g} seconds and was stopped:\n"
                f"{meaningful(log)}"
            )
        time.sleep(POLL)
    return time.monotonic() - begin


def _has_metrics(endpoint: Endpoint) -> bool:
    """Triton opens this port last, after it has said that it is ready."""
    try:
        socket.create_connection((endpoint.reachable, endpoint.metrics_port), READY_SECONDS).close()
    except OSError:
        return False
    return True


def _require_models(endpoint: Endpoint, models: tuple[str, ...], log: Path) -> None:
    """Readiness alone says little: an empty repository is ready too."""
    index = endpoint.index()
    if index != dict.fromkeys(models, "READY"):
        raise StageError(f"The server holds {index}, but {', '.join(models)} should be READY:\n{meaningful(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first: a killed server leaves its stubs and their shared memory behind for a while."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT + 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + EXIT_TIMEOUT
    while _lives(process.pid) and time.monotonic() < end:
        time.sleep(POLL)


def _lives(group: int) -> bool:
    """Whether a process of this group has not ended: one that is killed does so when its turn comes."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def meaningful(log: Path, most: int = 12) -> str:
    """The log's error lines without what every start on a CPU prints; its end if there are none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [
        line
        for line in lines
        if re.match(r"E\d{4} |error:|.*(Error|Exception)\b", line) and not any(text in line for text in HARMLESS)
    ]
    chosen = list(dict.fromkeys(errors))[:most] or lines[-most:]
    return "\n".join(f"  {line}" for line in chosen) or "  (the log is empty)"


# --- the command ----------------------------------------------------------------------------------------------


def serve_command(config: Config, repository: Path, emit: Callable[[str], None] = print) -> int:
    """Serve until SIGINT or SIGTERM; 0 after a clean stop, StageError if the server (or its gateway) ends by itself."""
    from pipeline.openai.companion import beside

    with _signals() as stopped:
        try:
            with start(config.serve, repository) as server:
                with beside(config.serve, server.endpoint, server.models, repository) as gateway:
                    for line in [*describe(server), *([gateway.line] if gateway else [])]:
                        emit(line)
                    while server.process.poll() is None:
                        if gateway:
                            gateway.require_alive()
                        time.sleep(POLL)
                raise StageError(
                    f"tritonserver ended by itself with code {server.process.returncode}:\n{server.errors()}"
                )
        except KeyboardInterrupt:
            emit(f"stopped by {stopped[-1] if stopped else 'SIGINT'}")
            return 0


def describe(server: Server) -> list[str]:
    """What a user needs to reach the server."""
    at = server.endpoint
    lines = [
        f"ready in {server.ready_seconds:.1f} s: {', '.join(server.models)}",
        f"http     {at.http_url}",
        f"grpc     {at.grpc}",
        f"metrics  {at.metrics_url}",
    ]
    for name in server.models:
        body = json.dumps(Dialect.of(at.config(name)).tensors("Hello", max_tokens=32, stream=True))
        lines.append(f"try      curl -N {at.http_url}/v2/models/{name}/generate_stream -d {shlex.quote(body)}")
    return lines


@contextlib.contextmanager
def _signals() -> Iterator[list[str]]:
    """SIGTERM and SIGINT become one KeyboardInterrupt; further ones do not disturb the stop."""
    seen: list[str] = []

    def handle(number: int, _: FrameType | None) -> None:
        seen.append(signal.Signals(number).name)
        if len(seen) == 1:
            raise KeyboardInterrupt

    old = {number: signal.signal(number, handle) for number in STOPS}
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
