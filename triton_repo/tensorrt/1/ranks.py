"""A process for each rank: rank 0 in the model's own process, which leads, the others started here as `python ranks.py`.

Each opens its engines first; when all have, they join one communicator, and from then on take every step together. Steps go through
a socket, results through memory that both processes map: 4 MB of logits for 8 rows of R1's vocabulary. A rank that fails says why;
the others then wait in a collective for ever, so this process ends itself after a grace period, and Triton starts it again.

All ranks are on one host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from runner import Step
from torch import Tensor

__all__ = ["OneRank", "RankGroup", "main"]

GRACE = 10.0
"""Seconds from a rank's failure until this process ends, where it has not failed by itself."""
NOTICED, SHORTLY = 5.0, 0.5
"""Seconds in which another rank's failure is noticed where this one has failed, and in which those of further ranks follow."""
PR_SET_PDEATHSIG = 1
ALIGNMENT = 64


class OneRank:
    """The only rank, in this process."""

    def __init__(self, info: dict[str, Any], folder: Path) -> None:
        from tensorrt_runner import TensorrtRunner

        self._runner = TensorrtRunner(info, folder, 0)

    def run(self, steps: list[Step]) -> list[tuple[Tensor, ...]]:
        """See `runtime.Ranks`."""
        return [self._runner.run(steps[0])]


class RankGroup:
    """All ranks; this process is rank 0."""

    def __init__(self, info: dict[str, Any], folder: Path) -> None:
        from tensorrt_runner import TensorrtRunner, check_machine

        check_machine(info)
        self._all_answer = info["parallel"] == "adp"
        self._failed = threading.Event()
        self._members = [_Member(rank, Results.size(info), self._failed) for rank in range(1, info["ranks"])]
        try:
            self._tell([(info, str(folder))] * len(self._members))
            self._runner = TensorrtRunner(info, folder, 0)
            self._answers()
            with tempfile.TemporaryDirectory() as meeting:
                self._tell([meeting] * len(self._members))
                self._runner.join(Path(meeting))
                self._answers()
        except BaseException:
            self.close()
            raise

    def run(self, steps: list[Step]) -> list[tuple[Tensor, ...]]:
        """See `runtime.Ranks`; results are on the CPU. Under tensor parallelism rank 0 alone answers.

        Raises:
            RuntimeError: a rank failed; the group is closed.
        """
        try:
            self._tell([(step.kind, _arrays(step.arguments), self._all_answer) for step in steps[1:]])
            mine = tuple(value.cpu() for value in self._runner.run(steps[0]))
            return [mine, *(member.results.take(told) for member, told in zip(self._members, self._answers(), strict=True))]
        except Exception as error:
            if self._failed.wait(NOTICED):
                time.sleep(SHORTLY)
            causes = [member.failure for member in self._members if member.failure]
            self.close()
            if causes:  # this rank may have failed only because another had
                raise RuntimeError(causes[0]) from error
            raise

    def close(self) -> None:
        """End the other ranks."""
        for member in self._members:
            member.close()

    def _tell(self, messages: list[Any]) -> None:
        for member, message in zip(self._members, messages, strict=True):
            member.send(message)

    def _answers(self) -> list[Any]:
        return [member.answer() for member in self._members]


def _arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """Tensors as numpy arrays: torch would send them as files in shared memory."""
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in arguments.items()}


class Results:
    """Results of a step in memory that two processes map."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._memory = mmap.mmap(descriptor, size)

    @staticmethod
    def size(info: dict[str, Any]) -> int:
        """Bytes of the largest ones: logits of two tokens of every row, and its draft."""
        rows = info["max_batch_size"]
        return 2 * rows * info["vocab_size"] * 4 + rows * 4 + 2 * ALIGNMENT

    def put(self, results: Sequence[Tensor]) -> list[tuple[str, list[int]]]:
        """Write them; what `take` has to be told."""
        told = [(str(value.dtype).removeprefix("torch."), list(value.shape)) for value in results]
        for place, value in zip(self.take(told), results, strict=True):
            place.copy_(value)
        return told

    def take(self, told: list[tuple[str, list[int]]]) -> tuple[Tensor, ...]:
        """Tensors that lie there, one behind the other."""
        found, offset = [], 0
        for name, shape in told:
            kind = getattr(torch, name)
            found.append(torch.frombuffer(self._memory, dtype=kind, count=prod(shape), offset=offset).view(shape))
            offset += -(-found[-1].nbytes // ALIGNMENT) * ALIGNMENT
        return tuple(found)


class _Member:
    """Another rank, as this process sees it. `failed` is set once it has a `failure`."""

    def __init__(self, rank: int, size: int, failed: threading.Event) -> None:
        self.failure = ""
        """Why it does not go on."""
        self._rank, self._failed, self._closed = rank, failed, threading.Event()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        shared = os.memfd_create(f"results of rank {rank}")
        os.ftruncate(shared, size)
        self.results = Results(shared, size)
        with theirs:
            passed = [theirs.fileno(), shared]
            words = [_python(), str(Path(__file__).absolute()), *map(str, (*passed, size, rank))]
            self._process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, pass_fds=passed)
        os.close(shared)
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"rank {rank}", daemon=True).start()

    def send(self, message: Any) -> None:
        """Raises RuntimeError if the rank has ended."""
        try:
            self._connection.send(message)
        except OSError:
            self.answer()

    def answer(self) -> Any:
        """What the rank says next. Raises RuntimeError if that is an error."""
        kind, value = self._inbox.get()
        if kind == "error":
            raise RuntimeError(self.failure)
        return value

    def close(self) -> None:
        """End it."""
        self._closed.set()
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        """Thread: what it says, until it ends."""
        while True:
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                kind, value = "error", f"its process ended with code {self._process.wait()}; the log above says why"
            if kind == "error":
                self.failure = f"rank {self._rank}: {value}"
                self._failed.set()
            self._inbox.put((kind, value))
            if kind == "error":
                break
        if not self._closed.wait(GRACE):
            print(f"{self.failure}. The other ranks would wait for it for ever: ending.", file=sys.stderr, flush=True)
            os._exit(1)


def _python() -> str:
    """The interpreter. In Triton's stub, which embeds one, `sys.executable` may be anything."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    found = shutil.which(version) or shutil.which("python3")
    if not found:
        raise RuntimeError(f"The ranks of these engines run in processes of {version}, which is not on PATH: add its folder.")
    return found


def main(descriptor: int, shared: int, size: int, rank: int) -> int:
    """Serve one rank until the leader is gone."""
    from tensorrt_runner import TensorrtRunner

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with the thread that started it: of Triton's stub, the main one
    connection, place = Connection(descriptor), Results(shared, size)
    try:
        info, folder = connection.recv()
        runner = TensorrtRunner(info, Path(folder), rank)
        connection.send(("ready", None))
        runner.join(Path(connection.recv()))
        connection.send(("ready", None))
        while True:
            kind, arguments, answers = connection.recv()
            tensors = {name: value if isinstance(value, int) else torch.from_numpy(value) for name, value in arguments.items()}
            results = runner.run(Step(kind, tensors))
            connection.send(("done", place.put(results) if answers else []))
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"))
        signal.pause()  # the leader has to read that before it sees the process end
    return 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
