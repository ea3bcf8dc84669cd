"""Prefill and decode on instances of their own, combined by how many of each.

A prefill instance fills steps of max_num_tokens on every rank with whole prompts. A decode instance never sees a prompt,
so its TPOT is a bare step. In balance the requests that decode plus those that are being prefilled or moved are the
concurrency; the rate is what the slower side delivers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeline.core.errors import ConfigError
from pipeline.planner.perf.calibration import Calibration, shipped
from pipeline.planner.perf.case import PerfCase
from pipeline.planner.perf.interval import Z80, deviation
from pipeline.planner.perf.serve import bare
from pipeline.planner.perf.step import SWITCHES, prefill_terms
from pipeline.planner.perf.work import Array, columns

__all__ = ["Disaggregated", "PrefillRate", "decode_only", "disaggregate", "prefill_rate"]

SATURATED = 0.9
"""Share of the prefill instances' capacity that can be used before prompts queue without bound."""


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """One prefill instance that always has prompts."""

    prompts_per_second: float
    latency_ms: float
    """Of one step, in which every rank finishes max(1, max_num_tokens // isl) prompts."""


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """All instances together; fields as in `Prediction`."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_user: float
    tokens_per_gpu: float
    active: float
    """Requests that decode, over all decode instances."""
    interval: tuple[float, float]
    bound: str
    """Which side limits the rate: prefill, decode or concurrency."""


def prefill_rate(case: PerfCase, calibration: Calibration | None = None) -> PrefillRate:
    """Rate of one prefill instance; `case.concurrency` plays no part."""
    calibration = calibration or shipped()
    cols, e = columns([case], SWITCHES), calibration.arrays([case])
    prompts = max(1, int(case.max_num_tokens // case.isl))
    nothing = np.zeros(1)
    terms = prefill_terms(cols, e, prompts * cols.isl, cols.isl / 2, nothing, cols.dp)
    step = float((sum(terms.values()) + e["prefill_fixed_ms"] * 1e-3)[0])
    return PrefillRate(prompts * float(cols.dp[0]) / step, step * 1e3)


def decode_only(case: PerfCase, batch: Array, calibration: Calibration | None = None) -> Array:
    """TPOT in ms of a decode instance at several batches (over all its ranks); no prompt interferes."""
    cases = [replace(case, concurrency=float(value)) for value in batch]
    return bare(columns(cases, SWITCHES), (calibration or shipped()).arrays(cases)) * 1e3


def disaggregate(
    prefill: PerfCase, decode: PerfCase, counts: tuple[int, int], concurrency: float, calibration: Calibration | None = None
) -> Disaggregated:
    """`counts` prefill and decode instances under a closed loop. ConfigError for different workloads or no instance."""
    calibration = calibration or shipped()
    if min(counts) < 1 or (prefill.isl, prefill.osl) != (decode.isl, decode.osl):
        raise ConfigError(
            f"{counts[0]} prefill and {counts[1]} decode instances for {prefill.isl}/{prefill.osl} and {decode.isl}/{decode.osl} "
            f"tokens: give at least one of each and the same lengths to both."
        )
    before = prefill_rate(prefill, calibration)
    capacity = counts[0] * before.prompts_per_second * SATURATED
    slots = float(columns([decode], SWITCHES).slots[0])
    moved = decode.isl * decode.arch.latent_dim * decode.arch.num_hidden_layers * (2 if decode.kv_format == "bf16" else 1)
    wait = before.latency_ms * 1.5 + moved / decode.machine.scale_out * 1e3
    batches = np.unique(np.geomspace(1, max(1.0, min(slots, concurrency / counts[1])), 64))
    tpot = decode_only(decode, batches, calibration)
    rate = counts[1] * batches / (decode.osl * tpot / 1e3)
    inside = counts[1] * batches + rate * wait / 1e3
    fits = (rate <= capacity) & (inside <= concurrency)
    best = int(np.flatnonzero(fits)[-1]) if fits.any() else 0
    bound = "decode" if best == len(batches) - 1 and batches[-1] >= slots * 0.99 else "concurrency"
    if best + 1 < len(batches) and rate[best + 1] > capacity:
        bound = "prefill"
    served = min(float(rate[best]), capacity)
    held = counts[1] * float(batches[best])
    ttft = wait + max(0.0, concurrency - held - served * wait / 1e3) / served * 1e3
    spread = float(np.exp(Z80 * deviation(calibration, [replace(decode, concurrency=float(batches[best]))])[0]))
    gpus = counts[0] * prefill.tp + counts[1] * decode.tp
    time = float(tpot[best])
    return Disaggregated(ttft, time, 1e3 / time, served * decode.osl / gpus, held, (time / spread, time * spread), bound)
