"""Formats: what the chip multiplies, what the engine loads, what the cache can be."""

from __future__ import annotations

from pipeline.planner.params import LINEAR_CLASSES, STORAGE
from pipeline.planner.rules.base import ISSUE, PULL, REFUSE, WARN, Rule
from pipeline.planner.rules.moe import MOE_SUPPORT
from pipeline.planner.setup import Setup

__all__ = ["RULES"]


def _sm(setup: Setup) -> str | None:
    sm = setup.hw.sm
    if setup.supported:
        return None
    if sm == 120:
        return (
            f'hw={setup.hw.name} is SM120, for which TensorRT-LLM has no MLA kernels ("Deepseek should be supported by '
            f'fmha"): use hw=b200, b300 or h200, or engine=torch.'
        )
    kind = "a CPU" if sm is None else f"SM{sm}"
    return f"engine=trtllm runs DeepSeek on SM90, SM100 and SM103, hw={setup.hw.name} is {kind}: use engine=torch."


def _format(setup: Setup) -> str | None:
    native = setup.hw.weight_formats
    wrong = sorted({fmt for fmt in setup.formats.values() if fmt not in native})
    if not wrong or not setup.supported:
        return None
    where = ", ".join(cls for cls, fmt in setup.formats.items() if fmt in wrong)
    fp4 = "quant=fp8_block, quant=w4a16_nvfp4 (FP4 weights, BF16 products), or hw=b200 for nvfp4"
    way = fp4 if setup.hw.flops_fp4 is None and "nvfp4" in wrong else "quant=fp8_block, or hw=b200 for nvfp4"
    return (
        f"hw={setup.hw.name} (SM{setup.hw.sm}) cannot multiply {', '.join(wrong)} weights ({where}), only "
        f"{', '.join(native)}: choose {way}."
    )


def _stored_as(setup: Setup) -> str | None:
    if setup.stored_as == "modelopt":
        return None
    return (
        f"TensorRT-LLM's DeepSeek loader takes ModelOpt's layout, not quant.layout={setup.stored_as}: set quant.layout=modelopt, "
        f"or convert for another runtime with engine=torch."
    )


def _experts(setup: Setup) -> str | None:
    fmt, sm = setup.expert_format, setup.hw.sm
    if not setup.supported or fmt not in setup.hw.weight_formats:
        return None
    if any(sm in formats.get(fmt, ()) for formats in MOE_SUPPORT.values()):
        return None
    able = sorted({name for formats in MOE_SUPPORT.values() for name, sms in formats.items() if sm in sms})
    return (
        f"No MoE backend of TensorRT-LLM takes {fmt} experts on SM{sm}: set quant.routed_experts to one of "
        f"{', '.join(able)}, or engine=torch."
    )


def _experts_only(setup: Setup) -> str | None:
    dense = [cls for cls in LINEAR_CLASSES if cls != "routed_experts" and setup.formats.get(cls) == "mxfp4"]
    if not dense or not setup.supported:
        return None
    return (
        f"TensorRT-LLM takes mxfp4 (W4A16_MXFP4) for routed experts only, not for {', '.join(dense)}: set "
        f"{', '.join(f'quant.{cls}=fp8_block' for cls in dense)}."
    )


def _columns(setup: Setup) -> str | None:
    arch = setup.arch
    columns = {
        "attention": (arch.hidden_size, arch.q_lora_rank, arch.kv_lora_rank),
        "o_proj": (arch.num_attention_heads * arch.v_head_dim,),
        "dense_mlp": (arch.hidden_size, arch.intermediate_size),
        "shared_experts": (arch.hidden_size, arch.moe_intermediate_size * arch.n_shared_experts),
        "routed_experts": (arch.hidden_size, arch.moe_intermediate_size),
    }
    formats = {cls: setup.formats.get(cls, "bf16") for cls in LINEAR_CLASSES}
    wanted = {cls: STORAGE[fmt] for cls, fmt in formats.items()}
    bad = [cls for cls, item in wanted.items() if item.rows == 1 and any(c % (item.cols or 1) for c in columns[cls])]
    if not bad:
        return None
    blocks = ", ".join(f"{formats[cls]} needs columns of {cls} in blocks of {wanted[cls].cols}" for cls in bad)
    return f"{blocks}, which {setup.model} does not have: keep {', '.join(bad)} in bf16."


def _kv_nvfp4(setup: Setup) -> str | None:
    if setup.kv_format != "nvfp4":
        return None
    return (
        f"quant.kv_dtype=nvfp4: TensorRT-LLM {setup.version} has NVFP4 caches for plain attention on SM100, none for "
        f"DeepSeek-V3's MLA latent: set quant.kv_dtype=fp8."
    )


def _kv_bf16(setup: Setup) -> str | None:
    if setup.kv_format != "bf16" or setup.arch.latent_dim != 576 or not setup.supported:
        return None
    return (
        "quant.kv_dtype=bf16 takes 70,272 bytes a token where fp8 takes 35,136, so half the requests fit (4,000 instead of "
        "about 7,000 a B200 node at 1K/2K) and attention reads twice as much; fp8 did not lose accuracy on GSM8K."
    )


def _weight_only(setup: Setup) -> str | None:
    used = sorted({fmt for fmt in setup.formats.values() if fmt in ("w4a16_nvfp4", "int4_awq")})
    if not used or not setup.supported:
        return None
    return (
        f"{' and '.join(used)} is weight-only: its products run in BF16, weights are unpacked in every step. It saves "
        f"memory, not compute, and both configuration files must name it (W4A16), or loaders read it as W4A4."
    )


def _mixed(setup: Setup) -> str | None:
    used = sorted(set(setup.formats.values()) - {"bf16"})
    if len(used) < 2:
        return None
    return (
        f"{' and '.join(used)} are mixed (MIXED_PRECISION): TensorRT-LLM's loader was not run on it here; load it once "
        f"before you plan on it."
    )


RULES = (
    Rule("sm", REFUSE, _sm, f"{ISSUE} 18039; examples/models/core/deepseek_v3/README.md"),
    Rule("format", REFUSE, _format, f"{ISSUE}s 2869, 5018 (FP4 before Blackwell)"),
    Rule("stored_as", REFUSE, _stored_as, "fused_moe/quantization.py: weight, weight_scale, weight_scale_2"),
    Rule("experts", REFUSE, _experts, "fused_moe_cutlass.py _QUANT_SUPPORT_TABLE, fused_moe_trtllm_gen.py"),
    Rule("experts_only", REFUSE, _experts_only, "linear.py get_quant_method: no W4A16_MXFP4"),
    Rule("columns", REFUSE, _columns, "formats that scale groups along K"),
    Rule("kv_nvfp4", REFUSE, _kv_nvfp4, f"{PULL}s 6244 (plain attention), 18723 (DeepSeek-V4 only)"),
    Rule("kv_bf16", WARN, _kv_bf16, "NVIDIA/TensorRT-LLM tech_blog/blog3"),
    Rule("weight_only", WARN, _weight_only, "fused_moe_cutlass.py (W4A16_NVFP4); vllm-project/vllm issue 54189"),
    Rule("mixed", WARN, _mixed, "pipeline/layouts/modelopt.py: MIXED_PRECISION"),
)
