"""From steps to what a user sees: TTFT, TPOT and throughput of a closed loop.

`concurrency` requests are always in flight; each is prefilled once and decodes OSL tokens in s = OSL / acceptance steps.
So in a step B / s contexts arrive on average. Those that fall into one step share its fixed cost (it runs outside the
CUDA graph), hence (1 - exp(-B/s)) of it a step. A request never waits for its own prefill while decoding: (B - 1) / B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pipeline.planner.perf.step import accepted, decode_terms, draft_terms, prefill_terms
from pipeline.planner.perf.work import Array, Columns

__all__ = ["Served", "bare", "serve"]


class Served(NamedTuple):
    """Arrays [cases], seconds."""

    ttft: Array
    tpot: Array
    active: Array
    """Requests that run at once, over all ranks."""
    accepted: Array
    decode: dict[str, Array]
    """Terms of a decoding step."""
    prefill: dict[str, Array]
    """Terms of one context, alone."""
    rate: Array
    """Requests a second."""
    interference: Array
    """What contexts add to a step on average."""


def bare(cols: Columns, e: Mapping[str, Array]) -> Array:
    """TPOT of an instance that only decodes."""
    decode = _decode(cols, e, np.minimum(cols.concurrency, cols.slots))
    return sum(decode.values()) / accepted(cols, e)


def _decode(cols: Columns, e: Mapping[str, Array], batch: Array) -> dict[str, Array]:
    """Terms of a decoding step, halfway through the output."""
    return decode_terms(cols, e, batch, cols.isl + cols.osl / 2) | draft_terms(cols, e, batch)


def serve(cols: Columns, e: Mapping[str, Array]) -> Served:
    """Closed loop of an aggregated instance."""
    batch = np.minimum(cols.concurrency, cols.slots)
    gain = accepted(cols, e)
    decode = _decode(cols, e, batch)
    step = sum(decode.values())
    arrivals = batch * gain / cols.osl
    beside = batch * (1 + cols.mtp)
    context = prefill_terms(cols, e, cols.isl, cols.isl / 2, beside)
    work = sum(context.values())
    fixed = e["prefill_fixed_ms"] * 1e-3 * np.where(cols.piecewise, e["piecewise"], 1.0)
    others = np.maximum(batch - 1, 0) / np.maximum(batch, 1)
    together = cols.dp ** e["adp_share"]
    steps = np.maximum(1 - np.exp(-arrivals), arrivals * cols.isl / (cols.max_num_tokens * together))
    interference = others * (steps * fixed + arrivals * work / together)
    tpot = (step + interference) / gain
    chunks = np.ceil(cols.isl / cols.max_num_tokens)
    ttft = _first_token(cols, e, step, chunks * fixed + work, batch)
    rate = batch / (ttft + cols.osl * tpot)
    ttft = ttft + (cols.concurrency - batch) / rate
    return Served(ttft, tpot, batch, gain, decode, context, rate, interference)


def _first_token(cols: Columns, e: Mapping[str, Array], step: Array, prompt: Array, batch: Array) -> Array:
    """From sending to the first token: client, half a step, the prompts in front and one's own."""
    own = prompt * (1 + e["draft_first"] * (cols.mtp > 0))
    client = (e["client_ms"] + cols.waves * e["waves_ms"]) * 1e-3
    front = cols.waves * e["waves"] * (batch - 1) / cols.dp * prompt
    return client + step / 2 + cols.adp * e["balance_wait"] * 60 * step + front + own
