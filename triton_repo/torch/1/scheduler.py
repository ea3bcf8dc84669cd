"""Continuous batching over the slots and KV pages of one compiled engine.

One thread owns the engine. Each of its iterations

  1. drops what was cancelled, then admits waiting requests in order of arrival while a slot and enough pages are free;
  2. prefills one chunk of the oldest prompt that is not finished, or of as many as the engine has ranks to do it side by side;
  3. decodes one token for every sequence whose prompt is finished.

So a long prompt delays the others by one chunk at a time, and a decoding sequence never waits for a whole prompt.
Pages for prompt + max_tokens are reserved at admission: an admitted sequence runs to its end, nothing is evicted.
The head of the queue is never overtaken, so a large request cannot starve. Page 0 is the engine's scratch page.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from sampler import Sampling, sample
from torch import Tensor

__all__ = ["Engine", "FinishEvent", "Limits", "QueueFullError", "Request", "Scheduler", "Stats", "TokenEvent"]


class Engine(Protocol):
    """What the scheduler needs of `runtime.CompiledEngine`."""

    info: dict[str, Any]

    def step(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        """Write the tokens at their positions through the page table; logits of each row's last position."""

    def speculate(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Where info["drafts"]: drafts [B] of what follows a row's token, and logits [B, 2, V] behind the token and the draft."""


class QueueFullError(RuntimeError):
    """As many requests wait as may wait."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One more token. EOS is not delivered; it ends the sequence."""

    token: int


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a request. `reason`: stop, length, cancelled or error (then `error` says what)."""

    reason: str
    error: str = ""


@dataclass(slots=True)
class Request:
    """One prompt. `on_event` runs on the engine's thread; returning True for a token ends the sequence (stop word).
    It must not raise for a FinishEvent."""

    id: int
    prompt: list[int]
    max_tokens: int
    on_event: Callable[[TokenEvent | FinishEvent], bool | None]
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine was compiled for, and how many requests may wait."""

    max_batch_size: int
    max_seq_len: int
    page_size: int
    num_pages: int
    prefill_chunk: int
    max_queue: int
    prefill_rows: int = 1
    """Prompts of one prefill step."""

    @classmethod
    def of(cls, info: dict[str, Any], max_queue: int) -> Limits:
        """Limits of the engine that `info` (engine.json) describes."""
        names = ("max_batch_size", "max_seq_len", "page_size", "num_pages", "prefill_chunk")
        rows = int(info.get("prefill_rows", 1))
        return cls(**{name: int(info[name]) for name in names}, max_queue=max_queue, prefill_rows=rows)

    def pages_for(self, request: Request) -> int:
        """Pages that hold prompt and output of `request`."""
        return -(-(len(request.prompt) + request.max_tokens) // self.page_size)

    def refuse(self, request: Request) -> str | None:
        """Why this request can never run, as a sentence; None if it can."""
        length, need, have = len(request.prompt), self.pages_for(request), self.num_pages - 1
        if not request.prompt:
            return "the prompt has no tokens; send at least one character"
        if request.max_tokens < 1:
            return f"max_tokens={request.max_tokens} is too small; it must be at least 1"
        if length + request.max_tokens > self.max_seq_len:
            return (
                f"the prompt has {length} tokens and max_tokens={request.max_tokens}: together "
                f"{length + request.max_tokens}, above the engine's max_seq_len of {self.max_seq_len}; "
                "shorten the prompt or lower max_tokens"
            )
        if need > have:
            return f"prompt and max_tokens need {need} KV pages, but the engine has {have}; lower max_tokens"
        return None


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot for the metrics."""

    running: int
    waiting: int
    pages_used: int
    tokens: int
    """Tokens generated since the start."""
    drafted: int = 0
    """Tokens drafted by the MTP layer since the start, of greedy requests."""
    accepted: int = 0
    """Those of them that the model chose, too."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request in a slot."""

    request: Request
    pages: list[int]
    done: int = 0
    """Tokens whose keys and values are in the cache."""
    last: int = -1
    """Newest token, not in the cache yet."""
    generated: int = 0


class Scheduler:
    """Runs requests on one engine. `submit`, `cancel` and `stats` may be called from any thread."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self._free_pages = list(range(limits.num_pages - 1, 0, -1))
        self._waiting: deque[Request] = deque()
        self._active: list[_Sequence] = []
        self._cancelled: set[int] = set()
        self._tokens = self._drafted = self._accepted = 0
        self._closed = ""
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None

    # --- any thread -------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never run, QueueFullError or RuntimeError if it cannot now."""
        if reason := self.limits.refuse(request):
            raise ValueError(reason)
        with self._work:
            if self._closed:
                raise RuntimeError(self._closed)
            # Guard: a request that a free slot takes in the next iteration does not wait.
            waiting = len(self._waiting) - (self.limits.max_batch_size - len(self._active))
            if waiting >= self.limits.max_queue:
                raise QueueFullError(
                    f"{waiting} requests wait already, of at most serve.max_queue={self.limits.max_queue}; "
                    "try again later"
                )
            self._waiting.append(request)
            self._work.notify()

    def cancel(self, request_id: int) -> None:
        """End a request before the next step; unknown and finished ids are ignored."""
        with self._work:
            self._cancelled.add(request_id)
            self._work.notify()

    def stats(self) -> Stats:
        """How full the engine is."""
        with self._work:
            used = self.limits.num_pages - 1 - len(self._free_pages)
            return Stats(len(self._active), len(self._waiting), used, self._tokens, self._drafted, self._accepted)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all requests with an error and join the thread."""
        with self._work:
            self._closed = self._closed or "the server is stopping"
            self._work.notify()
        if self._thread:
            self._thread.join()
        self._fail_all(self._closed)

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._closed or self._active or self._waiting)
                if self._closed:
                    return
            try:
                self.iterate()
            except Exception as error:
                traceback.print_exc()
                self._close(f"the engine failed ({type(error).__name__}: {error}); restart the server")

    def iterate(self) -> None:
        """One round: cancel, admit, one prefill step, one decode step."""
        self._drop_cancelled()
        self._admit()
        decoding = [sequence for sequence in self._active if sequence.last >= 0]
        if prefilling := [sequence for sequence in self._active if sequence.last < 0]:
            self._prefill(prefilling[: self.limits.prefill_rows])
        if decoding:
            self._decode(decoding)

    def _drop_cancelled(self) -> None:
        with self._work:
            cancelled, self._cancelled = self._cancelled, set()
            dropped = [request for request in self._waiting if request.id in cancelled]
            self._waiting = deque(request for request in self._waiting if request.id not in cancelled)
        for request in dropped:
            request.on_event(FinishEvent("cancelled"))
        for sequence in [sequence for sequence in self._active if sequence.request.id in cancelled]:
            self._finish(sequence, FinishEvent("cancelled"))

    def _admit(self) -> None:
        with self._work:
            while self._waiting and len(self._active) < self.limits.max_batch_size:
                need = self.limits.pages_for(self._waiting[0])
                if need > len(self._free_pages):
                    return
                pages = [self._free_pages.pop() for _ in range(need)]
                self._active.append(_Sequence(self._waiting.popleft(), pages))

    def _prefill(self, sequences: list[_Sequence]) -> None:
        chunks = [each.request.prompt[each.done :][: self.limits.prefill_chunk] for each in sequences]
        logits = self._step(sequences, chunks)
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.done += len(chunk)
        ended = [row for row, sequence in enumerate(sequences) if sequence.done == len(sequence.request.prompt)]
        if ended:
            self._accept([sequences[row] for row in ended], logits[ended])

    def _decode(self, sequences: list[_Sequence]) -> None:
        tokens = [[sequence.last] for sequence in sequences]
        if self.engine.info.get("drafts"):
            self._decode_drafted(sequences, tokens)
            return
        logits = self._step(sequences, tokens)
        for sequence in sequences:
            sequence.done += 1
        self._accept(sequences, logits)

    def _decode_drafted(self, sequences: list[_Sequence], tokens: list[list[int]]) -> None:
        """The next token of every sequence, and where a greedy one's was drafted, the one after it: the same as without drafts."""
        drafts, logits = self.engine.speculate(*self._inputs(sequences, tokens))
        for sequence in sequences:
            sequence.done += 1
        self._accept(sequences, logits[:, 0])
        greedy = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.greedy]
        right = [row for row in greedy if sequences[row].last == int(drafts[row])]
        with self._work:
            self._drafted, self._accepted = self._drafted + len(greedy), self._accepted + len(right)
        going = [row for row in right if sequences[row] in self._active]
        for row in going:
            sequences[row].done += 1
        if going:
            self._accept([sequences[row] for row in going], logits[going, 1])

    def _step(self, sequences: list[_Sequence], tokens: list[list[int]]) -> Tensor:
        return self.engine.step(*self._inputs(sequences, tokens))

    def _inputs(self, sequences: list[_Sequence], tokens: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and positions, padded on the left (position -1); the page table is as wide as the longest row needs now."""
        length, pairs = max(map(len, tokens)), list(zip(sequences, tokens, strict=True))
        width = max(-(-(sequence.done + len(row)) // self.limits.page_size) for sequence, row in pairs)
        padded = [[0] * (length - len(row)) + row for row in tokens]
        positions = [
            [-1] * (length - len(row)) + list(range(sequence.done, sequence.done + len(row))) for sequence, row in pairs
        ]
        pages = [(sequence.pages + [0] * width)[:width] for sequence in sequences]
        return torch.tensor(padded), torch.tensor(positions), torch.tensor(pages)

    def _accept(self, sequences: list[_Sequence], logits: Tensor) -> None:
        for sequence, token in zip(sequences, sample(logits, [s.request.sampling for s in sequences]), strict=True):
            sequence.last = token
            if token in sequence.request.eos:
                self._finish(sequence, FinishEvent("stop"))
                continue
            sequence.generated += 1
            with self._work:
                self._tokens += 1
            if end := self._deliver(sequence, token):
                self._finish(sequence, end)

    def _deliver(self, sequence: _Sequence, token: int) -> FinishEvent | None:
        """Hand a token over; how the sequence ends, if it ends with it. A listener that raises ends its own request."""
        try:
            if sequence.request.on_event(TokenEvent(token)):
                return FinishEvent("stop")
        except Exception as error:
            return FinishEvent("error", f"{type(error).__name__}: {error}")
        return FinishEvent("length") if sequence.generated >= sequence.request.max_tokens else None

    def _finish(self, sequence: _Sequence, event: FinishEvent) -> None:
        with self._work:
            self._active.remove(sequence)
            self._free_pages.extend(reversed(sequence.pages))
        sequence.request.on_event(event)

    def _close(self, reason: str) -> None:
        with self._work:
            self._closed = reason
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        with self._work:
            waiting, self._waiting = self._waiting, deque()
        for sequence in list(self._active):
            self._finish(sequence, FinishEvent("error", reason))
        for request in waiting:
            request.on_event(FinishEvent("error", reason))
