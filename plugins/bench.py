"""A plugin's row in the benchmark: ours beside eager torch, torch.compile, every peer that loads, and the physical limit.

Each `plugins/NAME/bench.py` has `rows(bench)`, which yields the dictionaries of `Bench.row`; `scripts/bench_plugins.py` finds
them all. Times are medians of CUDA graph replays in microseconds; `cold` ones find nothing in the L2. A row's `loses` is by how
many per cent ours is behind the fastest of the others (`loses_to`), `loses_cold` the same of cold times, and `why` the reason
that the plugin's bench.py gives.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugins.nvrtc import Source
from plugins.timing import copy_bandwidth, graph_seconds

__all__ = ["Bench", "Call", "compiled", "differing", "micros", "reading_us", "relative"]

os.environ.setdefault("TRTLLM_ENABLE_PDL", "0")  # TensorRT-LLM's ops have dependent launch unless told; no other peer has

Call = Callable[[], Any]
IN_A_GRAPH, MOST_IN_A_GRAPH, GRAPH_US = 20, 100, 500
"""Calls at first and at most, and what they should take together: a graph takes 3 us to start."""
READ_BYTES = 2 << 30
READS = Source(Path(__file__).with_name("reads.cu"))
READ_FORMS = (256, 1), (512, 1), (1024, 1), (256, 4), (512, 2), (512, 7)
"""Threads of a CTA, and loads of each."""
LEAST_LOSS = 1.0
"""Per cent; less is not a loss, but what one run differs from the next."""


@dataclass
class Bench:
    """What the rows of one run share."""

    quick: bool
    noted: dict[str, list[str]] = field(default_factory=dict)
    """What did not run, or gave another answer -> at which sizes."""
    bandwidth: float = 0.0
    """Bytes a second of a large copy."""
    read_bandwidth: float = 0.0
    """Of finding the largest of many words, which reads alone."""
    flops: float = 0.0
    """A second, of a large BF16 product on random data."""
    floor_us: float = 0.0
    """An empty kernel in a graph."""

    def __post_init__(self) -> None:
        self.bandwidth = copy_bandwidth(700 << 20)
        words = torch.randint(0, 99, (READ_BYTES // 4,), device="cuda", dtype=torch.int32)
        self.read_bandwidth = READ_BYTES / graph_seconds([words.amax] * 2)
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.flops = 2 * 8192**3 / graph_seconds([lambda: a @ b] * 5, replays=10)

    def measure_floor(self) -> None:
        """Anew for each plugin: another's kernels on a second stream raise it (`timing.one_stream`)."""
        self.floor_us = micros(lambda: torch.cuda._sleep(0))

    @property
    def notes(self) -> list[str]:
        """A sentence for each thing that was noted."""
        return [f"{text} ({', '.join(sizes)})" if any(sizes) else text for text, sizes in sorted(self.noted.items())]

    def note(self, text: str, sizes: str = "") -> None:
        """Once for each text, however many sizes it is of."""
        self.noted.setdefault(text, []).append(sizes)

    def row(
        self,
        plugin: str,
        shape: dict[str, Any],
        ours: Callable[[bool], Any],
        *,
        error: Callable[[], float],
        eager: Call,
        peers: dict[str, Call],
        right: Callable[[Any], bool],
        moved: int,
        read: int = 0,
        flops: int = 0,
        compiled: Call | None = None,
        cold: bool = False,
        calls: int = IN_A_GRAPH,
        overlaps: bool = True,
        turns: int = 1,
        why: str = "",
    ) -> dict[str, Any]:
        """One row. `ours` takes whether to overlap with the kernel before; `error` is asked after it ran; `right` judges a peer.

        `turns`: so often is everything measured, one after the other, and the median taken: where power is the limit, the first
        would be favoured. `why`: kept in the row if ours loses.
        """
        about = _About(plugin, shape)
        ours(False)
        row: dict[str, Any] = {"plugin": plugin, **shape, "error": error()}
        running = {name: call for name, call in peers.items() if self._runs(about, name, call, right)}
        mine = {"ours": lambda: ours(False)} | ({"overlap": lambda: ours(True)} if overlaps else {})
        hot = self._times(about, mine | running, calls, turns)
        row |= {f"{name}_us": hot.pop(name) for name in mine}
        if cold:
            cooled = self._times(about, {"ours": mine["ours"]} | running, calls, turns, flush=True)
            row["cold_us"] = cooled.pop("ours")
        row["eager_us"] = micros(eager, calls=2)
        if compiled is not None and not self.quick:
            row |= {f"{name}_us": time for name, time in self._times(about, {"compile": compiled}, 2).items()}
        best = min(hot, key=hot.__getitem__, default=None)
        row |= {"peers": hot, "peer": best, "peer_us": hot.get(best)}
        if cold:
            row |= {"peers_cold": cooled, "peer_cold_us": min(cooled.values(), default=None)}
        return row | _losses(row, why) | {"floor_us": self.floor_us, "limit_us": round(self.limit_us(moved, flops, read), 2)}

    def limit_us(self, moved: int, flops: int = 0, read: int = 0) -> float:
        """An empty kernel, and the slower of the arithmetic and of the bytes: moved, or read from far more than the L2 holds."""
        return self.floor_us + max(moved / self.bandwidth + read / self.read_bandwidth, flops / self.flops) * 1e6

    def _runs(self, about: _About, name: str, call: Call, right: Callable[[Any], bool]) -> bool:
        """Whether a peer does; another answer than ours is noted, and its time counts."""

        def judged() -> bool:
            if not right(call()):
                self.note(f"{about.name}: {name} gives another answer", about.sizes)
            return True

        return bool(self._attempt(about, name, judged))

    def _times(self, about: _About, calls: Mapping[str, Call], count: int, turns: int = 1, flush: bool = False) -> dict[str, float]:
        """Of each call that can be captured, microseconds."""
        times: dict[str, list[float]] = {}
        for _ in range(turns):
            for name, call in calls.items():
                time = self._attempt(about, name, functools.partial(micros, call, count, flush))
                if time is not None:
                    times.setdefault(name, []).append(time)
        return {name: statistics.median(each) for name, each in times.items()}

    def _attempt(self, about: _About, name: str, call: Call) -> Any:
        """What the call returns, or None and a note of why it did not run."""
        try:
            return call()
        except Exception as error:  # any: whatever a peer lacks, the others' times are worth having
            reason = f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0][:140]}"
            self.note(f"{about.name}: {name} did not run: {reason}", about.sizes)
            return None


class _About:
    """A row in words: what it is of, and its sizes."""

    def __init__(self, plugin: str, shape: Mapping[str, Any]) -> None:
        self.name = " ".join([plugin, *(value for value in shape.values() if isinstance(value, str))])
        self.sizes = " x ".join(str(value) for value in shape.values() if not isinstance(value, str))


def _losses(row: Mapping[str, Any], why: str) -> dict[str, Any]:
    """By how much ours is behind, and why; nothing where it is not."""
    others = row["peers"] | {name: row[f"{name}_us"] for name in ("eager", "compile") if f"{name}_us" in row}
    fastest = min(others, key=others.__getitem__)
    lost: dict[str, Any] = {}
    if (behind := _behind(row["ours_us"], others[fastest])) >= LEAST_LOSS:
        lost |= {"loses": behind, "loses_to": fastest}
    if row.get("peer_cold_us") and (behind := _behind(row["cold_us"], row["peer_cold_us"])) >= LEAST_LOSS:
        lost["loses_cold"] = behind
    return lost | {"why": why} if lost and why else lost


def _behind(ours: float, other: float) -> float:
    return round((ours / other - 1) * 100, 1)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of a function for any sizes: compiled once for 1 and once for more, as that takes seconds."""
    return torch.compile(function, dynamic=True)


def micros(call: Call, calls: int = IN_A_GRAPH, flush: bool = False) -> float:
    """Microseconds of one call among several in a graph, whose own start is shared by them: short calls are measured among more."""
    if flush:  # what a flush takes is measured with a start of its own
        return round(graph_seconds([call] * calls, flush=True) * 1e6, 2)
    time = graph_seconds([call] * calls) * 1e6
    enough = min(MOST_IN_A_GRAPH, int(GRAPH_US / time))
    if enough > calls:
        time = graph_seconds([call] * enough) * 1e6
    return round(time, 2)


def reading_us(tensor: Tensor, flush: bool = False) -> float:
    """Microseconds that reading a tensor takes by itself, by the fastest of READ_FORMS."""
    out, count = tensor.new_empty(16, dtype=torch.uint8), tensor.nbytes // 16

    def form(threads: int, turns: int) -> Call:
        module, grid = READS.module(THREADS=threads, TURNS=turns), (-(-count // (threads * turns)), 1, 1)
        return lambda: module.launch("reads", grid, threads, tensor, out, count)

    return min(micros(form(*each), flush=flush) for each in READ_FORMS)


def differing(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Share of elements that are not the reference's, summed over the tensors."""
    pairs = zip(found, wanted, strict=True)
    return sum(float((one.float() != other.float()).float().mean()) for one, other in pairs)


def relative(found: Tensor | Sequence[Tensor], wanted: Tensor) -> float:
    """Relative L2 error of a tensor, or of the first of several."""
    first = found if isinstance(found, Tensor) else found[0]
    return float((first.double() - wanted.double()).norm() / wanted.double().norm())
