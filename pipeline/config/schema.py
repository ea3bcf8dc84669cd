"""The typed configuration: one dataclass a config group, units in the field's own words.

`slots=True, kw_only=True` is not decoration: with slots, an unknown key (`+quant.kv_dytpe=fp8`) cannot be set,
so `load.py` can refuse it. Ranges are checked in `__post_init__`; a field that is still `MISSING` passes, `load.py` reports it.
Strings with a fixed set of values are checked against the tuples at the head of this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from pipeline.core.errors import ConfigError

__all__ = [
    "Config",
    "EngineConfig",
    "ExecutorConfig",
    "HwConfig",
    "ModelConfig",
    "ParallelConfig",
    "QuantConfig",
    "ServeConfig",
    "SloConfig",
    "StoreConfig",
    "TorchEngineConfig",
    "TrtllmEngineConfig",
    "VerifyConfig",
    "WorkloadConfig",
]

WEIGHT_FORMATS = (
    "bf16", "fp8", "fp8_block", "nvfp4", "w4a16_nvfp4", "w4a8_nvfp4_fp8", "fp8_channel", "mxfp8", "mxfp4", "int4_awq",
    "w4a8_awq",
)  # fmt: skip
SCALE_SEARCHES = ("amax", "four_over_six", "mse", "mse_full")
NVFP4_MODES = ("modelopt", "exact")
MIN_SQNR_DB = {
    "bf16": 40.0, "fp8_block": 60.0, "fp8": 26.0, "fp8_channel": 28.0, "mxfp8": 28.0, "nvfp4": 18.0, "w4a16_nvfp4": 18.0,
    "w4a8_nvfp4_fp8": 17.5, "mxfp4": 16.0, "int4_awq": 13.0, "w4a8_awq": 13.0,
}  # fmt: skip
KV_FORMATS = ("bf16", "fp8")
ENGINES = ("torch", "trtllm")
DTYPES = ("float32", "bfloat16")
COMPILERS = ("auto", "aoti", "export")
EXECUTORS = ("inline", "local")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in (*allowed, MISSING):
        raise ConfigError(f"{name}={value} is not supported: choose one of {', '.join(allowed)}.")


def _at_least(name: str, value: float | None, least: float) -> None:
    if value not in (None, MISSING) and value < least:
        raise ConfigError(f"{name}={value} is too small: it must be at least {least}.")


@dataclass(slots=True, kw_only=True)
class HwConfig:
    """One node of one kind of accelerator, in raw SI numbers. Sources stand in each file."""

    name: str = MISSING
    title: str = MISSING
    """Name on the vendor's sheet."""
    sm: int | None = None
    """CUDA compute capability x10 (90 = Hopper, 100/103/120 = Blackwell); null for a CPU."""
    num_devices: int = 1
    """GPUs a node, as the scheduler sees them."""
    nvlink_domain: int = 1
    """GPUs that reach one another over NVLink."""
    memory_bytes: float = MISSING
    """Memory of one device as software sees it, in bytes (not the marketed figure)."""
    memory_marketed_bytes: float | None = None
    memory_bandwidth: float = MISSING
    """Bytes a second of one device, read."""
    flops_bf16: float | None = None
    """Dense FLOP a second."""
    flops_fp8: float | None = None
    flops_fp4: float | None = None
    """null where the chip has no FP4 tensor cores."""
    nvlink_bandwidth: float | None = None
    """Bytes a second of one device, one direction."""
    tdp: float | None = None
    """Watts of one device."""
    weight_formats: list[str] = field(default_factory=list)
    """Weight formats whose matrix products run natively here."""
    source: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """Which architecture; the checkpoint's own config.json wins where there is a checkpoint."""

    name: str = MISSING
    title: str = ""
    checkpoint: str | None = None
    """Folder of a checkpoint; `embedded:NAME` is one that ships with the pipeline."""
    hf: dict[str, Any] = field(default_factory=dict)
    """The fields of the model's config.json that planning needs when no checkpoint is at hand."""
    source: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class QuantConfig:
    """A weight recipe: the format of each module class. Deny-all: what is not named stays BF16."""

    name: str = MISSING
    attention: str = "bf16"
    """q_a, q_b, kv_a and kv_b projections."""
    o_proj: str = "bf16"
    dense_mlp: str = "bf16"
    shared_experts: str = "bf16"
    routed_experts: str = "bf16"
    mtp: str = "bf16"
    """Every linear layer of the multi-token-prediction layers."""
    kv_dtype: str = "fp8"
    """Type of the KV cache on a GPU engine."""
    input_scale: float = 1.0
    """Static activation scale written where the format has one and there is no calibration (1.0: amax 2688 for NVFP4,
    448 for FP8 activations)."""
    nvfp4_scale_search: str = "amax"
    """Block scales of the NVFP4 formats: amax as ModelOpt's default; four_over_six, mse (4 codes around amax) and mse_full
    (all 126 codes) take the scale of least squared error."""
    nvfp4_mode: str = "modelopt"
    """modelopt: weights are rounded to BF16 before they are quantised, as ModelOpt does; exact: they are not."""
    source: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("attention", "o_proj", "dense_mlp", "shared_experts", "routed_experts", "mtp"):
            _one_of(f"quant.{name}", getattr(self, name), WEIGHT_FORMATS)
        _one_of("quant.kv_dtype", self.kv_dtype, KV_FORMATS)
        _one_of("quant.nvfp4_scale_search", self.nvfp4_scale_search, SCALE_SEARCHES)
        _one_of("quant.nvfp4_mode", self.nvfp4_mode, NVFP4_MODES)
        if not self.input_scale > 0:
            raise ConfigError(f"quant.input_scale={self.input_scale} must be above 0: it divides the activations.")


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work. null means: let `plan` choose."""

    name: str = MISSING
    tp: int | None = None
    """Tensor-parallel size = number of ranks of one instance."""
    ep: int | None = None
    """Expert-parallel size; divides tp."""
    pp: int = 1
    attention_dp: bool | None = None
    """Attention data parallelism: each rank keeps whole attention weights and its own requests."""

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "pp"):
            _at_least(f"parallel.{name}", getattr(self, name), 1)


@dataclass(slots=True, kw_only=True)
class WorkloadConfig:
    """What will be asked of the deployment."""

    name: str = MISSING
    isl: int = MISSING
    """Input tokens of a request."""
    osl: int = MISSING
    """Output tokens of a request."""
    concurrency: int | None = None
    """Requests in flight over the whole instance; null: as many as memory holds."""

    def __post_init__(self) -> None:
        for name in ("isl", "osl", "concurrency"):
            _at_least(f"workload.{name}", getattr(self, name), 1)


@dataclass(slots=True, kw_only=True)
class SloConfig:
    """Latency limits; null is no limit."""

    ttft_ms: float | None = None
    """Time to first token, in milliseconds."""
    tpot_ms: float | None = None
    """Time per output token, in milliseconds."""

    def __post_init__(self) -> None:
        _at_least("slo.ttft_ms", self.ttft_ms, 0)
        _at_least("slo.tpot_ms", self.tpot_ms, 0)


@dataclass(slots=True, kw_only=True)
class VerifyConfig:
    """The gate between convert and engine."""

    tokens: int = 4096
    """Held-out tokens whose logits are compared."""
    window: int = 512
    """Tokens of one compared sequence."""
    text: str | None = None
    """Held-out text file; null: heldout.txt of the checkpoint."""
    max_kl: float = 0.05
    """Mean KL(source || converted) a token, in nats."""
    min_top1: float = 0.90
    """Share of tokens whose most likely successor is the same."""
    max_ppl_ratio: float = 1.05
    """Perplexity of the converted model over that of the source."""
    min_sqnr_db: dict[str, float] = field(default_factory=lambda: dict(MIN_SQNR_DB))
    """Least signal-to-quantization-noise ratio of one tensor against the source, in dB, by format."""

    def __post_init__(self) -> None:
        _at_least("verify.tokens", self.tokens, 2)
        _at_least("verify.window", self.window, 2)


@dataclass(slots=True, kw_only=True)
class TorchEngineConfig:
    """Compiled torch engine."""

    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    """Type of activations, KV cache and dequantised weights."""
    compiler: str = "auto"
    """aoti: AOTInductor (needs a C++ compiler); export: the exported graph, interpreted; auto: aoti where it can."""
    expanded_from: int = 256
    """Prefill chunks of at least this many tokens use the non-absorbed form of MLA; shorter ones and decode the absorbed one."""
    max_batch_size: int = 8
    """Sequences in flight."""
    max_seq_len: int = 1024
    """Prompt plus output tokens of one sequence."""
    prefill_chunk: int = 512
    """Prompt tokens of one step; a longer prompt takes several, between which others decode."""
    page_size: int = 32
    """Tokens a page of the latent KV cache."""
    threads: int = 0
    """CPU threads; 0: as many as the machine has, 8 at most."""

    def __post_init__(self) -> None:
        _one_of("engine.torch.device", self.device, ("cpu", "cuda"))
        _one_of("engine.torch.dtype", self.dtype, DTYPES)
        _one_of("engine.torch.compiler", self.compiler, COMPILERS)
        for name in ("expanded_from", "max_batch_size", "page_size"):
            _at_least(f"engine.torch.{name}", getattr(self, name), 1)
        _at_least("engine.torch.max_seq_len", self.max_seq_len, 2)
        _at_least("engine.torch.prefill_chunk", self.prefill_chunk, 2)
        _at_least("engine.torch.threads", self.threads, 0)


@dataclass(slots=True, kw_only=True)
class TrtllmEngineConfig:
    """TensorRT-LLM (PyTorch backend): a bundle of checkpoint, LLM-args YAML and environment."""

    version: str = "1.2"
    """Version line of the container that will serve it."""
    moe_backend: str = "auto"
    mtp: int | None = None
    """Draft tokens a step by the model's own MTP layer; null: let `plan` choose."""
    free_gpu_memory_fraction: float = 0.8
    """Share of the memory that is free after loading which the KV cache takes."""

    def __post_init__(self) -> None:
        if not 0 < self.free_gpu_memory_fraction < 1:
            raise ConfigError(
                f"engine.trtllm.free_gpu_memory_fraction={self.free_gpu_memory_fraction} must lie between 0 and 1; 0.8 is usual."
            )


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Which runtime computes the tokens; only the section of `kind` is filled."""

    kind: str = MISSING
    torch: TorchEngineConfig | None = None
    trtllm: TrtllmEngineConfig | None = None

    def __post_init__(self) -> None:
        _one_of("engine.kind", self.kind, ENGINES)
        if self.kind != MISSING and getattr(self, self.kind) is None:
            raise ConfigError(f"engine.kind={self.kind} has no section engine.{self.kind}: select it as engine={self.kind}.")


@dataclass(slots=True, kw_only=True)
class ServeConfig:
    """How tritonserver is started and probed."""

    name: str = MISSING
    model_name: str | None = None
    """Name of the model in Triton; null: the name of the model config."""
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    """Ports; 0 takes a free one."""
    server: str | None = None
    """Path of tritonserver; null: the one on PATH, else the one in the nvidia-pytriton wheel."""
    url: str | None = None
    """`smoke` only: HTTP host:port of a server that already runs (gRPC on grpc_port of that host)."""
    ready_timeout: float = 120.0
    """Seconds to wait for readiness before the server is stopped and its log quoted."""
    max_queue: int = 256
    """Requests that may wait before new ones are refused."""
    smoke_prompt: str = "The Python language"
    smoke_tokens: int = 48
    smoke_requests: int = 8
    """Concurrent requests of the smoke run."""

    def __post_init__(self) -> None:
        for name in ("http_port", "grpc_port", "metrics_port", "max_queue"):
            _at_least(f"serve.{name}", getattr(self, name), 0)


@dataclass(slots=True, kw_only=True)
class ExecutorConfig:
    """Where stages run."""

    name: str = MISSING
    kind: str = MISSING

    def __post_init__(self) -> None:
        _one_of("executor.kind", self.kind, EXECUTORS)


@dataclass(slots=True, kw_only=True)
class StoreConfig:
    """Where results are kept."""

    name: str = MISSING
    root: str = MISSING
    """Folder of the content-addressed store; relative to the working directory."""


@dataclass(slots=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    hw: HwConfig = field(default_factory=HwConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    checkpoint: str | None = None
    """Folder of an R1-layout checkpoint; null: the one that `model` names."""
