"""MoE backends: which kernels exist for which experts on which chip, and what they need."""

from __future__ import annotations

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.versions import version_line
from pipeline.planner.rules.base import ISSUE, PULL, REFUSE, WARN, Rule
from pipeline.planner.setup import Setup

__all__ = ["MOE_SUPPORT", "RULES"]

MOE_SUPPORT = {
    "CUTLASS": {
        "bf16": (90, 100, 103), "fp8": (90, 100, 103), "fp8_block": (90,), "nvfp4": (100, 103),
        "w4a16_nvfp4": (90, 100, 103), "w4a8_awq": (90,), "mxfp4": (90,),
    },
    "TRTLLM": {"fp8_block": (100, 103), "nvfp4": (100, 103), "w4a8_nvfp4_fp8": (100, 103)},
    "DEEPGEMM": {"fp8_block": (100, 103)},
    "CUTEDSL": {"fp8_block": (100, 103), "nvfp4": (100, 103)},
    "DENSEGEMM": {"nvfp4": (100, 103)},
    "VANILLA": {"bf16": (90, 100, 103)},
}  # fmt: skip
"""Backend -> format of the routed experts -> SMs. Others are passed on unchecked, with a warning."""
LOAD_BALANCED = ("WIDEEP", "CUTLASS", "TRTLLM", "CUTEDSL", "DEEPGEMM", "DENSEGEMM")
"""Backends that a load balancer works with."""


def _kernels(setup: Setup) -> str | None:
    backend, sm = setup.moe_backend, setup.hw.sm
    if backend not in MOE_SUPPORT or not setup.supported:
        return None
    works = [name for name, formats in MOE_SUPPORT.items() if sm in formats.get(setup.expert_format, ())]
    if backend in works:
        return None
    asked = setup.told("engine.trtllm.moe_backend", backend, backend)
    return (
        f"{asked} has no kernels for {setup.expert_format} experts on SM{sm}: choose "
        f"{' or '.join(works) or 'another format'}, or auto."
    )


def _of_line(setup: Setup) -> str | None:
    try:
        line = version_line(setup.version)
    except ConfigError:
        return None
    known = line.section("MoeConfig")["backend"].words
    if setup.moe_backend in (*known, "AUTO"):
        return None
    return f"TensorRT-LLM {line.line} has no MoE backend {setup.moe_backend}: choose {', '.join(known)}, or auto."


def _wideep(setup: Setup) -> str | None:
    if setup.moe_backend != "WIDEEP" or setup.layout.attention_dp:
        return None
    return "moe_backend=WIDEEP asserts attention DP (WideEPMoE): set parallel.attention_dp=true, or moe_backend=TRTLLM."


def _balancer(setup: Setup) -> str | None:
    if setup.expert_slots is None or setup.moe_backend in (*LOAD_BALANCED, "AUTO"):
        return None
    return f"moe_backend={setup.moe_backend} takes no load balancer: choose one of {', '.join(LOAD_BALANCED)}."


def _slots(setup: Setup) -> str | None:
    experts = setup.arch.n_routed_experts
    if setup.expert_slots is None or setup.expert_slots >= experts:
        return None
    return f"engine.trtllm.expert_slots={setup.expert_slots} has no place for each of {experts} experts: set {experts} or more."


def _unknown(setup: Setup) -> str | None:
    if setup.moe_backend in (*MOE_SUPPORT, "AUTO"):
        return None
    return f"engine.trtllm.moe_backend={setup.moe_backend} is passed on unchecked: the engine may fall back or stop."


def _mtp_format(setup: Setup) -> str | None:
    if not setup.mtp or setup.formats.get("mtp", "bf16") != "bf16" or setup.moe_backend in ("CUTLASS", "AUTO", "VANILLA"):
        return None
    return f"The BF16 MTP layer runs on CUTLASS, not on {setup.moe_backend}, which has no BF16 kernels."


def _deepgemm_mtp(setup: Setup) -> str | None:
    if setup.moe_backend != "DEEPGEMM" or not setup.mtp or setup.fraction <= 0.5:
        return None
    return (
        f"DEEPGEMM with MTP ran out of memory at a fraction of 0.6 on B200: if {setup.fraction:g} does too, set "
        f"engine.trtllm.free_gpu_memory_fraction=0.5."
    )


def _deepgemm_tp(setup: Setup) -> str | None:
    if setup.moe_backend != "DEEPGEMM" or setup.layout.ep > 1 or setup.layout.tp == 1:
        return None
    return (
        f"moe_backend=DEEPGEMM without expert parallelism keeps room for every token at each of the "
        f"{setup.arch.n_routed_experts} experts (42 GiB at 8,192 tokens), was half as fast as TRTLLM and made 256 requests wait "
        f"537 s: set parallel.ep={setup.layout.tp} with attention DP, or moe_backend=TRTLLM."
    )


def _low_precision(setup: Setup) -> str | None:
    if setup.moe_backend != "WIDEEP" or setup.expert_format != "nvfp4" or setup.line > (1, 1):
        return None
    return "DeepEPLowLatency cannot send FP4 activations in this version: set TRTLLM_MOE_POST_QUANT_ALLTOALLV=0."


RULES = (
    Rule("moe_kernels", REFUSE, _kernels, f"fused_moe_cutlass.py support table; {ISSUE}s 5064, 3118, 10395; {PULL} 19199"),
    Rule("moe_of_line", REFUSE, _of_line, "pipeline/engines/trtllm/versions"),
    Rule("wideep", REFUSE, _wideep, "TensorRT-LLM fused_moe_wide_ep.py: Attention DP should be used with WideEP"),
    Rule("moe_balancer", REFUSE, _balancer, "TensorRT-LLM create_moe.py"),
    Rule("moe_slots", REFUSE, _slots, "TensorRT-LLM MoeLoadBalancerConfig: each expert has a slot, the rest repeat"),
    Rule("moe_unknown", WARN, _unknown, "TensorRT-LLM get_moe_cls"),
    Rule("mtp_format", WARN, _mtp_format, "modeling_deepseekv3.py: the MTP layer of an NVFP4 checkpoint is BF16"),
    Rule("deepgemm_mtp", WARN, _deepgemm_mtp, f"{PULL}s 13357, 12823"),
    Rule("deepgemm_tp", REFUSE, _deepgemm_tp, "fused_moe_deepgemm.py get_workspace; zufayu/ClaudeSkillsE2EPerf @f655ecbe"),
    Rule("deepep_fp4", WARN, _low_precision, f"{PULL} 4792"),
)
