"""The typed configuration: one dataclass a config group, units in the field's own words.

`slots=True, kw_only=True` is not decoration: with slots, an unknown key (`+quant.kv_dytpe=fp8`) cannot be set,
so `load.py` can refuse it. Limits stand beside their field (`limited`) and `load.py` checks them all at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from pipeline.config.engines import DEVICES, EngineConfig, TensorrtEngineConfig, TorchEngineConfig, TrtllmEngineConfig
from pipeline.config.serving import ServeConfig
from pipeline.core.limits import MOST_TOKENS, limited
from pipeline.models.arch import HF_FIELDS

__all__ = [
    "Config",
    "ConvertConfig",
    "EngineConfig",
    "ExecutorConfig",
    "HwConfig",
    "ModelConfig",
    "ParallelConfig",
    "QuantConfig",
    "ServeConfig",
    "SloConfig",
    "StoreConfig",
    "TensorrtEngineConfig",
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
LAYOUTS = ("modelopt", "compressed_tensors", "autoawq", "gptq")
# Weights near normal (Gauss, t with 5 degrees, Laplace) measure, in dB: NVFP4 20.4 to 20.8, with searched scales 21.2 to 21.8,
# FP8 and MXFP8 31.5, MXFP4 17.6 to 18.5, INT4 15.3 to 18.6; a public NVFP4 export of real weights 19.4; a global scale that
# is off by 1.25x leaves 11.5. Alarms lie just below what is normal, limits between that and what a fault leaves.
MIN_SQNR_DB = {
    "kept": 60.0, "bf16": 40.0, "fp8_block": 28.0, "fp8": 26.0, "fp8_channel": 28.0, "mxfp8": 28.0, "nvfp4": 18.0,
    "w4a16_nvfp4": 18.0, "w4a8_nvfp4_fp8": 17.5, "mxfp4": 16.0, "int4_awq": 13.0, "w4a8_awq": 13.0,
}  # fmt: skip
ALARM_SQNR_DB = {
    "bf16": 50.0, "fp8_block": 30.0, "fp8": 30.0, "fp8_channel": 30.0, "mxfp8": 30.0, "nvfp4": 20.0, "w4a16_nvfp4": 20.0,
    "w4a8_nvfp4_fp8": 18.5, "mxfp4": 17.0, "int4_awq": 14.0, "w4a8_awq": 14.0,
}  # fmt: skip
KV_FORMATS = ("bf16", "fp8", "nvfp4")
EXECUTORS = ("inline", "local")
ON_FAILURE = ("stop", "fallback")


MOST_INPUT_SCALE = 1e30
"""Input scales are stored in float32."""


@dataclass(slots=True, kw_only=True)
class HwConfig:
    """One node of one kind of accelerator, in raw SI numbers. Sources stand in each file."""

    name: str = MISSING
    title: str = MISSING
    """Name on the vendor's sheet."""
    sm: int | None = limited(None, least=50, most=200)
    """CUDA compute capability x10 (90 = Hopper, 100/103/120 = Blackwell); null for a CPU."""
    num_devices: int = limited(1, least=1, most=1024)
    """GPUs a node, as the scheduler sees them."""
    num_nodes: int | None = limited(1, least=1, most=1024, hint="null is as many as the total that is asked for takes")
    """Nodes at hand. Where a total is asked for (workload.concurrency, workload.requests_per_second, slo.tokens_per_second) the
    fewest of them that reach it are planned for, else all; null: as many as it takes. An instance may span them."""
    nvlink_domain: int = limited(1, least=1, most=1024)
    """GPUs that reach one another over NVLink."""
    topology: str | None = limited(None, empty=False, hint="save the output of `nvidia-smi topo -m` in a file")
    """File with the output of `nvidia-smi topo -m`, or `here` to ask for it on this machine; null: all GPUs of the NVLink domain
    are alike."""
    memory_bytes: float = limited(MISSING, least=1)
    """Memory of one device as software sees it, in bytes (not the marketed figure)."""
    memory_marketed_bytes: float | None = limited(None, least=1)
    memory_bandwidth: float = limited(MISSING, least=1)
    """Bytes a second of one device, read."""
    flops_bf16: float | None = limited(None, least=1)
    """Dense FLOP a second."""
    flops_fp8: float | None = limited(None, least=1)
    flops_fp4: float | None = limited(None, least=1)
    """null where the chip has no FP4 tensor cores."""
    nvlink_bandwidth: float | None = limited(None, least=1)
    """Bytes a second of one device, one direction."""
    network_bandwidth: float = limited(50e9, least=1)
    """Bytes a second of one device, one direction, to GPUs outside of its NVLink domain: its share of the network cards."""
    tdp: float | None = limited(None, above=0)
    """Watts of one device."""
    weight_formats: list[str] = limited(default_factory=list, one_of=WEIGHT_FORMATS)
    """Weight formats whose matrix products run natively here."""
    source: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """Which architecture; the checkpoint's own config.json wins where there is a checkpoint."""

    name: str = limited(MISSING, plain=True)
    title: str = ""
    checkpoint: str | None = None
    """Folder of a checkpoint; `embedded:NAME` is one that ships with the pipeline."""
    hf: dict[str, Any] = limited(default_factory=dict, keys=HF_FIELDS)
    """The fields of the model's config.json that planning needs when no checkpoint is at hand."""
    source: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class QuantConfig:
    """A weight recipe: the format of each module class. Deny-all: what is not named stays BF16."""

    name: str = MISSING
    attention: str = limited("bf16", one_of=WEIGHT_FORMATS)
    """q_a, q_b, kv_a and kv_b projections."""
    o_proj: str = limited("bf16", one_of=WEIGHT_FORMATS)
    dense_mlp: str = limited("bf16", one_of=WEIGHT_FORMATS)
    shared_experts: str = limited("bf16", one_of=WEIGHT_FORMATS)
    routed_experts: str = limited("bf16", one_of=WEIGHT_FORMATS)
    mtp: str = limited("bf16", one_of=WEIGHT_FORMATS)
    """Every linear layer of the multi-token-prediction layers."""
    kv_dtype: str = limited("fp8", one_of=KV_FORMATS)
    """Type of the KV cache on a GPU engine."""
    accuracy_sensitive: bool = False
    """Accuracy before speed: the cache in BF16, weights in BF16 or, where those do not fit, in the source's FP8 blocks."""
    refused: str | None = None
    """Why `verify` refused this recipe; verify.on_failure=fallback sets it, with accuracy_sensitive."""
    input_scale: float = limited(
        1.0, least=1 / MOST_INPUT_SCALE, most=MOST_INPUT_SCALE, hint="it divides the activations, and is stored in float32"
    )
    """Static activation scale written where the format has one and there is no calibration (1.0: amax 2688 for NVFP4,
    448 for FP8 activations)."""
    nvfp4_scale_search: str = limited("amax", one_of=SCALE_SEARCHES)
    """Block scales of the NVFP4 formats: amax as ModelOpt's default; four_over_six, mse (4 codes around amax) and mse_full
    (all 126 codes) take the scale of least squared error."""
    nvfp4_mode: str = limited("modelopt", one_of=NVFP4_MODES)
    """modelopt: weights are rounded to BF16 before they are quantised, as ModelOpt does; exact: they are not."""
    layout: str = limited("modelopt", one_of=LAYOUTS)
    """How quantised weights are named and packed on disk: modelopt (TensorRT-LLM, vLLM, SGLang), compressed_tensors (vLLM),
    autoawq or gptq (INT4 only)."""
    source: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work. null means: let `plan` choose."""

    name: str = MISSING
    tp: int | None = limited(None, least=1, most=1024)
    """Tensor-parallel size = number of ranks of one instance."""
    ep: int | None = limited(None, least=1, most=1024)
    """Expert-parallel size; divides tp."""
    pp: int = limited(1, least=1, most=1024)
    attention_dp: bool | None = None
    """Attention data parallelism: each rank keeps whole attention weights and its own requests."""


@dataclass(slots=True, kw_only=True)
class WorkloadConfig:
    """What will be asked of the deployment."""

    name: str = MISSING
    isl: int = limited(MISSING, least=1, most=MOST_TOKENS)
    """Input tokens of a request."""
    osl: int = limited(MISSING, least=1, most=MOST_TOKENS)
    """Output tokens of a request."""
    concurrency: int | None = limited(None, least=1, most=2**20)
    """Requests in flight over all instances; null: as many as the hardware serves best, within slo.* and memory."""
    requests_per_second: float | None = limited(None, above=0, hint="null: as many as come")
    """Requests a second over all instances that must be answered; null: no such total."""
    chunked_prefill: bool | None = None
    """Whether a long prompt is computed in several steps, between which others decode; null: where that serves more."""
    turns: int = limited(1, least=1, most=2**16)
    """Requests of one conversation; each brings back the earlier ones and their answers. `isl` is their mean."""
    system_tokens: int = limited(0, least=0, most=MOST_TOKENS)
    """Tokens at the start of every prompt that are the same in all conversations."""
    sessions: int | None = limited(None, least=1, most=2**20)
    """Conversations that are alive at once, those whose user is reading included; null: as many as requests in flight."""
    trace: str | None = limited(None, empty=False, hint="name a JSONL file of arrival, isl, osl and, where known, session")
    """JSONL file of requests (arrival in seconds, isl, osl, session); it replaces the lengths and the conversations."""


@dataclass(slots=True, kw_only=True)
class SloConfig:
    """Latency limits; null is no limit."""

    ttft_ms: float | None = limited(None, above=0, hint="null is no limit")
    """Time to first token, in milliseconds."""
    tpot_ms: float | None = limited(None, above=0, hint="null is no limit")
    """Time per output token, in milliseconds."""
    tokens_per_gpu: float | None = limited(None, above=0, hint="null is no limit")
    """Least output tokens a second and GPU."""
    tokens_per_second: float | None = limited(None, above=0, hint="null is no limit")
    """Least output tokens a second over all instances."""


@dataclass(slots=True, kw_only=True)
class ConvertConfig:
    """How `convert` computes. Nothing here can change a byte, so none of it enters a stage's key."""

    device: str = limited("cpu", one_of=DEVICES)
    """cuda: FP8 blocks become NVFP4 (nvfp4_scale_search=amax) on the GPU, everything else on the CPU as ever."""


@dataclass(slots=True, kw_only=True)
class VerifyConfig:
    """The gate between convert and engine."""

    on_failure: str = limited("stop", one_of=ON_FAILURE)
    """stop: a checkpoint that fails the gate ends the build; fallback: it is planned, converted and verified again as
    quant.accuracy_sensitive=true would be. Damage ends the build in any case."""
    tokens: int = limited(4096, least=2, most=MOST_TOKENS)
    """Held-out tokens whose logits are compared."""
    window: int = limited(512, least=2, most=MOST_TOKENS)
    """Tokens of one compared sequence."""
    text: str | None = limited(None, empty=False, hint="name a UTF-8 file, or leave it out for the checkpoint's own")
    """Held-out text file; null: heldout.txt of the checkpoint."""
    max_kl: float = limited(0.05, least=0)
    """Mean KL(source || converted) a token, in nats."""
    min_top1: float = limited(0.90, least=0, most=1)
    """Share of tokens whose most likely successor is the same."""
    max_ppl_ratio: float = limited(1.05, above=0)
    """Perplexity of the converted model over that of the source."""
    min_sqnr_db: dict[str, float] = limited(default_factory=lambda: dict(MIN_SQNR_DB), keys=tuple(MIN_SQNR_DB))
    """Least signal-to-quantization-noise ratio of one tensor against the source, in dB, by format; `kept` is for tensors
    that are in the same quantised format as the source's."""
    alarm_sqnr_db: dict[str, float] = limited(default_factory=lambda: dict(ALARM_SQNR_DB), keys=tuple(ALARM_SQNR_DB))
    """Below this a tensor is named in the report, but does not fail the gate."""
    sample: int = limited(0, least=0, most=MOST_TOKENS)
    """Parameters compared of each layer, projection and format (at most as many experts); 0: all."""
    sensitivity: bool = False
    """Whether to measure the KL that each layer and each class causes alone, where the model is small enough to run."""
    sensitivity_tokens: int = limited(1024, least=2, most=MOST_TOKENS)
    """Held-out tokens of each of these runs."""


@dataclass(slots=True, kw_only=True)
class ExecutorConfig:
    """Where stages run."""

    name: str = MISSING
    kind: str = limited(MISSING, one_of=EXECUTORS)


@dataclass(slots=True, kw_only=True)
class StoreConfig:
    """Where results are kept."""

    name: str = MISSING
    root: str = limited(MISSING, empty=False, hint="name a folder; .pipeline is usual")
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
    convert: ConvertConfig = field(default_factory=ConvertConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    checkpoint: str | None = None
    """Folder of an R1-layout checkpoint; null: the one that `model` names."""
