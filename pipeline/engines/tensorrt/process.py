"""Runs `worker.py` tasks: progress passed on, a crash told in a sentence, the same bytes on every run."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.core.errors import StageError
from pipeline.core.events import replay
from pipeline.core.process import die_with_parent
from pipeline.core.stage import Progress
from pipeline.share import code_root

__all__ = ["fixed_addresses", "run_task", "short_name"]

_ADDR_NO_RANDOMIZE = 0x0040000
REQUEST = "request.json"
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "LC_ALL", "CUDA_VISIBLE_DEVICES", "PYTHONDONTWRITEBYTECODE")
"""The last so that a task compiles the modules that its parent compiled: compiling moves addresses, too."""


def fixed_addresses(*, probe: bool = False) -> bool:
    """Ask Linux for the same addresses in every run of the next program; whether it agreed. TensorRT orders some of an engine's
    tables by address, so that engines would differ in a few hundred bytes (a container's seccomp profile may refuse).
    `probe` only asks whether it would."""
    if sys.platform != "linux":
        return False
    personality = ctypes.CDLL(None).personality
    current = personality(ctypes.c_ulong(0xFFFFFFFF))
    agreed = current >= 0 and personality(ctypes.c_ulong(current | _ADDR_NO_RANDOMIZE)) >= 0
    if agreed and probe:
        personality(ctypes.c_ulong(current))
    return agreed


@contextmanager
def short_name(folder: Path) -> Iterator[Path]:
    """Another name of a folder, always of the same length: the lengths of names, too, move addresses."""
    with tempfile.TemporaryDirectory() as home:
        link = Path(home) / "work"
        link.symlink_to(folder.absolute())
        yield link


def _environment() -> dict[str, str]:
    """What a task may depend on, and no more: each further variable would move the addresses of what comes after it."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    paths = os.pathsep.join(filter(None, [str(code_root()), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": paths, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def _before_exec() -> None:
    die_with_parent()
    fixed_addresses()


def run_task(
    module: str, request: dict[str, Any], scratch: Path, progress: Progress, *, package: str = "pipeline.engines.tensorrt"
) -> dict[str, Any]:
    """Run `python -m <package>.<module>` on a request; its `done` event. What it leaves lies in `scratch`.

    Raises:
        StageError: it said why, or it died.
    """
    name = str(request["name"])
    file, log = scratch / REQUEST, scratch / f"{name}.log"
    file.write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-P", "-m", f"{package}.{module}", str(file)]
    done = error = None
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd="/", stdout=subprocess.PIPE, stderr=stderr, env=_environment(), preexec_fn=_before_exec
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "done":
                    done = event
                elif event["event"] == "error":
                    error = event["text"]
                else:
                    replay(event, progress)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    if code or done is None:
        raise StageError(f"{name}: {error or _death(code, log)}")
    return done


def _death(code: int, log: Path) -> str:
    """A sentence about a process that ended without one."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = " | ".join(lines[-4:])[-1500:] or "it left no message"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}" + (", as by a lack of memory" if code == -signal.SIGKILL else "")
        return f"its process {how}: {last}"
    return f"its process ended with code {code}: {last}"
