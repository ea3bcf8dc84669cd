"""What the public benchmark scripts set and the public rows do not say.

InferenceX runs TensorRT-LLM through scripts that choose the MoE backend, the token limit and, until late 2025, expert
parallelism and attention DP from concurrency and lengths; the rows of that time say EP 1 and no attention DP whatever ran.
Read from SemiAnalysisAI/InferenceX benchmarks/dsr1_{fp4_b200,fp8_b200,fp8_h200}_trt{,_mtp}{,_slurm}.sh @111f0312, @2e46dba0,
@13dd0c2a, @40be3a4b, and for November 2025 from the copies in faradawn/InferenceMAX @9596d23d and austenstone/InferenceMAX
@35bc387f. Nothing here looks at a measured time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NOVEMBER", "Recipe", "piecewise", "recipe"]

NOVEMBER = "2025-11"
"""Stands in for the engine version of rows that have none."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of one InferenceX run."""

    ep: int
    attention_dp: bool
    mtp: int
    moe_backend: str
    max_num_tokens: int
    piecewise_graphs: bool = False


def recipe(row: Mapping[str, Any], engine: str, tp: int, ep: int, adp: bool) -> Recipe:
    """The run behind an InferenceX row of TensorRT-LLM; tp, ep and adp are what the row itself says."""
    hw, precision = str(row["hw"]), str(row["precision"])
    lengths, concurrency = (int(row["isl"]), int(row["osl"])), int(row["concurrency"])
    if engine == NOVEMBER:
        ep, adp = _november(hw, precision, lengths, concurrency, tp)
    mtp = _mtp(row, adp, concurrency)
    new = engine.startswith("1.2")
    batch = concurrency // tp if adp and mtp else concurrency
    limit = math.ceil(((mtp + 1 if mtp else 1) * batch + lengths[0] + 64) / 64) * 64
    graphs = new and piecewise(precision, adp, lengths, concurrency)
    return Recipe(ep, adp, mtp, _backend(hw, precision, engine, adp), max(limit, 8192) if new else limit, graphs)


def piecewise(precision: str, adp: bool, lengths: tuple[int, int], concurrency: int) -> bool:
    """Whether the scripts of 2026, and runs that follow them, capture steps with context in piecewise CUDA graphs."""
    return precision == "fp8" and not adp and concurrency >= (128 if lengths == (1024, 8192) else 64)


def _november(hw: str, precision: str, lengths: tuple[int, int], concurrency: int, tp: int) -> tuple[int, bool]:
    """Expert ranks and attention DP as the scripts of November 2025 chose them."""
    long_prompt = lengths == (8192, 1024)
    if precision == "fp8":
        return tp, hw == "H200" and concurrency > (32 if long_prompt else 64)
    spread = 32 if tp == 4 or long_prompt else 16 if lengths == (1024, 8192) else 8
    return tp if concurrency > spread else 1, concurrency > 32 if long_prompt else concurrency >= 256


def _mtp(row: Mapping[str, Any], adp: bool, concurrency: int) -> int:
    """Draft tokens: 3, or 1 under attention DP. On B200 image 1.2.0rc6.post3 is the MTP one; of 1.1.0rc2 the runs of
    2026-01-14 are, and later ones where only the MTP search space has attention DP at that concurrency."""
    guess = str(row.get("spec_decoding_guess") or "")
    later = guess.startswith("ambiguous") and (str(row.get("measured")) == "2026-01-14" or (adp and concurrency >= 128))
    return (1 if adp else 3) if guess.startswith("mtp") or later else 0


def _backend(hw: str, precision: str, engine: str, adp: bool) -> str:
    if hw.startswith("H"):
        return "CUTLASS"
    if precision == "fp4":
        return "CUTLASS" if adp else "TRTLLM"
    return "DEEPGEMM" if adp or engine.startswith("1.1") else "TRTLLM"
