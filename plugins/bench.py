"""A plugin's row in the benchmark: ours beside eager torch, torch.compile, every peer that loads, and the physical limit.

Each `plugins/NAME/bench.py` has `rows(bench)`, which yields the dictionaries of `Bench.row`; `scripts/bench_plugins.py` finds
them all. Times are medians of CUDA graph replays in microseconds; `cold` ones find nothing in the L2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plugins.timing import copy_bandwidth, graph_seconds

__all__ = ["Bench", "Call", "differing", "micros", "relative"]

Call = Callable[[], Any]
IN_A_GRAPH = 20
READ_BYTES = 2 << 30
COMPILED_TOKENS = (1, 256, 4096)
"""Batches at which torch.compile is measured: it takes seconds each."""
FAILURES = (RuntimeError, AttributeError, ImportError, ValueError, TypeError, NotImplementedError, AssertionError)


@dataclass
class Bench:
    """What the rows of one run share."""

    quick: bool
    notes: list[str] = field(default_factory=list)
    """Peers that did not run, or gave another answer."""
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
        self.floor_us = micros(lambda: torch.cuda._sleep(0))

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
    ) -> dict[str, Any]:
        """One row. `ours` takes whether to overlap with the kernel before; `error` is asked after it ran; `right` judges a peer."""
        ours(False)
        row: dict[str, Any] = {"plugin": plugin, **shape, "error": error(), "ours_us": micros(lambda: ours(False), calls)}
        if overlaps:
            row["overlap_us"] = micros(lambda: ours(True), calls)
        if cold:
            row["cold_us"] = micros(lambda: ours(False), calls, flush=True)
        row["eager_us"] = micros(eager, calls=2)
        if compiled is not None and not self.quick and shape["tokens"] in COMPILED_TOKENS:
            row["compile_us"] = self.attempt(f"{plugin}: torch.compile", lambda: micros(compiled, calls=2))
        row |= self.peers(f"{plugin} {' '.join(map(str, shape.values()))}", peers, right, cold, calls)
        return row | {"floor_us": self.floor_us, "limit_us": round(self.limit_us(moved, flops, read), 2)}

    def limit_us(self, moved: int, flops: int = 0, read: int = 0) -> float:
        """An empty kernel, and the slower of the arithmetic and of the bytes: moved, or read from far more than the L2 holds."""
        return self.floor_us + max(moved / self.bandwidth + read / self.read_bandwidth, flops / self.flops) * 1e6

    def peers(self, where: str, calls: dict[str, Call], right: Callable[[Any], bool], cold: bool, count: int) -> dict[str, Any]:
        """Times of the peers that run, and the best; the others leave a note."""
        times, cold_times = {}, {}
        for name, call in calls.items():

            def timed(name: str = name, call: Call = call) -> None:
                if not right(call()):
                    self.notes.append(f"{where}: {name} gives another answer")
                times[name] = micros(call, count)
                if cold:
                    cold_times[name] = micros(call, count, flush=True)

            self.attempt(f"{where}: {name}", timed)
        best = min(times, key=times.get, default=None)
        row = {"peers": times, "peer": best, "peer_us": times.get(best)}
        return row | ({"peers_cold": cold_times, "peer_cold_us": min(cold_times.values(), default=None)} if cold else {})

    def attempt(self, what: str, call: Call) -> Any:
        """What the call returns, or None and a note of why it did not run."""
        try:
            return call()
        except FAILURES as error:
            self.notes.append(f"{what} did not run: {type(error).__name__} {(str(error).strip().splitlines() or [''])[0][:140]}")
            return None


def micros(call: Call, calls: int = IN_A_GRAPH, flush: bool = False) -> float:
    """Microseconds of one call among several in a graph."""
    return round(graph_seconds([call] * calls, flush=flush) * 1e6, 2)


def differing(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Share of elements that are not the reference's, summed over the tensors."""
    pairs = zip(found, wanted, strict=True)
    return sum(float((one.float() != other.float()).float().mean()) for one, other in pairs)


def relative(found: Tensor | Sequence[Tensor], wanted: Tensor) -> float:
    """Relative L2 error of a tensor, or of the first of several."""
    first = found if isinstance(found, Tensor) else found[0]
    return float((first.double() - wanted.double()).norm() / wanted.double().norm())
