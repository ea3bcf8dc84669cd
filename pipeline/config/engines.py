"""Configuration of the engines: a section for each, of which a run fills that of `engine.kind`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from pipeline.core.errors import ConfigError
from pipeline.core.limits import MOST_TOKENS, limited

__all__ = ["DEVICES", "EngineConfig", "TensorrtEngineConfig", "TorchEngineConfig", "TrtllmEngineConfig", "VllmEngineConfig"]

ENGINES = ("torch", "trtllm", "tensorrt", "vllm")
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
COMPILERS = ("auto", "aoti", "export")
KV_DTYPES = ("auto", "fp8")
PLUGINS = ("auto", "off")
TENSORRT_LIBRARIES = ("auto", "tensorrt", "tensorrt_rtx")
TENSORRT_WEIGHTS = ("embedded", "inputs", "refit")
TENSORRT_MOE = ("auto", "dense", "dispatch", "layer")
TENSORRT_PLUGINS = ("auto", "all", "off")
TENSORRT_EXCHANGES = ("gather", "all_to_all")
TENSORRT_PAYLOADS = ("bf16", "fp4")
TRTLLM_BACKENDS = ("pytorch", "tensorrt")
SERVING = ("aggregated", "disaggregated")
PAGE_SIZE = {"cpu": 32, "cuda": 64}
TRANSFERS = ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI")


@dataclass(slots=True, kw_only=True)
class TorchEngineConfig:
    """Compiled torch engine."""

    device: str = limited("cpu", one_of=DEVICES)
    """cpu or cuda."""
    dtype: str = limited("float32", one_of=DTYPES)
    """Type of activations and dequantised weights."""
    kv_dtype: str = limited("auto", one_of=KV_DTYPES)
    """Type of the latent KV cache. auto: `dtype`; fp8: E4M3, values beyond 448 becoming 448. Neither quant.kv_dtype, which is for
    other engines, nor a checkpoint's k_scale is read: the scale is 1."""
    compiler: str = limited("auto", one_of=COMPILERS)
    """aoti: AOTInductor (needs a C++ compiler); export: the exported graph, interpreted; auto: aoti where it can."""
    expanded_from: int | None = limited(None, least=1, most=MOST_TOKENS)
    """Prefill chunks of at least this many tokens use the non-absorbed form of MLA; shorter ones and decode the absorbed one. null:
    as measured for the context (plugins/mla_prefill/crossover.json), where the engine has those kernels, else 256."""
    max_batch_size: int = limited(8, least=1, most=2**16)
    """Sequences in flight."""
    max_seq_len: int = limited(1024, least=2, most=MOST_TOKENS)
    """Prompt plus output tokens of one sequence."""
    prefill_chunk: int = limited(512, least=2, most=MOST_TOKENS)
    """Prompt tokens of one step; a longer prompt takes several, between which others decode."""
    page_size: int | None = limited(None, least=1, most=2**16)
    """Tokens a page of the latent KV cache; null: 64 for cuda, which the decoding kernel takes, and 32 for cpu."""
    plugins: str = limited("auto", one_of=PLUGINS)
    """auto: on CUDA, each kernel of plugins/ that takes the GPU and the sizes; engine.json says which, and why not the others."""
    threads: int = limited(0, least=0, most=1024)
    """CPU threads; 0: as many as the machine has, 8 at most."""

    def __post_init__(self) -> None:
        if self.page_size is None:
            self.page_size = PAGE_SIZE.get(self.device, PAGE_SIZE["cpu"])


@dataclass(slots=True, kw_only=True)
class TrtllmEngineConfig:
    """TensorRT-LLM (PyTorch backend): a bundle of checkpoint, LLM-args YAML and environment."""

    version: str = "1.2"
    """Version line of the container that will serve it, or its release (1.3.0rc20)."""
    backend: str = limited("pytorch", one_of=TRTLLM_BACKENDS)
    """tensorrt is refused, with what became of it in `version`."""
    serving: str = limited("aggregated", one_of=SERVING)
    """disaggregated: prefill and decode on instances of their own, behind `trtllm-serve disaggregated`."""
    context_instances: int | None = limited(None, least=1, most=1024)
    """Prefill instances; null: let `plan` balance the two sides."""
    generation_instances: int | None = limited(None, least=1, most=1024)
    """Decode instances; null: let `plan` balance the two sides."""
    transfer: str = limited("DEFAULT", one_of=TRANSFERS)
    """How the cache goes from prefill to decode."""
    moe_backend: str = "auto"
    expert_slots: int | None = limited(None, least=1, most=2**16, hint="288 for R1's 256 experts on 36 ranks")
    """Places for experts over all ranks: what exceeds their number repeats the busiest (EPLB); null: no load balancer."""
    expert_updates: int = limited(0, least=0, most=1024)
    """Layers whose experts move after each iteration; 0: they stay where they are first."""
    mtp: int | None = limited(None, least=0, most=8, hint="0 is off, 1 to 3 are usual")
    """Draft tokens a step by the model's own MTP layer; null: let `plan` choose."""
    free_gpu_memory_fraction: float | None = limited(None, above=0, below=1, hint="0.8 is usual")
    """Share of the memory that is free after loading which the KV cache takes; null: the least of 0.8, 0.85 and 0.9 that holds
    the requests."""
    block_reuse: bool = True
    """Whether requests share the cache of equal beginnings."""
    cuda_graphs: bool = True
    """Whether decode steps are captured as CUDA graphs."""
    attention_dp_balance: bool = True
    """Whether attention-DP ranks wait for one another to get prompts at the same time, where the version can."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further LLM arguments, as in a YAML for the engine; none that changes what `plan` predicts."""
    warm: bool = False
    """Whether `engine` starts the bundle once, to keep tuned tactics and compiled kernels; needs its GPUs and tensorrt_llm here."""

    def __post_init__(self) -> None:
        if self.backend == "tensorrt":
            from pipeline.engines.trtllm.versions import require_pytorch

            require_pytorch(self.version)


@dataclass(slots=True, kw_only=True)
class TensorrtEngineConfig:
    """Native TensorRT: engines of one rank each, for prefill and for decode."""

    library: str = limited("auto", one_of=TENSORRT_LIBRARIES)
    """tensorrt builds on the GPU that it is for; tensorrt_rtx for a list of targets, without one; auto: by the targets, rather the
    latter."""
    targets: list[int] = field(default_factory=list)
    """Compute capabilities x10 to build for, more than one with tensorrt_rtx; empty: hw.sm."""
    dtype: str = limited("bfloat16", one_of=DTYPES)
    """Type of activations and KV cache; float32 shows the algebra without rounding."""
    weights: str = limited("embedded", one_of=TENSORRT_WEIGHTS)
    """embedded: in the engines; inputs: in a file beside them, so that another checkpoint of this shape needs no new engine;
    refit: in engines that can be refitted (tensorrt only)."""
    expanded_from: int = limited(2, least=2, most=MOST_TOKENS)
    """Chunks of at least this many tokens a row use the non-absorbed form of MLA; shorter ones and decode the absorbed one."""
    max_batch_size: int = limited(8, least=1, most=2**16)
    """Sequences in flight on one rank."""
    max_seq_len: int = limited(1024, least=2, most=MOST_TOKENS)
    """Prompt plus output tokens of one sequence: rows of the KV cache."""
    prefill_chunk: int = limited(512, least=2, most=MOST_TOKENS)
    """Prompt tokens of a row in one step."""
    prefill_batch: int = limited(1, least=1, most=2**16)
    """Rows of one prefill step."""
    moe: str = limited("auto", one_of=TENSORRT_MOE)
    """How experts are computed: layer (TensorRT's, for experts in BF16 or FP8, SM100/103/110 with tensorrt), dense, dispatch; auto:
    layer for BF16 experts."""
    moe_capacity: int = limited(0, least=0, most=MOST_TOKENS)
    """moe=dispatch: most tokens an expert takes in a step; more are left out and counted. 0: all."""
    plugins: str = limited("auto", one_of=TENSORRT_PLUGINS)
    """auto: with tensorrt, kernels of plugins/ in place of native layers, where they take the GPU and the sizes; engine.json says
    which, and why not the others. all: also those that are launched from Python, which needs this package where the engine runs."""
    exchange: str = limited("gather", one_of=TENSORRT_EXCHANGES)
    """Attention DP: gather brings all tokens to all ranks, all_to_all each to the ranks of its experts."""
    exchange_share: float = limited(1.0, least=0.001, most=1, hint="0.5 to 1 are usual")
    """exchange=all_to_all: the part of a step's tokens for which each rank has room on each other one; below 1, more are left out
    and counted."""
    gather: str = limited("bf16", one_of=TENSORRT_PAYLOADS)
    """Attention DP: what hidden states travel in to the experts; fp4 (NVFP4, packed) takes 3.6 times fewer bytes."""
    layers_per_engine: int = limited(0, least=0, most=1024)
    """Layers of one engine: a build holds about twice its weights in memory. 0: all layers in one."""
    mtp: bool = True
    """Whether to build the multi-token-prediction layer, where the checkpoint has one."""
    check_tokens: int = limited(48, least=0, most=4096)
    """Tokens on which the networks are interpreted and compared with the reference before they are built; 0: none. Models of
    more than 2e8 parameters are not compared."""


@dataclass(slots=True, kw_only=True)
class VllmEngineConfig:
    """vLLM: a bundle of checkpoint, engine arguments and environment."""

    version: str = "0.27"
    """Version, or its first two numbers, of the container that will serve it; 0.10 or later."""
    mtp: int = limited(0, least=0, most=8, hint="0 is off, 1 is usual")
    """Draft tokens a step by the model's own MTP layer."""
    gpu_memory_utilization: float = limited(0.9, above=0, below=1, hint="0.9 is usual")
    """Share of each GPU's memory that vLLM takes for weights, activations and KV cache."""
    max_num_batched_tokens: int = limited(8192, least=1, most=MOST_TOKENS)
    """Tokens of one step; a longer prompt takes several, between which others decode."""
    enable_prefix_caching: bool = True
    """Whether requests share the cache of equal beginnings."""


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Which runtime computes the tokens; only the section of `kind` is filled."""

    kind: str = limited(MISSING, one_of=ENGINES)
    torch: TorchEngineConfig | None = None
    trtllm: TrtllmEngineConfig | None = None
    tensorrt: TensorrtEngineConfig | None = None
    vllm: VllmEngineConfig | None = None

    def __post_init__(self) -> None:
        if self.kind in ENGINES and getattr(self, self.kind) is None:
            raise ConfigError(f"engine.kind={self.kind} has no section engine.{self.kind}: select it as engine={self.kind}.")
