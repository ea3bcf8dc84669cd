"""Version, graphs, scheduler and speculation: what the engine refuses, and what it silently does otherwise."""

from __future__ import annotations

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.versions import version_line
from pipeline.planner.overhead import graph_count
from pipeline.planner.rules.base import ISSUE, PULL, REFUSE, WARN, Rule
from pipeline.planner.setup import Setup

__all__ = ["CHUNK_SMS", "RULES"]

BROKEN_RELEASES = ("1.3.0rc20",)
REUSE_SMS = CHUNK_SMS = (90, 100, 103, 120)
"""SMs on which MLA has block reuse and chunked prefill (py_executor_creator.py)."""
MANY_GRAPHS = 64


def _version(setup: Setup) -> str | None:
    try:
        version_line(setup.version)
    except ConfigError as error:
        return str(error)
    return None


def _release(setup: Setup) -> str | None:
    if setup.version not in BROKEN_RELEASES:
        return None
    return (
        f"TensorRT-LLM {setup.version} crashes with an illegal memory access or hangs in the warm-up of DeepSeek-V3: set "
        f"engine.trtllm.version to another release."
    )


def _mtp(setup: Setup) -> str | None:
    if setup.mtp < 0:
        return f"engine.trtllm.mtp={setup.mtp} is below 0: 0 is off, 1 to 3 are usual."
    if setup.mtp and not setup.arch.num_nextn_predict_layers:
        return f"engine.trtllm.mtp={setup.mtp}, but {setup.model} has no MTP layer: set engine.trtllm.mtp=0."
    return None


def _relaxed(setup: Setup) -> str | None:
    if not (setup.relaxed_acceptance and setup.layout.attention_dp):
        return None
    return (
        "use_relaxed_acceptance_for_thinking and attention DP cannot be enabled at the same time: set "
        "parallel.attention_dp=false, or leave relaxed acceptance out."
    )


def _graph_list(setup: Setup) -> str | None:
    sizes, largest = setup.graph_sizes, setup.graph_batch
    if not sizes or largest is None or largest in (0, max(sizes)):
        return None
    return f"cuda_graph_config.max_batch_size={largest} must be the largest of batch_sizes, {max(sizes)}: leave it out."


def _fraction(setup: Setup) -> str | None:
    if 0 < setup.fraction < 1:
        return None
    return f"free_gpu_memory_fraction={setup.fraction:g} must lie between 0 and 1: 0.8 is usual."


def _reuse(setup: Setup) -> str | None:
    if not setup.block_reuse:
        return None
    if setup.hw.sm not in REUSE_SMS:
        return f"MLA block reuse works on SM90, SM100, SM103 and SM120 only: the engine turns it off on SM{setup.hw.sm}."
    if setup.kv_format == "nvfp4":
        return "MLA block reuse works with BF16 and FP8 caches only: the engine turns it off with an NVFP4 cache."
    if setup.attention_backend == "FLASHINFER":
        return "attn_backend=FLASHINFER turns block reuse off: leave attn_backend at TRTLLM."
    return None


def _chunked(setup: Setup) -> str | None:
    if not setup.chunked_prefill or setup.hw.sm in CHUNK_SMS:
        return None
    return (
        f"MLA chunked prefill works on SM90, SM100, SM103 and SM120 only: the engine turns it off on SM{setup.hw.sm}, and a "
        f"prompt must then fit into max_num_tokens={setup.max_num_tokens:,}."
    )


def _block_size(setup: Setup) -> str | None:
    flash_mla = setup.hw.sm == 90 and setup.arch.latent_dim == 576
    if not flash_mla or setup.tokens_per_block in (None, 64):
        return None
    return f"FlashMLA on SM90 wants 64 tokens a block: the engine replaces tokens_per_block={setup.tokens_per_block}."


def _graphs_above(setup: Setup) -> str | None:
    largest = max(setup.graph_sizes, default=setup.graph_batch or 0)
    if largest <= setup.max_batch_size:
        return None
    return (
        f"CUDA graphs up to {largest} requests, but max_batch_size={setup.max_batch_size} a rank: the PyTorch backend drops "
        f"the larger ones, AutoDeploy fails on them; set cuda_graph_config.max_batch_size={setup.max_batch_size}."
    )


def _graphs_below(setup: Setup) -> str | None:
    wanted = min(setup.max_batch_size, -(-(setup.concurrency or 1) // setup.layout.cache_ranks))
    if setup.captured >= wanted or setup.captured == 0:
        return None
    return (
        f"Batches of {setup.captured + 1} to {wanted} requests a rank run without CUDA graphs, which were worth 22 %: raise "
        f"cuda_graph_config.max_batch_size to {wanted}."
    )


def _many_graphs(setup: Setup) -> str | None:
    count = len(setup.graph_sizes) or int(graph_count(setup.captured))
    if count <= MANY_GRAPHS:
        return None
    return f"{count} CUDA graphs: each takes memory and start-up time, and 128 of them ran out of it on H200; list fewer."


def _mtp_crash(setup: Setup) -> str | None:
    if not (setup.mtp and setup.layout.attention_dp and setup.hw.sm == 103 and setup.line == (1, 3)):
        return None
    return "MTP with attention DP crashed on GB300 with 1.3.0rc21: if it does, set engine.trtllm.mtp=0."


def _mtp_accuracy(setup: Setup) -> str | None:
    if not (setup.mtp and setup.layout.attention_dp and setup.overlap and setup.captured and setup.line <= (1, 0)):
        return None
    return "MTP, attention DP, CUDA graphs and overlap together had accuracy issues in this line: use 1.2, or check GSM8K."


def _relaxed_quality(setup: Setup) -> str | None:
    if not setup.relaxed_acceptance:
        return None
    return "Relaxed acceptance (top 10, 0.6) costs accuracy: MMLU-Pro 84.0 to 81.2, GPQA 71 to 69.2 for 9 % speed."


def _transfer(setup: Setup) -> str | None:
    if setup.role == "both":
        return None
    if setup.transfer == "UCX" and setup.blackwell:
        return "UCX before 1.19 does not use NVLink on Blackwell: use it from 1.19, or UCX_RNDV_FRAG_MEM_TYPE=cuda before."
    if setup.transfer in (None, "DEFAULT", "NIXL"):
        return (
            "NIXL hangs for good where a completion notice is lost, and from 0.6 on needs a container of 1.2.0rc4 or later: "
            "keep cache_transceiver_config.kv_transfer_timeout_ms set, and watch it."
        )
    return None


def _measured(setup: Setup) -> str | None:
    if setup.hw.sm in (None, 100):
        return None
    return f"The engine's share of memory was measured on SM100; on SM{setup.hw.sm} it is assumed to be the same."


CREATOR = "TensorRT-LLM py_executor_creator.py"
README = "TensorRT-LLM examples/models/core/deepseek_v3/README.md"
RULES = (
    Rule("version", REFUSE, _version, f"pipeline/engines/trtllm/versions; {ISSUE}s 2968, 4037, 5018 (0.19 and older)"),
    Rule("release", REFUSE, _release, "NVIDIA/TensorRT-LLM releases v1.3.0rc20, known issues"),
    Rule("mtp", REFUSE, _mtp, "config.json, num_nextn_predict_layers"),
    Rule("relaxed_adp", REFUSE, _relaxed, README),
    Rule("graph_list", REFUSE, _graph_list, "TensorRT-LLM llm_args.py CudaGraphConfig"),
    Rule("fraction", REFUSE, _fraction, "TensorRT-LLM llm_args.py KvCacheConfig"),
    Rule("block_reuse", WARN, _reuse, CREATOR),
    Rule("chunked_prefill", WARN, _chunked, CREATOR),
    Rule("block_size", WARN, _block_size, CREATOR),
    Rule("graphs_above", WARN, _graphs_above, f"{ISSUE} 10688; {PULL} 10687; SemiAnalysisAI/InferenceX pull request 2596"),
    Rule("graphs_below", WARN, _graphs_below, "NVIDIA/TensorRT-LLM tech_blog/blog3"),
    Rule("many_graphs", WARN, _many_graphs, f"{ISSUE} 3486"),
    Rule("mtp_crash", WARN, _mtp_crash, f"{ISSUE} 17025"),
    Rule("mtp_accuracy", WARN, _mtp_accuracy, README),
    Rule("relaxed", WARN, _relaxed_quality, "NVIDIA/TensorRT-LLM tech_blog/blog1"),
    Rule("transfer", WARN, _transfer, f"{ISSUE}s 17665, 9752; {PULL} 6024"),
    Rule("measured", WARN, _measured, "pipeline/planner/overhead.py"),
)
