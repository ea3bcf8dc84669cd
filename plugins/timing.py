"""Device time of GPU work: medians of CUDA graph replays or of wall clock, and what a result file must say about the machine."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["clocked", "copy_bandwidth", "graph_seconds", "machine", "one_stream", "replayed"]

Call = Callable[[], Any]
FLUSH_BYTES = 256 << 20
WARM_SECONDS = 0.01
PAGE = 4096


def graph_seconds(calls: Sequence[Call], replays: int = 20, flush: bool = False) -> float:
    """Median seconds of one call, all captured in one graph in order.

    `flush`: each finds a cold L2. What the flushes take is measured in turn with them, as the two times are long and drift alike.
    """
    if not flush:
        graph = _warm(_captured(calls))
        return statistics.median(_seconds(graph) for _ in range(replays)) / len(calls)
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    flushes, both = _captured([scratch.zero_] * len(calls)), _captured([step for call in calls for step in (scratch.zero_, call)])
    _warm(both)
    return statistics.median(_seconds(both) - _seconds(flushes) for _ in range(2 * replays)) / len(calls)


def one_stream() -> AbstractContextManager[None]:
    """A stream for all that a benchmark does. After about seven switches of launches between two streams, every kernel of every
    graph begins 0.18 us later until the process ends (H200, driver 580); forks inside a graph do not count.
    """
    return torch.cuda.stream(torch.cuda.Stream())


def replayed(call: Callable[[], Tensor]) -> Tensor:
    """What a graph of the call gives."""
    call()
    graph, out = _capture(call)
    out.fill_(torch.nan)  # what the first call may have left there
    graph.replay()
    return out.clone()


def clocked(call: Call, repeats: int = 10) -> float:
    """Median wall-clock seconds of one call, until a GPU that it used is done."""
    times = []
    for _ in range(repeats + 2):
        _wait()
        begin = time.perf_counter()
        call()
        _wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def _wait() -> None:
    if torch.cuda.is_initialized():  # a forked rank of a machine with GPUs can have none
        torch.cuda.synchronize()


def copy_bandwidth(total_bytes: int, sets: int = 1, replays: int = 20) -> float:
    """Bytes read and written a second by a device-to-device copy of `total_bytes` traffic, over `sets` pairs in turn."""
    half = max(1, total_bytes // 2 // PAGE) * PAGE  # odd sizes copy more slowly
    pairs = [[torch.randint(0, 255, (half,), dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(sets)]
    return 2 * half / graph_seconds([lambda p=pair: p[0].copy_(p[1]) for pair in pairs], replays)


def machine() -> dict[str, str]:
    """Device, driver, versions, and the commit that was measured (BENCH_COMMIT, where the code has no repository with it)."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "python": platform.python_version()}
    return {"device": torch.cuda.get_device_name(), "driver": driver, **versions, "date": date, "commit": _commit()}


def _commit() -> str:
    """Short, with a + if files differ from it."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(asked, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    kept = [call() for call in calls[:2] for _ in range(2)]
    torch.cuda.synchronize()
    graph, kept = _capture(lambda: [call() for call in calls])  # no two of them share memory
    del kept
    return graph


def _capture(call: Call) -> tuple[torch.cuda.CUDAGraph, Any]:
    """On the current stream, unless it is the default one, of which nothing can be captured; and what the call returned."""
    now, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=None if now == default else now):
        out = call()
    return graph, out


def _warm(graph: torch.cuda.CUDAGraph) -> torch.cuda.CUDAGraph:
    """The same, after replays for WARM_SECONDS: a GPU that was idle is slower at first."""
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        _seconds(graph)
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
