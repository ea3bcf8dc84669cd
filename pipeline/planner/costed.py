"""The plan's output is what was simulated: the emitted arguments, read back as the engine reads them, give the same setup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.planner.llm_args_file import read_llm_args
from pipeline.planner.setup import Setup

__all__ = ["COSTED", "require_costed"]

COSTED = (
    "layout", "mtp", "moe_backend", "max_batch_size", "max_num_tokens", "max_seq_len", "captured", "fraction", "kv_format",
    "chunked_prefill", "expert_slots", "block_reuse", "overlap",
)  # fmt: skip
"""What was simulated, as attributes of `Setup`."""


def require_costed(args: Mapping[str, Any], setup: Setup) -> Setup:
    """What is emitted must be what was simulated, read back as the engine reads it, which is returned.

    Raises:
        AssertionError: if not; that is a fault of the planner, never of the user.
    """
    read = read_llm_args(args, setup)
    odd = [name for name in COSTED if getattr(read.setup, name) != getattr(setup, name)]
    told = ", ".join(f"{name} {getattr(read.setup, name)} for {getattr(setup, name)}" for name in odd)
    assert not odd and not read.renamed, f"the emitted arguments are not those that were simulated: {told or read.renamed}"
    return read.setup
