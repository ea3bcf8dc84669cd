"""Each stage in a process of its own: a crash is a sentence, memory is measured and given back.

The child is `python -m pipeline stage CALL.json`. It writes events as JSON lines on standard output; its standard
error, with what compilers and libraries print, goes to the log, whose end is quoted when the child fails.
The child is told to die with its parent, so that a killed build leaves nobody writing into the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.core import errors
from pipeline.core.errors import PipelineError, StageError
from pipeline.core.events import EventWriter, replay
from pipeline.core.jsonio import read_json, write_json
from pipeline.core.process import die_with_parent, undisturbed
from pipeline.core.stage import Progress
from pipeline.executors import StageCall, StageOutcome
from pipeline.share import code_root

__all__ = ["LocalExecutor", "child_main"]

_LOG_LINES = 12
_PARENT = "PIPELINE_PARENT_PID"


class LocalExecutor:
    """One child process a stage."""

    def run(self, call: StageCall, progress: Progress, log: Path) -> StageOutcome:
        call_file = Path(call.tmp) / "call.json"
        write_json(call_file, asdict(call))
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as log_stream, _child(call_file, call.tmp, log_stream) as child:
            last = _follow(child, progress, log)
        if child.returncode == 0 and last.get("event") == "done":
            return StageOutcome(seconds=last["seconds"], peak_memory_bytes=last["peak_memory_bytes"])
        raise _failure(call.stage, child.returncode, last, log)


@contextlib.contextmanager
def _child(call_file: Path, tmp: str, log_stream: Any) -> Any:
    environment = os.environ | {"TMPDIR": tmp, "PYTHONPATH": _python_path(), "PYTHONHASHSEED": "0", _PARENT: str(os.getpid())}
    command = [sys.executable, "-m", "pipeline", "stage", str(call_file)]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log_stream,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with undisturbed():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(code_root()), os.environ.get("PYTHONPATH"))))


def _follow(child: subprocess.Popen[str], progress: Progress, log: Path) -> dict[str, Any]:
    """Replay the child's events until it ends; returns the last event that is not progress."""
    last: dict[str, Any] = {}
    assert child.stdout
    for line in child.stdout:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError):
            with open(log, "a", encoding="utf-8") as stream:  # a library printed: not ours, but keep it
                stream.write(line)
            continue
        if kind in ("done", "error"):
            last = event
        else:
            replay(event, progress)
    child.wait()
    return last


def _failure(stage: str, code: int, last: dict[str, Any], log: Path) -> PipelineError:
    """The child's own error, or a sentence about how it ended."""
    if last.get("event") == "error":
        kind = getattr(errors, last["kind"], StageError)
        return kind(last["text"])
    how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        how += " (often: out of memory)"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return StageError("\n  ".join([f"Stage {stage} {how}. The end of its log {log}:", *lines]))


def child_main(call_file: Path) -> int:
    """Body of `python -m pipeline stage CALL.json`."""
    _die_with_parent()
    events = EventWriter(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what libraries print on standard output belongs to the log
    from pipeline.executors.inline import peak_memory, run_call

    started = time.monotonic()
    try:
        run_call(StageCall(**read_json(call_file)), events)
    except PipelineError as error:
        events.send(event="error", kind=type(error).__name__, text=str(error))
        return error.exit_code
    except OSError as error:  # a full or lost disk, mostly; where it happened stands in the log
        traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        events.send(event="error", kind="StageError", text=f"{where}{error.strerror or error}. What was finished is kept.")
        return StageError.exit_code
    events.send(event="done", seconds=time.monotonic() - started, peak_memory_bytes=peak_memory())
    return 0


def _die_with_parent() -> None:
    """Linux: be killed when the parent dies, however it dies."""
    if sys.platform == "linux":
        die_with_parent()
        if os.environ.get(_PARENT, str(os.getppid())) != str(os.getppid()):
            os._exit(1)  # it died before we asked
