"""What this machine can build, serve and run: versions read without importing the heavy packages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from pipeline import __version__
from pipeline.core.events import human_bytes

__all__ = ["Finding", "examine"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: a thing, whether it is there, its version, and the way to get it."""

    area: str
    name: str
    ok: bool
    detail: str
    fix: str = ""

    def text(self) -> str:
        way_out = f" -> {self.fix}" if self.fix and not self.ok else ""
        return f"{'ok ' if self.ok else '-- '} {self.area:8} {self.name:16} {self.detail}{way_out}"

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Every finding, the machine first, then what each step needs, then what follows from it."""
    findings = [*_machine(), *_packages(), *_tools(), *_gpus()]
    return [*findings, *_verdicts({finding.name: finding.ok for finding in findings})]


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "pipeline", True, __version__)
    yield Finding("machine", "python", (3, 11) <= sys.version_info < (3, 14), platform.python_version(), "use Python 3.11 to 3.13")
    yield Finding("machine", "platform", True, f"{platform.system()} {platform.machine()}, {_cpus()} CPUs, {_memory()}")
    yield Finding("machine", "disk", True, f"{human_bytes(shutil.disk_usage('.').free)} free here")


def _cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory() -> str:
    try:
        return f"{human_bytes(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory"
    except (ValueError, OSError):
        return "memory unknown"


def _packages() -> Iterator[Finding]:
    wanted = {
        "hydra-core": "pip install hydra-core",
        "tritonclient": "pip install 'tritonclient[grpc,http]'",
        "tokenizers": "pip install tokenizers",
        "torch": "pip install 'r1-pipeline[torch]': verify and engine=torch need it",
        "nvidia-pytriton": "pip install 'r1-pipeline[server]', or run where tritonserver is on PATH",
        "tensorrt-llm": "use a container with TensorRT-LLM: engine=trtllm writes its bundle without it",
        "tensorrt-cu13": "pip install 'r1-pipeline[tensorrt]': engine=tensorrt for SM90 and SM100 builds with it, on that GPU",
        "tensorrt-rtx-cu13-bindings": "pip install 'r1-pipeline[rtx]': engine=tensorrt for SM75 to SM121 builds with it, anywhere",
        "nvidia-modelopt": "pip install 'r1-pipeline[modelopt]': only for comparisons",
    }
    for name, fix in wanted.items():
        version = _version(name)
        yield Finding("package", name, version is not None, version or "not installed", fix)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _tools() -> Iterator[Finding]:
    compiler = next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)
    yield Finding(
        "tool",
        "c++ compiler",
        compiler is not None,
        _first_line([compiler, "--version"]) if compiler else "not found",
        "apt-get install g++: without it engine=torch is interpreted, not compiled",
    )
    yield _native_kernels()
    yield _tritonserver()


def _native_kernels() -> Finding:
    from pipeline import native

    name, problem = "native kernels", native.problem()
    if problem is not None:
        return Finding("tool", name, False, "conversion runs in numpy, slowly", problem)
    if (kernels := native.kernels()) is None:
        return Finding("tool", name, False, f"switched off by {native.VARIABLE}=off", "unset it")
    return Finding("tool", name, True, f"{kernels.name} (built for {', '.join(native.levels())})")


def _tritonserver() -> Finding:
    from pipeline.config.schema import ServeConfig
    from pipeline.core.errors import MissingToolError
    from pipeline.triton.server import find_server

    try:
        found = find_server(ServeConfig())
    except MissingToolError as error:
        return Finding("tool", "tritonserver", False, "not usable", " ".join(str(error).split()))
    detail = "python backend, from the nvidia-pytriton wheel" if found.backend_files else str(found.executable)
    return Finding("tool", "tritonserver", True, detail)


def _gpus() -> Iterator[Finding]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    lines = _output(query).splitlines() if shutil.which(query[0]) else []
    yield Finding(
        "gpu",
        "nvidia gpu",
        bool(lines),
        "; ".join(lines) or "none",
        "a GPU is needed to run what +hw=b200 or +hw=h200 build, not to build it",
    )


def _verdicts(have: dict[str, bool]) -> Iterator[Finding]:
    yield Finding("can", "plan, convert", True, "any hardware target")
    yield Finding("can", "verify", have["torch"], "weights and logits", "install torch")
    how = "compiled" if have["c++ compiler"] else "interpreted"
    yield Finding("can", "engine=torch", have["torch"], how, "install torch")
    yield Finding(
        "can",
        "engine=trtllm",
        True,
        "bundle written; validated by tensorrt_llm"
        if have["tensorrt-llm"]
        else "bundle written; not validated by tensorrt_llm, which is not here",
    )
    yield Finding(
        "can",
        "engine=tensorrt",
        have["tensorrt-rtx-cu13-bindings"] or have["tensorrt-cu13"],
        "for SM80 to SM89, SM120 and SM121" if have["tensorrt-rtx-cu13-bindings"] else "for this machine's GPU",
        "pip install 'r1-pipeline[rtx]'",
    )
    yield Finding("can", "serve, smoke", have["tritonserver"], "on this machine", "install tritonserver")


def _first_line(command: list[str]) -> str:
    return (_output(command).splitlines() or ["?"])[0]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
