"""A double of `tensorrt_llm` for one cold start: it says what the engine's log says, and leaves the files that the engine would.

Only `LLM(model=, **args)`, `generate` and `shutdown` of the documented API, with the variables that TensorRT-LLM reads its
cache folders from. FAKE_END=crash kills the process while it loads, FAKE_END=refuse raises as the engine's models do.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


class SamplingParams:
    def __init__(self, *, max_tokens: int) -> None:
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model: str, **args: Any) -> None:
        assert (Path(model) / "config.json").is_file() and "cache_transceiver_config" not in args
        if os.environ.get("FAKE_END") == "refuse":
            raise ValueError("Executor creation failed due to insufficient GPU memory. could not be created: KV cache")
        if os.environ.get("FAKE_END") == "crash":
            print("Signal: Segmentation fault (11)", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        print("[TRT-LLM] [I] [Autotuner]: Autotuning process starts ...", flush=True)
        Path(os.environ["TLLM_AUTOTUNER_CACHE_PATH"]).write_text("{}")
        print("[TRT-LLM] [I] Autotuner Cache size after warmup 112", flush=True)
        assert os.environ["TRTLLM_DG_JIT_DUMP_CUBIN"] == "1"
        kernel = Path(os.environ["TRTLLM_DG_CACHE_DIR"]) / "cache" / "kernel.fp8_gemm" / "nvrtc_kernel.cubin"
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(b"cubin")
        sizes = len(args["cuda_graph_config"] or {})
        print(f"[TRT-LLM] [I] Creating CUDA graph instances for {sizes} batch sizes.", flush=True)

    def generate(self, prompts: list[str], params: SamplingParams) -> list[str]:
        return [prompt[: params.max_tokens] for prompt in prompts]

    def shutdown(self) -> None:
        print("down", flush=True)
