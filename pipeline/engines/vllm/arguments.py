"""The engine arguments of a deployment, as model.json of Triton's vLLM backend holds them (fields of AsyncEngineArgs).

Only fields that every version from 0.10 on has are written. vLLM itself sizes its KV cache, by
`gpu_memory_utilization`, and captures its CUDA graphs; what could make it run out of memory is bounded here.
"""

from __future__ import annotations

from typing import Any

from pipeline.config.engines import VllmEngineConfig

__all__ = ["environment", "render"]

MTP_METHOD_FROM = (0, 12)
"""Release from which `mtp` names the method of every model; before it was deepseek_mtp."""


def render(deploy: dict[str, Any], engine: VllmEngineConfig, loader: str | None) -> dict[str, Any]:
    """deploy.json as engine arguments, without the model's place. `loader`: of the quantised weights, None where there are none.

    With attention data parallelism vLLM runs one engine a GPU, which share the experts.
    """
    ranks = deploy["tp"]
    args: dict[str, Any] = {
        "tensor_parallel_size": 1 if deploy["attention_dp"] else ranks,
        "data_parallel_size": ranks if deploy["attention_dp"] else 1,
        "pipeline_parallel_size": deploy["pp"],
        "enable_expert_parallel": deploy["ep"] > 1,
        "max_model_len": deploy["max_seq_len"],
        "max_num_seqs": deploy["max_batch_size"],
        "max_num_batched_tokens": deploy["max_num_tokens"],
        "gpu_memory_utilization": deploy["gpu_memory_utilization"],
        "kv_cache_dtype": "fp8" if deploy["kv_cache_dtype"] == "fp8" else "auto",
        "block_size": deploy["tokens_per_block"],
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enable_chunked_prefill": True,
        "trust_remote_code": False,
        "disable_log_stats": False,
    }
    if loader:
        args["quantization"] = loader
    if deploy["mtp"]:
        method = "mtp" if _numbers(engine.version) >= MTP_METHOD_FROM else "deepseek_mtp"
        args["speculative_config"] = {"method": method, "num_speculative_tokens": deploy["mtp"]}
    return args


def environment(deploy: dict[str, Any]) -> list[dict[str, str]]:
    """Variables of the serving process, each with its reason."""
    rows = []
    if deploy["sm"] in (100, 103) and deploy["expert_format"] in ("nvfp4", "fp8_block"):
        kind = "FP4" if deploy["expert_format"] == "nvfp4" else "FP8"
        rows.append({
            "name": f"VLLM_USE_FLASHINFER_MOE_{kind}", "value": "1",
            "reason": f"FlashInfer's {kind} kernels for the experts, which vLLM recommends on Blackwell",
            "source": "docs.vllm.ai recipes, DeepSeek-V3 (R1) usage guide",
        })  # fmt: skip
    return rows


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
