"""What the engine takes beside weights and cache: formulas where its source gives them, constants where only starts do.

Formulas
    MoE all-to-all (NVLinkOneSided, attention DP on SM100 and later with CUTLASS or TRTLLM): the receive buffers of all
    `ep` ranks, ep x max_num_tokens x (4 x hidden + 8 x top_k + 16) bytes; 1,884,291,072 for EP8 and 8,192 tokens, logged
    as 1,884,291,456.
    DEEPGEMM: room for every token at every local expert, experts x m x (1 + 2) x hidden bytes and its scales, where m is
    the tokens of one chunk. Rows are those of all attention-DP ranks; more than twice the chunk limit (18,688 unless
    moe_config.max_num_tokens says otherwise) are cut into equal chunks (fused_moe_deepgemm.py). That is 42 GiB for TP8
    with 8,192 tokens and 10.5 GiB for ADP8+EP8: both measured within 0.3 GiB. It also keeps one scale a row, not a block.
    NCCL, one communicator of all ranks: a ring takes on each channel a receive FIFO for three protocols (4 MiB; 8 x 512 x 8 x
    16 bytes; 120 x 640 x 8 x 8 bytes), mapped as 10 MiB, and 2 MiB at the sender, the two sizes that NVIDIA/nccl issue 1685
    logs; 32 channels on Blackwell and 24 on Hopper, as its INFO lines say. NVLink SHARP (3 ranks or more in one domain)
    takes channels x 2 x 8 steps of 128 KiB for each rank: 24 channels on SM100, 16 on SM90 (src/transport/nvls.cc, src/init.cc).
    All-reduce: 8 MB (16 MB up to 2 ranks) a rank, once for pushing and three times for the one-shot kernel (plugin.py
    CustomAllReduceHelper), kept under attention DP, too (modeling_deepseekv3.py); an instance that spans nodes of one NVLink
    domain has 3 x 2 buffers of MNNVL, 12 MB rounded up to whole rows (distributed/ops.py).
    WIDEEP (MnnvlMoe): from each rank as many FIFOs of 8 x 256 KiB as half of the SMs serve (moeCommKernels.h).
    Activations: a peak a token, an estimate from their sizes; no start with few tokens was published.

Constants (`memory_terms.json`, fitted by scripts/calibrate_memory.py): what a start takes beyond all that. They were
measured on SM100 only; other chips are assumed alike, and the plan says so. MTP takes its layer, copies and cache, which are
counted; a constant for it fits -0.06 GiB, so there is none.
"""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.planner.setup import Setup

__all__ = ["ACTIVATION_BYTES", "RING_CHANNEL", "Amount", "engine_bytes", "features", "formulas", "graph_count", "terms"]

Amount = float | NDArray[np.float64]
"""A number, or one for each of several limits."""

ACTIVATION_BYTES = 71
"""Peak activation bytes a token and hidden unit. Estimate: with the fitted base it gives what 8,192 tokens take."""
DEEPGEMM_CHUNK = 18_688
"""Tokens of one MoE chunk of DEEPGEMM by default."""
ALL_TO_ALL = ("CUTLASS", "TRTLLM")
"""Backends that exchange tokens with NVLinkOneSided on SM100 and later; DEEPGEMM and CUTEDSL gather them."""
FP4_SPREAD = 8
"""EP from which FP4 experts were seen to take more: TP8+EP8 did, TP4+EP4 and TP8+EP1 did not."""
MIB = 2**20
RING_CHANNEL = (10 + 2) * MIB
"""One channel of an NCCL ring: the receiver's FIFOs and what the sender keeps, in pages of 2 MiB."""
RING_CHANNELS = {90: 24}
"""Collective channels of NCCL by SM where they are not Blackwell's 32."""
NVLS_CHANNELS = {90: 16}
"""Of NVLink SHARP, where they are not the 24 of SM100."""
NVLS_STEPS = 2 * 8 * 128 * 1024
"""Bytes of one channel and rank: a buffer to reduce and one to broadcast."""
SMS = {90: 132}
"""Streaming multiprocessors, where they are not B200's 148."""
LONG_PREFILL = 8_320
"""Tokens above which piecewise graphs were seen to take more."""


@cache
def terms() -> dict[str, float]:
    """Fitted bytes by term."""
    table: dict[str, Any] = json.loads(files("pipeline.planner").joinpath("memory_terms.json").read_text(encoding="utf-8"))
    return {name: float(row["bytes"]) for name, row in table["terms"].items()}


def engine_bytes(setup: Setup, *, tokens: Amount | None = None, captured: Amount | None = None) -> dict[str, Amount]:
    """Bytes of one rank by cause; `tokens` (max_num_tokens) and `captured` (largest graph) may be arrays."""
    tokens = setup.max_num_tokens if tokens is None else tokens
    counts = features(setup, tokens, setup.captured if captured is None else captured)
    fitted = {name: terms()[name] * count for name, count in counts.items()}
    named = {
        "runtime": sum(fitted[name] for name in ("base", "deepgemm", "fp4_spread", "line_1_3")),
        "CUDA graphs": sum(fitted[name] for name in ("graph", "piecewise", "piecewise_long")),
    }
    return named | formulas(setup, tokens)


def features(setup: Setup, tokens: Amount, captured: Amount) -> dict[str, Amount]:
    """How often each fitted term counts."""
    spread = setup.formats.get("routed_experts") == "nvfp4" and setup.layout.ep >= FP4_SPREAD
    return {
        "base": 1.0,
        "graph": graph_count(captured),
        "piecewise": float(setup.piecewise),
        "piecewise_long": setup.piecewise * np.greater(tokens, LONG_PREFILL).astype(float),
        "deepgemm": float(setup.moe_backend == "DEEPGEMM"),
        "fp4_spread": float(spread),
        "line_1_3": float(setup.line >= (1, 3)),
    }


def formulas(setup: Setup, tokens: Amount) -> dict[str, Amount]:
    """Bytes that follow from the engine's source."""
    arch, layout = setup.arch, setup.layout
    parts: dict[str, Amount] = {"activations": ACTIVATION_BYTES * arch.hidden_size * tokens}
    if layout.attention_dp and layout.ep > 1 and setup.moe_backend in ALL_TO_ALL and (setup.hw.sm or 0) >= 100:
        parts["MoE all-to-all"] = layout.ep * tokens * (4 * arch.hidden_size + 8 * arch.num_experts_per_tok + 16)
    if layout.ep > 1 and setup.moe_backend == "WIDEEP":
        channels = max(1, SMS.get(setup.hw.sm or 0, 148) // 2 // (2 * math.ceil(layout.ep / 8)))
        parts["MoE all-to-all"] = float(layout.ep * channels * 8 * 256 * 1024)
    if setup.moe_backend == "DEEPGEMM":
        parts["DEEPGEMM workspace"] = _deepgemm(setup, tokens)
    return parts | _collectives(setup)


def _collectives(setup: Setup) -> dict[str, Amount]:
    """Buffers that NCCL and the engine's own all-reduce keep; none for one GPU."""
    ranks, sm = setup.layout.tp, setup.hw.sm or 0
    if ranks == 1:
        return {}
    parts: dict[str, Amount] = {"NCCL rings": float(RING_CHANNELS.get(sm, 32) * RING_CHANNEL)}
    switched = min(ranks, setup.hw.nvlink_domain)
    if switched > 2:
        parts["NCCL NVLink SHARP"] = float(NVLS_CHANNELS.get(sm, 24) * NVLS_STEPS * switched)
    parts["all-reduce"] = float((1 + 3) * ranks * (16_000_000 if ranks <= 2 else 8_000_000))
    if setup.hw.num_devices < ranks <= setup.hw.nvlink_domain:
        parts["all-reduce"] += 4 * 286_720 * 3 * 2 * 2  # 12 MB in rows that all hidden sizes divide, BF16
    return parts


def graph_count(largest: Amount) -> Amount:
    """CUDA graphs captured up to `largest` with padding: 1, 2, 4, then every 8 to 128, then every 64, and `largest`."""
    b = np.asarray(largest, dtype=np.float64)
    small = np.minimum(b, 128)
    count = (b >= 1) * 1.0 + (b >= 2) + (b >= 4) + small // 8 + (b > 128) * ((b - 128) // 64)
    listed = np.where(b > 128, (b - 128) % 64 == 0, (b % 8 == 0) | (b == 1) | (b == 2) | (b == 4))
    return count + ~listed


def _deepgemm(setup: Setup, tokens: Amount) -> Amount:
    arch, layout = setup.arch, setup.layout
    rows = tokens * layout.cache_ranks
    limit = setup.moe_max_num_tokens or DEEPGEMM_CHUNK
    chunks = np.where(np.greater(rows, 2 * limit), np.ceil(np.divide(rows, limit)), 1.0)
    chunk = np.ceil(rows / chunks / 128) * 128
    experts = -(-arch.n_routed_experts // layout.ep)
    inter = arch.moe_intermediate_size // layout.moe_tp
    fp8 = max(arch.hidden_size, inter)
    scales = 4 * math.ceil(math.ceil(fp8 / 128) / 4)
    return experts * chunk * (fp8 + 2 * max(arch.hidden_size, 2 * inter) + scales)
