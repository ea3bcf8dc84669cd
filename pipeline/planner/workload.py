"""What will be asked, as requests: lengths, how many at once, and how much of a prompt the cache already holds.

A workload is a few numbers or a trace file; both become a list of `Request`s, and one simulation of the block-reusing cache
(whole blocks, least recently used sequence first out) answers how many prompt tokens are found in it. Under attention DP
each rank has a cache of its own: without routing by conversation the next turn meets its own rank once in `ranks` times.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pipeline.config.schema import WorkloadConfig
from pipeline.core.errors import ConfigError

__all__ = ["Demand", "Request", "demand_of", "hit_rate", "read_trace", "session_requests"]

ROUNDS = 3
"""Lives of a conversation that the model of sessions plays: the first fills the cache and does not count."""
SIMULATED = 20_000
"""Most requests that are played, quick enough for a plan; more conversations are played as fewer with a smaller cache."""
EXAMPLE = {"arrival": 0.0, "isl": 1024, "osl": 256, "session": "a"}
NOMINAL_TPOT = 0.05
"""Seconds a token, to tell how many requests of a trace overlap where slo.tpot_ms does not say it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    arrival: float
    """Seconds from the start."""
    isl: int
    osl: int
    session: str
    shared: int = 0
    """Tokens at the start that all sessions share."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload in numbers."""

    isl: int
    """Mean, rounded up; so is `osl`."""
    osl: int
    longest_prompt: int
    longest: int
    """Prompt and answer of the longest request."""
    concurrency: int | None
    requests: tuple[Request, ...]
    """What the reuse of the cache is played on; empty where no conversation has a second turn."""
    share: float = 1.0
    """Share of the conversations that `requests` has."""
    warm: int = 0
    """The first of `requests`, which only fill the cache."""


def demand_of(workload: WorkloadConfig, tpot_ms: float | None = None) -> Demand:
    """The numbers of `workload`; a trace's lengths replace its own.

    Raises:
        ConfigError: if the trace cannot be read, or the turns do not fit the mean prompt.
    """
    if workload.trace is not None:
        return _of_trace(read_trace(Path(workload.trace)), workload, (tpot_ms or 1e3 * NOMINAL_TPOT) / 1e3)
    alive = workload.sessions or workload.concurrency or 1
    played = max(1, min(alive, SIMULATED // (ROUNDS * workload.turns)))
    requests = session_requests(workload, played) if workload.turns > 1 or workload.system_tokens else ()
    prompt = max((item.isl for item in requests), default=workload.isl)
    return Demand(
        isl=workload.isl,
        osl=workload.osl,
        longest_prompt=prompt,
        longest=prompt + workload.osl,
        concurrency=workload.concurrency,
        requests=tuple(requests),
        share=played / alive,
        warm=played * workload.turns if requests else 0,
    )


def read_trace(file: Path) -> list[Request]:
    """The requests of a JSONL file, in order of arrival.

    Raises:
        ConfigError: naming the line that is wrong, or a file that is missing or empty.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload.trace={file} cannot be read ({error}): name a UTF-8 file of JSON lines.") from error
    requests = [_request(line, f"{file.name} line {number}", number) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"workload.trace={file} has no requests: one JSON object a line, with arrival, isl and osl.")
    return sorted(requests, key=lambda item: item.arrival)


def session_requests(workload: WorkloadConfig, sessions: int) -> list[Request]:
    """`sessions` conversations of `turns` requests whose prompts average `isl`: a system prompt, then per turn the new words
    and, from the earlier turns, words and answers. They overlap evenly, so that every stage of a conversation is present,
    and take their turns in an order that is shuffled but always the same."""
    turns, osl, system = workload.turns, workload.osl, workload.system_tokens
    spent = system + (turns - 1) / 2 * osl
    words = (workload.isl - spent) / ((turns + 1) / 2)
    if words < 1:
        raise ConfigError(
            f"workload.isl={workload.isl} cannot be the mean prompt of {turns} turns with {system} system tokens and answers "
            f"of {osl}: those alone average {spent:,.0f}; raise workload.isl, or lower workload.turns."
        )
    order, random = list(range(sessions)), Random(0)
    requests = []
    for step in range(ROUNDS * turns):
        random.shuffle(order)
        for session in order:
            life, turn = divmod(step + session, turns)
            prompt = round(system + (turn + 1) * words + turn * osl)
            requests.append(Request(float(step), prompt, osl, f"{life}-{session}", system))
    return requests


def hit_rate(
    requests: Iterable[Request], tokens: int, block: int, *, ranks: int = 1, by_session: bool = True, warm: int = 0
) -> float:
    """Share of the prompt tokens that are found in caches of `tokens` tokens on each of `ranks` ranks.

    `by_session`: a conversation always meets the same rank; else requests go round. Only whole blocks of `block` are found,
    and the first `warm` requests do not count.
    """
    caches: list[OrderedDict[str, int]] = [OrderedDict() for _ in range(ranks)]
    homes: dict[str, int] = {}
    held, found, asked = [0] * ranks, 0, 0
    for number, item in enumerate(requests):
        rank = homes.setdefault(item.session, len(homes) % ranks) if by_session else number % ranks
        cache = caches[rank]
        before = cache.pop(item.session, 0)
        known = max(before, item.shared if cache or before else 0)
        if number >= warm:
            found += min(known, item.isl - 1) // block * block
            asked += item.isl
        size = max(before, item.isl + item.osl)
        cache[item.session] = size
        held[rank] += size - before
        while held[rank] > tokens and cache:
            held[rank] -= cache.popitem(last=False)[1]
    return found / asked if asked else 0.0


def _of_trace(requests: Sequence[Request], workload: WorkloadConfig, tpot: float) -> Demand:
    mean = [math.ceil(sum(getattr(item, name) for item in requests) / len(requests)) for name in ("isl", "osl")]
    repeated = len({item.session for item in requests}) < len(requests)
    return Demand(
        isl=mean[0],
        osl=mean[1],
        longest_prompt=max(item.isl for item in requests),
        longest=max(item.isl + item.osl for item in requests),
        concurrency=workload.concurrency or _peak(requests, tpot),
        requests=tuple(requests[:SIMULATED]) if repeated else (),
    )


def _peak(requests: Sequence[Request], tpot: float) -> int:
    """Most requests in flight at once, if each takes `tpot` seconds a token."""
    events = [(item.arrival, 1) for item in requests] + [(item.arrival + item.osl * tpot, -1) for item in requests]
    running, most = 0, 1
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    return most


def _request(line: str, where: str, number: int) -> Request:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON ({error}): write one object a line.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no JSON object such as {json.dumps(EXAMPLE)}.")
    if unknown := sorted(row.keys() - {"arrival", "isl", "osl", "session"}):
        raise ConfigError(f"{where} has {unknown[0]}, which is not known: arrival, isl, osl and session are.")
    arrival = row.get("arrival", 0.0)
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < math.inf:
        raise ConfigError(f"{where}: arrival={arrival!r} must be seconds from 0 on.")
    lengths = [_length(row, name, where) for name in ("isl", "osl")]
    return Request(float(arrival), *lengths, str(row.get("session", f"line {number}")))


def _length(row: dict[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {name}={value!r} must be a whole number of tokens from 1 on.")
    return value
