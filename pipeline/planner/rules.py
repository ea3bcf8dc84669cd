"""Combinations that cannot work, and those that work but not as asked. All of them are reported together.

A rule is a name, a predicate that returns the sentence or None, and its source. `REQUEST` rules need only the request,
`RESULT` rules also what was chosen; `WARNINGS` never stop. A new rule is a function and a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.versions import version_line
from pipeline.planner.case import Case
from pipeline.planner.choose import Choice, gpu_counts, size, splits
from pipeline.planner.memory import GIB, block_of
from pipeline.planner.params import LINEAR_CLASSES, STORAGE
from pipeline.planner.setup import Layout

__all__ = ["REQUEST", "RESULT", "WARNINGS", "Rule", "broken"]

ISSUES = "NVIDIA/TensorRT-LLM issue"
MOE_SUPPORT = {
    "CUTLASS": {
        "bf16": (90, 100, 103), "fp8": (90, 100, 103), "fp8_block": (90,), "nvfp4": (100, 103),
        "w4a16_nvfp4": (90, 100, 103), "w4a8_awq": (90,), "mxfp4": (90,),
    },
    "TRTLLM": {"fp8_block": (100, 103), "nvfp4": (100, 103), "w4a8_nvfp4_fp8": (100, 103)},
    "DEEPGEMM": {"fp8_block": (100, 103)},
    "CUTEDSL": {"fp8_block": (100, 103), "nvfp4": (100, 103)},
    "VANILLA": {"bf16": (90, 100, 103)},
}
"""Backend -> format of the routed experts -> SMs. Others are passed on unchecked, with a warning."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to check."""

    name: str
    check: Callable[[Case, Choice | None], str | None]
    source: str


def broken(rules: Iterable[Rule], case: Case, choice: Choice | None = None) -> list[str]:
    """The sentences of all rules that are not kept."""
    return [sentence for rule in rules if (sentence := rule.check(case, choice))]


def _sm(case: Case, _: Choice | None) -> str | None:
    sm = case.hw.sm
    if case.family != "none":
        return None
    if sm == 120:
        return (
            f'hw={case.hw.name} is SM120, for which TensorRT-LLM has no MLA kernels ("Deepseek should be supported by '
            f'fmha"): use hw=b200, b300 or h200, or engine=torch.'
        )
    kind = "a CPU" if sm is None else f"SM{sm}"
    return f"engine=trtllm runs DeepSeek on SM90, SM100 and SM103, hw={case.hw.name} is {kind}: use engine=torch."


def _version(case: Case, _: Choice | None) -> str | None:
    try:
        version_line(case.trtllm.version)
    except ConfigError as error:
        return str(error)
    return None


def _format(case: Case, _: Choice | None) -> str | None:
    native = case.hw.weight_formats
    wrong = sorted({fmt for fmt in case.formats.values() if fmt not in native})
    if not wrong or case.family == "none":
        return None
    where = ", ".join(cls for cls, fmt in case.formats.items() if fmt in wrong)
    return (
        f"hw={case.hw.name} (SM{case.hw.sm}) cannot multiply {', '.join(wrong)} weights ({where}), only "
        f"{', '.join(native)}: choose quant=fp8_block, or hw=b200 for nvfp4."
    )


def _layout(case: Case, _: Choice | None) -> str | None:
    layout = case.config.quant.layout
    if layout == "modelopt":
        return None
    return (
        f"TensorRT-LLM's DeepSeek loader takes ModelOpt's layout, not quant.layout={layout}: set quant.layout=modelopt, or "
        f"convert for another runtime with engine=torch."
    )


def _experts(case: Case, _: Choice | None) -> str | None:
    fmt, sm = case.expert_format, case.hw.sm
    if case.family == "none" or fmt not in case.hw.weight_formats:
        return None
    if any(sm in formats.get(fmt, ()) for formats in MOE_SUPPORT.values()):
        return None
    able = sorted({name for formats in MOE_SUPPORT.values() for name, sms in formats.items() if sm in sms})
    return (
        f"No MoE backend of TensorRT-LLM takes {fmt} experts on SM{sm}: set quant.routed_experts to one of "
        f"{', '.join(able)}, or engine=torch."
    )


def _experts_only(case: Case, _: Choice | None) -> str | None:
    dense = [cls for cls in LINEAR_CLASSES if cls != "routed_experts" and case.formats[cls] == "mxfp4"]
    if not dense or case.family == "none":
        return None
    return (
        f"TensorRT-LLM takes mxfp4 (W4A16_MXFP4) for routed experts only, not for {', '.join(dense)}: set "
        f"{', '.join(f'quant.{cls}=fp8_block' for cls in dense)}."
    )


def _columns(case: Case, _: Choice | None) -> str | None:
    arch = case.arch
    columns = {
        "attention": (arch.hidden_size, arch.q_lora_rank, arch.kv_lora_rank),
        "o_proj": (arch.num_attention_heads * arch.v_head_dim,),
        "dense_mlp": (arch.hidden_size, arch.intermediate_size),
        "shared_experts": (arch.hidden_size, arch.moe_intermediate_size * arch.n_shared_experts),
        "routed_experts": (arch.hidden_size, arch.moe_intermediate_size),
    }
    wanted = {cls: STORAGE[case.formats[cls]] for cls in LINEAR_CLASSES}
    bad = [cls for cls, item in wanted.items() if item.rows == 1 and any(c % (item.cols or 1) for c in columns[cls])]
    if not bad:
        return None
    blocks = ", ".join(f"{case.formats[cls]} needs columns of {cls} in blocks of {wanted[cls].cols}" for cls in bad)
    return f"{blocks}, which {case.config.model.name} does not have: keep {', '.join(bad)} in bf16."


def _length(case: Case, _: Choice | None) -> str | None:
    total, limit = case.isl + case.osl, case.arch.max_position_embeddings
    if total <= limit:
        return None
    return (
        f"workload.isl={case.isl} + workload.osl={case.osl} = {total:,} tokens, but the model has {limit:,} positions "
        f"(max_position_embeddings): shorten one by {total - limit:,}."
    )


def _pipeline_parallel(case: Case, _: Choice | None) -> str | None:
    pp = case.config.parallel.pp
    return f"parallel.pp={pp} is not planned: set parallel.pp=1 and raise parallel.tp." if pp != 1 else None


def _gpus(case: Case, _: Choice | None) -> str | None:
    tp, hw = case.config.parallel.tp or 1, case.hw
    limit = max(hw.num_devices, hw.nvlink_domain)
    if tp <= limit:
        return None
    return (
        f"parallel.tp={tp} is more than the {limit} GPUs that NVLink joins on hw={hw.name}: set parallel.tp={limit} or "
        f"less, or choose hardware with more memory; instances across the network are not planned."
    )


def _expert_split(case: Case, _: Choice | None) -> str | None:
    tp, ep, experts = case.config.parallel.tp, case.config.parallel.ep, case.arch.n_routed_experts
    if ep and experts % ep:
        return f"parallel.ep={ep} does not divide the {experts} routed experts: choose a divisor."
    if tp and ep and tp % ep:
        return f"parallel.ep={ep} does not divide parallel.tp={tp} (expert TP x EP = TP): choose a divisor."
    if not (tp and ep):
        return None
    width, block = case.arch.moe_intermediate_size, block_of(case.expert_format)
    if width % (tp // ep * block) == 0:
        return None
    return (
        f"parallel.tp={tp}, ep={ep} splits each expert's {width} columns over {tp // ep} ranks, which parts the "
        f"{block}-wide blocks of {case.expert_format}: raise parallel.ep."
    )


def _heads(case: Case, _: Choice | None) -> str | None:
    tp, heads = case.config.parallel.tp, case.arch.num_attention_heads
    if not tp or case.config.parallel.attention_dp or heads % tp == 0:
        return None
    if case.config.parallel.attention_dp is None:
        return None
    return f"parallel.tp={tp} does not divide the {heads} heads: set parallel.attention_dp=true or tp={heads}."


def _mtp(case: Case, _: Choice | None) -> str | None:
    mtp, layers = case.trtllm.mtp, case.arch.num_nextn_predict_layers
    if mtp is not None and mtp < 0:
        return f"engine.trtllm.mtp={mtp} is below 0: 0 is off, 1 to 3 are usual."
    if mtp and not layers:
        return f"engine.trtllm.mtp={mtp}, but {case.config.model.name} has no MTP layer: set engine.trtllm.mtp=0."
    return None


def _moe_backend(case: Case, _: Choice | None) -> str | None:
    backend, sm = case.trtllm.moe_backend, case.hw.sm
    if backend not in MOE_SUPPORT or case.family == "none":
        return None
    works = [name for name, formats in MOE_SUPPORT.items() if sm in formats.get(case.expert_format, ())]
    if backend in works:
        return None
    return (
        f"engine.trtllm.moe_backend={backend} has no kernels for {case.expert_format} experts on SM{sm}: choose "
        f"{' or '.join(works) or 'another format'}, or auto."
    )


def _fits(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    memory, layout = choice.memory, choice.layout
    if memory.free > 0:
        return None
    need = memory.loaded + memory.engine
    return (
        f"{case.config.model.name} in {case.expert_format} does not fit hw={case.hw.name}: {layout} takes "
        f"{need:,} bytes ({need / GIB:.1f} GiB) a GPU, of which weights {memory.loaded / GIB:.1f}, and the GPU has "
        f"{memory.visible:,} ({memory.visible / GIB:.1f} GiB): {_way_out(case, choice)}."
    )


def _way_out(case: Case, choice: Choice) -> str:
    """The least number of GPUs that would do, where a smaller format is not at hand."""
    asked = case.config.parallel
    for tp in gpu_counts(64):
        layout = Layout(tp, tp, choice.layout.attention_dp and tp > 1)
        if tp > choice.layout.tp and splits(case, layout) and size(case, layout).capacity >= 1:
            inside = tp <= case.hw.nvlink_domain
            return f"set parallel.tp={tp}" if inside and asked.tp else f"it needs {tp} GPUs, or ones with more memory"
    return "choose GPUs with more memory or a smaller weight format"


def _room(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    if choice.memory.free <= 0 or choice.capacity >= (case.concurrency or 1):
        return None
    smaller = ", set quant.kv_dtype=fp8" if case.config.quant.kv_dtype == "bf16" else ""
    wanted = f"workload.concurrency={case.concurrency}" if case.concurrency else "even one"
    return (
        f"The KV cache of {choice.layout} on hw={case.hw.name} holds {choice.capacity:,} sequences of "
        f"{case.isl + case.osl:,} tokens ({choice.memory.kv_tokens:,} tokens a rank), not {wanted}: the rest would "
        f"queue and their first token come late. Lower workload.concurrency{smaller} or use more GPUs."
    )


def _chosen_splits(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    if splits(case, choice.layout):
        return None
    return (
        f"{choice.layout} does not divide {case.config.model.name}: {case.arch.num_attention_heads} heads, "
        f"{case.arch.n_routed_experts} experts and whole scale blocks must divide evenly. Leave parallel=auto."
    )


def _backend_of_line(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    line = version_line(case.trtllm.version)
    known = line.fields["moe_config"]["backend"]
    if choice.setup.moe_backend in known:
        return None
    return f"TensorRT-LLM {line.line} has no MoE backend {choice.setup.moe_backend}: choose {', '.join(known)}, or auto."


def _warn_cut(case: Case, _: Choice | None) -> str | None:
    return f"{case.cut}." if case.cut else None


def _warn_multi_node(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    nodes = -(-choice.layout.tp // case.hw.num_devices)
    if nodes == 1:
        return None
    return f"The instance spans {nodes} nodes: start tritonserver under trtllm-llmapi-launch on each."


def _warn_idle(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    ranks = choice.layout.cache_ranks
    if not case.concurrency or case.concurrency >= ranks:
        return None
    return f"{case.concurrency} requests over {ranks} attention-DP ranks leave ranks idle: parallel.attention_dp=false."


def _warn_slo(case: Case, _: Choice | None) -> str | None:
    slo = case.config.slo
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return None
    return "slo.* is not predicted: slo.tpot_ms only chooses between attention DP and TP, slo.ttft_ms changes nothing."


def _warn_balance(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    line = version_line(case.trtllm.version)
    if not choice.layout.attention_dp or "attention_dp_config" in line.fields:
        return None
    return f"TensorRT-LLM {line.line} does not balance attention-DP ranks, which gave 33 % on GB200: use 1.2."


def _warn_mixed(case: Case, _: Choice | None) -> str | None:
    used = sorted(set(case.formats.values()) - {"bf16"})
    if len(used) < 2:
        return None
    return (
        f"quant={case.config.quant.name} mixes {' and '.join(used)} (MIXED_PRECISION): TensorRT-LLM's loader was not run "
        f"on it here; load it once before you plan on it."
    )


def _warn_hopper(case: Case, _: Choice | None) -> str | None:
    if case.hw.sm == 100:
        return None
    return f"The engine's share of memory was measured on SM100; on SM{case.hw.sm} it is assumed to be the same."


def _warn_mtp_format(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    if not choice.setup.mtp or case.formats["mtp"] != "bf16" or choice.setup.moe_backend == "CUTLASS":
        return None
    return f"The BF16 MTP layer runs on CUTLASS, not on {choice.setup.moe_backend}, which has no BF16 kernels."


def _warn_deepgemm(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    fraction = case.trtllm.free_gpu_memory_fraction
    if choice.setup.moe_backend != "DEEPGEMM" or not choice.setup.mtp or fraction <= 0.5:
        return None
    return f"DEEPGEMM with MTP ran out of memory at a fraction of 0.6 on B200: if {fraction} does too, set 0.5."


def _warn_mtp_crash(case: Case, choice: Choice | None) -> str | None:
    assert choice is not None
    if not (choice.setup.mtp and choice.layout.attention_dp and case.hw.sm == 103 and case.trtllm.version.startswith("1.3")):
        return None
    return "MTP with attention DP crashed on GB300 with 1.3.0rc21: if it does, set engine.trtllm.mtp=0."


def _warn_unknown_backend(case: Case, _: Choice | None) -> str | None:
    backend = case.trtllm.moe_backend
    if backend == "auto" or backend in MOE_SUPPORT:
        return None
    return f"engine.trtllm.moe_backend={backend} is passed on unchecked: the engine may fall back or stop."


REQUEST = (
    Rule("version", _version, "pipeline/engines/trtllm/versions"),
    Rule("sm", _sm, f"{ISSUES} 18039; examples/models/core/deepseek_v3/README.md"),
    Rule("format", _format, f"{ISSUES} 2869 (FP4 before Blackwell)"),
    Rule("layout", _layout, "modeling_deepseekv3.py and fused_moe/quantization.py: weight, weight_scale, weight_scale_2"),
    Rule("experts", _experts, "fused_moe_cutlass.py _QUANT_SUPPORT_TABLE, fused_moe_trtllm_gen.py"),
    Rule("experts_only", _experts_only, "linear.py get_quant_method: no W4A16_MXFP4"),
    Rule("columns", _columns, "formats that scale groups along K"),
    Rule("length", _length, "config.json, max_position_embeddings"),
    Rule("pipeline_parallel", _pipeline_parallel, "not planned yet"),
    Rule("gpus", _gpus, "conf/hw"),
    Rule("expert_split", _expert_split, "TensorRT-LLM mapping.py: tp_size must equal moe_tp_size * moe_ep_size"),
    Rule("heads", _heads, "TensorRT-LLM attention: heads % tp"),
    Rule("mtp", _mtp, "config.json, num_nextn_predict_layers"),
    Rule("moe_backend", _moe_backend, f"fused_moe_cutlass.py support table; {ISSUES}s 5064, 10395"),
)
RESULT = (
    Rule("splits", _chosen_splits, "whole heads, experts and scale blocks"),
    Rule("backend_of_line", _backend_of_line, "pipeline/engines/trtllm/versions"),
    Rule("fits", _fits, "pipeline/planner/memory.py"),
    Rule("room", _room, "ai-dynamo/aiconfigurator issue 652: a batch above the cache queues silently"),
)
WARNINGS = (
    Rule("mixed", _warn_mixed, "pipeline/layouts/modelopt.py: MIXED_PRECISION"),
    Rule("cut", _warn_cut, "pipeline/planner/case.py"),
    Rule("multi_node", _warn_multi_node, "triton-inference-server/tensorrtllm_backend pull request 772"),
    Rule("idle", _warn_idle, f"{ISSUES} 3486: concurrency spreads over the ranks"),
    Rule("slo", _warn_slo, "no latency model yet"),
    Rule("balance", _warn_balance, "NVIDIA/TensorRT-LLM tech_blog/blog10"),
    Rule("hopper", _warn_hopper, "pipeline/planner/memory.py"),
    Rule("mtp_format", _warn_mtp_format, "modeling_deepseekv3.py: the MTP layer of an NVFP4 checkpoint is BF16"),
    Rule("deepgemm", _warn_deepgemm, "NVIDIA/TensorRT-LLM pull request 13357"),
    Rule("mtp_crash", _warn_mtp_crash, f"{ISSUES} 17025"),
    Rule("unknown_backend", _warn_unknown_backend, "TensorRT-LLM get_moe_cls"),
)
