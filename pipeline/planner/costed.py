"""The plan's output is what was simulated: the emitted arguments, read back as the engine reads them, give the same setup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.fields import shown
from pipeline.planner.llm_args_file import read_llm_args
from pipeline.planner.setup import Setup

__all__ = ["COSTED", "require_costed", "uncosted"]

COSTED = {
    "layout": "parallel.*",
    "mtp": "engine.trtllm.mtp",
    "moe_backend": "engine.trtllm.moe_backend",
    "max_batch_size": "workload.concurrency",
    "max_num_tokens": "workload.isl or workload.chunked_prefill",
    "max_seq_len": "workload.isl and workload.osl",
    "captured": "engine.trtllm.cuda_graphs",
    "fraction": "engine.trtllm.free_gpu_memory_fraction",
    "kv_format": "quant.kv_dtype",
    "chunked_prefill": "workload.chunked_prefill",
    "expert_slots": "engine.trtllm.expert_slots",
    "block_reuse": "engine.trtllm.block_reuse",
    "overlap": "",
}
"""What was simulated, as attributes of `Setup` -> the setting that decides it."""
OF_RANKS = ("context_parallel_size", "moe_tensor_parallel_size", "moe_cluster_parallel_size", "cp_config", "gpus_per_node")
"""Arguments that change which ranks there are, or what they share."""
WITHOUT_COST = (
    "print_iter_log", "trust_remote_code", "revision", "model_kwargs", "tokenizer", "custom_tokenizer", "enable_iter_perf_stats",
    "enable_iter_req_stats", "return_perf_metrics", "stream_interval", "attention_dp_config", "cache_transceiver_config",
    "num_postprocess_workers", "reasoning_parser", "backend",
)  # fmt: skip
"""Arguments, or sections, that no prediction has to know."""


def require_costed(args: Mapping[str, Any], setup: Setup, own: Mapping[str, Any] | None = None) -> Setup:
    """What is emitted must be what was simulated, read back as the engine reads it, which is returned; `own` are the user's.

    Raises:
        ConfigError: if the user's own arguments change it.
        AssertionError: if it is changed without them; that is a fault of the planner.
    """
    read = read_llm_args(args, setup)
    odd = {name: (getattr(read.setup, name), getattr(setup, name)) for name in COSTED}
    changed = [_refusal(name, *values) for name, values in odd.items() if values[0] != values[1]]
    changed += [f"engine.trtllm.args.{name} is decided by parallel.*: leave it out." for name in OF_RANKS if name in (own or {})]
    if changed and own:
        raise ConfigError("\n".join(changed))
    assert not changed and not read.renamed, f"the emitted arguments are not those that were simulated: {changed or read.renamed}"
    return read.setup


def uncosted(own: Mapping[str, Any]) -> Iterator[str]:
    """One note on the user's own arguments that predictions do not know."""
    names = [name for name in _leaves(own) if name.split(".")[0] not in WITHOUT_COST]
    if names:
        them, are = ("them", "are") if len(names) > 1 else ("it", "is")
        yield f"engine.trtllm.args: {', '.join(names)} {are} handed on as given; limits and speed are predicted without {them}."


def _leaves(args: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in args.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _refusal(name: str, changed: Any, simulated: Any) -> str:
    setting = COSTED[name]
    way = f"set {setting} for another one" if setting else "there is no prediction for it"
    return f"engine.trtllm.args makes {name} {shown(changed)}, and the plan is for {shown(simulated)}: leave it out; {way}."
