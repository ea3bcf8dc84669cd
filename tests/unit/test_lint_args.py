"""Every rule over LLM arguments and over disaggregated servers, with a file that breaks it and the nearest that keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.lint.args import RULES, disaggregated
from pipeline.lint.base import ERROR, NOTE, WARNING, Finding
from pipeline.lint.report import lint
from pipeline.lint.target import target_of

H200 = "hw=h200 model=deepseek_r1 quant=fp8_block"
B200 = "hw=b200 model=deepseek_r1"
DRAFTS = "speculative_config: {decoding_type: MTP, max_draft_len: 3, draft_len_schedule: {1: 3, 8: 1}}"
SCHEDULE = f"cuda_graph_config: {{enable_padding: %s}}, {DRAFTS}"
ADP = "tensor_parallel_size: 8, moe_expert_parallel_size: 8, enable_attention_dp: true"
MTP = "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}"
RELAXED = "speculative_config: {decoding_type: MTP, max_draft_len: 3, use_relaxed_acceptance_for_thinking: %s}"
TRANSFER = "cache_transceiver_config: {backend: NIXL, transceiver_runtime: PYTHON, enable_pipelined_transfer: true}"
PIPELINED = f"enable_chunked_prefill: %s, {TRANSFER}"

CASES: dict[str, tuple[str, str, str]] = {
    # rule: (breaks it, keeps it, what it is meant for)
    "args/unknown": ("max_num_token: 8192, stream_interval: 1", "max_num_tokens: 8192", ""),
    "args/renamed": ("moe_backend: TRTLLM, stream_interval: 1", "moe_config: {backend: TRTLLM}", "version=1.2"),
    "args/removed": ("stream_interval: 1, build_config: {max_batch_size: 8}, engine_dir: /e", "stream_interval: 1", "version=1.2"),
    "args/type": ("max_batch_size: many", "max_batch_size: 8", "version=1.2"),
    "args/value": ("moe_config: {backend: WIDEEP}", "moe_config: {backend: WIDEEP}, enable_attention_dp: true", "version=1.4"),
    "args/without-effect": (MTP, MTP, "version=1.3"),
    "args/twice": ("max_batch_size: 8, max_batch_size: 16", "max_batch_size: 16", ""),
    "args/old-release": ("enable_chunked_prefill: true", "enable_chunked_prefill: true", "version=0.20"),
    "args/broken-release": ("max_batch_size: 8", "max_batch_size: 8", "version=1.3.0rc20"),
    "args/tensorrt-backend": ("backend: tensorrt, max_batch_size: 8", "backend: pytorch, max_batch_size: 8", "version=1.2"),
    "args/autodeploy": (
        "backend: _autodeploy, max_batch_size: 8", "backend: _autodeploy, max_batch_size: 8, model: meta/Llama-4",
        "version=1.2",
    ),
    "args/engine-of-tensorrt": ("engine_dir: /e, max_batch_size: 8", "max_batch_size: 8", "version=1.2"),
    "args/ray": ("ray_worker_extension_cls: x", "ray_worker_extension_cls: x, orchestrator_type: ray", "version=1.2"),
    "args/cute-dsl": ("use_cute_dsl_bf16_gemm: true", "use_cute_dsl_bf16_gemm: false", f"version=1.4 {H200}"),
    "args/min-latency": (
        "model: deepseek-ai/DeepSeek-R1, enable_min_latency: true", "model: meta/Llama-4, enable_min_latency: true", "",
    ),
    "args/remote-code": (
        "model: deepseek-ai/DeepSeek-R1, trust_remote_code: true", "model: deepseek-ai/DeepSeek-R1, max_seq_len: 4096", "",
    ),
    "args/expert-ranks": (
        "tensor_parallel_size: 8, moe_expert_parallel_size: 3", "tensor_parallel_size: 8, moe_expert_parallel_size: 2", "",
    ),
    "args/expert-cluster": (
        "tensor_parallel_size: 8, moe_expert_parallel_size: 2, moe_cluster_parallel_size: 4",
        "tensor_parallel_size: 8, moe_expert_parallel_size: 1, moe_cluster_parallel_size: 4", "version=1.2",
    ),
    "args/experts-and-cp": (
        "tensor_parallel_size: 2, moe_expert_parallel_size: 2, context_parallel_size: 2",
        "tensor_parallel_size: 2, moe_expert_parallel_size: 1, context_parallel_size: 2", "",
    ),
    "args/helix-block": (
        "cp_config: {cp_type: HELIX, tokens_per_block: 64}, kv_cache_config: {tokens_per_block: 32}",
        "cp_config: {cp_type: HELIX, tokens_per_block: 32}, kv_cache_config: {tokens_per_block: 32}", "version=1.3",
    ),
    "args/pp-partition": (
        "pipeline_parallel_size: 2, pp_partition: [20, 20, 21]", "pipeline_parallel_size: 2, pp_partition: [30, 31]", "",
    ),
    "args/whole-nodes": ("tensor_parallel_size: 12, gpus_per_node: 8", "tensor_parallel_size: 16, gpus_per_node: 8", ""),
    "args/balance-without-adp": (
        "attention_dp_config: {enable_balance: true}", f"{ADP}, attention_dp_config: {{enable_balance: true}}", "",
    ),
    "args/balance-iterations": (
        f"{ADP}, attention_dp_config: {{enable_balance: true, timeout_iters: -1}}",
        f"{ADP}, attention_dp_config: {{enable_balance: true, timeout_iters: 0}}", "",
    ),
    "args/lm-head-without-adp": ("enable_lm_head_tp_in_adp: true", f"{ADP}, enable_lm_head_tp_in_adp: true", ""),
    "args/adp-one-rank": ("enable_attention_dp: true, tensor_parallel_size: 1", ADP, ""),
    "args/adp-split-experts": ("enable_attention_dp: true, tensor_parallel_size: 8", ADP, ""),
    "args/world-size": (
        "tensor_parallel_size: 8, context_parallel_size: 2", "tensor_parallel_size: 4, context_parallel_size: 2", B200,
    ),
    "args/graph-sizes": (
        "cuda_graph_config: {batch_sizes: [1, 2, 4], max_batch_size: 8}",
        "cuda_graph_config: {batch_sizes: [1, 2, 4], max_batch_size: 4}", "",
    ),
    "args/graphs-listed-above": (
        "max_batch_size: 2, cuda_graph_config: {batch_sizes: [1, 2, 4]}",
        "max_batch_size: 2, cuda_graph_config: {batch_sizes: [1, 2]}", "",
    ),
    "args/graphs-above-autodeploy": (
        "backend: _autodeploy, max_batch_size: 5, cuda_graph_config: {batch_sizes: [1, 114]}",
        "backend: _autodeploy, max_batch_size: 5, cuda_graph_config: {batch_sizes: [1, 5]}", "version=1.2",
    ),
    "args/graphs-above": (
        "max_batch_size: 64, cuda_graph_config: {max_batch_size: 128}",
        "max_batch_size: 64, cuda_graph_config: {max_batch_size: 64}", "",
    ),
    "args/many-graphs": (
        f"max_batch_size: 128, cuda_graph_config: {{batch_sizes: {list(range(1, 129))}}}",
        "max_batch_size: 128, cuda_graph_config: {batch_sizes: [128]}", "",
    ),
    "args/batch-tokens": ("max_batch_size: 4096, max_num_tokens: 2048", "max_batch_size: 2048, max_num_tokens: 2048", ""),
    "args/draft-tokens": (
        f"max_batch_size: 1024, max_num_tokens: 2048, {MTP}", f"max_batch_size: 512, max_num_tokens: 2048, {MTP}", "version=1.2",
    ),
    "args/prefill-graph": (
        "prefill_cuda_graph_backend: breakable, enable_lora: true", "prefill_cuda_graph_backend: breakable", "version=1.3",
    ),
    "args/prefill-capture": (
        "prefill_capture_num_tokens: [1, 2]", "prefill_capture_num_tokens: [1, 2], prefill_cuda_graph_backend: piecewise",
        "version=1.3",
    ),
    "args/lora-graphs-adp": (
        f"{ADP}, lora_config: {{cuda_graph_specialize_lora: true}}", f"{ADP}, lora_config: {{cuda_graph_specialize_lora: false}}",
        "version=1.3",
    ),
    "args/cache-share": (
        "kv_cache_config: {free_gpu_memory_fraction: 0.99}", "kv_cache_config: {free_gpu_memory_fraction: 0.93}", "",
    ),
    "args/sparse-cache": ("kv_cache_config: {dtype: fp8_ds_mla}", "kv_cache_config: {dtype: fp8}", "version=1.4"),
    "args/sparse-cache-sm": ("kv_cache_config: {dtype: fp8_ds_mla}", "kv_cache_config: {dtype: fp8}", f"version=1.4 {B200}"),
    "args/mla-cap": (
        "kv_cache_config: {dtype: auto, fp8_context_mla_kv_len_cap: 4096}",
        "kv_cache_config: {dtype: fp8, fp8_context_mla_kv_len_cap: 4096}", "version=1.3",
    ),
    "args/disk-cache": (
        "kv_cache_config: {disk_cache_size: 1000}", "kv_cache_config: {disk_cache_size: 1000, disk_cache_path: /cache}",
        "version=1.3",
    ),
    "args/disk-cache-path": (
        f"kv_cache_config: {{disk_cache_size: 1000, disk_cache_path: {__file__}}}",
        f"kv_cache_config: {{disk_cache_size: 1000, disk_cache_path: {Path(__file__).parent}}}", "version=1.3",
    ),
    "args/reuse-flashinfer": (
        "attn_backend: FLASHINFER, kv_cache_config: {enable_block_reuse: true}",
        "attn_backend: FLASHINFER, kv_cache_config: {enable_block_reuse: false}", "",
    ),
    "args/reuse-deterministic": (
        "env_overrides: {FORCE_DETERMINISTIC: '1'}, kv_cache_config: {enable_block_reuse: true}",
        "env_overrides: {FORCE_DETERMINISTIC: '0'}, kv_cache_config: {enable_block_reuse: true}", "version=1.3",
    ),
    "args/mla-skip-correction": (
        "enable_mla_skip_correction: true, attn_backend: FLASHINFER", "enable_mla_skip_correction: true, attn_backend: TRTLLM",
        "version=1.3",
    ),
    "args/pipelined-transfer": (PIPELINED % "false", PIPELINED % "true", "version=1.3"),
    "args/nixl-release": ("cache_transceiver_config: {backend: NIXL}", "cache_transceiver_config: {backend: UCX}", "version=1.1"),
    "args/transfer-timeout": (
        "cache_transceiver_config: {backend: NIXL}", "cache_transceiver_config: {backend: NIXL, kv_transfer_timeout_ms: 60000}",
        "version=1.2",
    ),
    "args/ucx-nvlink": ("cache_transceiver_config: {backend: UCX}", "cache_transceiver_config: {backend: NIXL}", B200),
    "args/transfer-buffer": (
        "cache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 1000}",
        "cache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 8448}", f"{B200} workload.isl=8192 workload.osl=1024",
    ),
    "args/wideep-adp": ("moe_config: {backend: WIDEEP}", f"{ADP}, moe_config: {{backend: WIDEEP}}", "version=1.2"),
    "args/balancer-backend": (
        "moe_config: {backend: VANILLA, load_balancer: {num_slots: 288}}",
        "moe_config: {backend: CUTLASS, load_balancer: {num_slots: 288}}",
        "",
    ),
    "args/balancer-slots": (
        f"{ADP}, moe_config: {{load_balancer: {{num_slots: 290}}}}",
        f"{ADP}, moe_config: {{load_balancer: {{num_slots: 288}}}}", "",
    ),
    "args/balancer-no-slots": (
        "moe_config: {load_balancer: {layer_updates_per_iter: 1}}", "moe_config: {load_balancer: {num_slots: 288}}", "version=1.2",
    ),
    "args/balancer-assignments": (
        "moe_config: {load_balancer: {num_slots: 4, initial_global_assignments: {3: [0, 1]}}}",
        "moe_config: {load_balancer: {num_slots: 4, initial_global_assignments: {3: [0, 1, 2, 3]}}}", "version=1.2",
    ),
    "args/balancer-missing": (
        "moe_config: {load_balancer: /nowhere/eplb.yaml}", f"moe_config: {{load_balancer: {__file__}}}", "version=1.2",
    ),
    "args/balancer-file": (
        f"moe_config: {{load_balancer: {__file__}}}", "moe_config: {load_balancer: {num_slots: 8}}", "version=1.2",
    ),
    "args/balancer-gms": (
        "load_format: GMS, moe_config: {load_balancer: {num_slots: 8}}",
        "load_format: auto, moe_config: {load_balancer: {num_slots: 8}}",
        "version=1.3",
    ),
    "args/low-precision-combine": (
        "moe_config: {use_low_precision_moe_combine: true}", "moe_config: {use_low_precision_moe_combine: false}",
        f"version=1.3 {H200}",
    ),
    "args/dwdp": (
        "dwdp_config: {dwdp_size: 4}, moe_config: {backend: CUTLASS}",
        "dwdp_config: {dwdp_size: 4}, moe_config: {backend: CUTEDSL}",
        "version=1.3",
    ),
    "args/wideep-later": (f"{ADP}, moe_config: {{backend: WIDEEP}}", f"{ADP}, moe_config: {{backend: CUTLASS}}", "version=1.2"),
    "args/deepep-fp4": (f"{ADP}, moe_config: {{backend: WIDEEP}}", f"{ADP}, moe_config: {{backend: TRTLLM}}", "version=1.1"),
    "args/relaxed-adp": (f"{ADP}, {RELAXED % 'true'}", RELAXED % "true", "version=1.3"),
    "args/relaxed-quality": (RELAXED % "true", RELAXED % "false", "version=1.3"),
    "args/relaxed-unused": (
        "speculative_config: {decoding_type: MTP, max_draft_len: 3, relaxed_topk: 10}", RELAXED % "true", "version=1.3",
    ),
    "args/two-draft-lengths": (
        "speculative_config: {decoding_type: MTP, max_draft_len: 3, num_nextn_predict_layers: 3}",
        "speculative_config: {decoding_type: MTP, max_draft_len: 3}", "version=1.3",
    ),
    "args/draft-schedule": (
        "speculative_config: {decoding_type: MTP, max_draft_len: 3, draft_len_schedule: {1: 2, 8: 1}}",
        "speculative_config: {decoding_type: MTP, max_draft_len: 3, draft_len_schedule: {1: 3, 8: 1}}", "version=1.3",
    ),
    "args/schedule-padding": (SCHEDULE % "false", SCHEDULE % "true", "version=1.3"),
    "args/rejection-sampling": (
        "speculative_config: {decoding_type: MTP, max_draft_len: 1, use_rejection_sampling: true}, context_parallel_size: 2",
        "speculative_config: {decoding_type: MTP, max_draft_len: 3, use_rejection_sampling: true}", "version=1.3",
    ),
    "args/guided-drafts": (
        "guided_decoding_backend: xgrammar, speculative_config: {decoding_type: MTP, max_draft_len: 3}",
        "guided_decoding_backend: xgrammar, speculative_config: {decoding_type: MTP, max_draft_len: 1}", "version=1.3",
    ),
    "args/mtp-accuracy": (f"{ADP}, {MTP}", f"{ADP}, {MTP}, disable_overlap_scheduler: true", "version=1.0"),
    "args/mtp-crash": (f"{ADP}, {RELAXED % 'false'}", ADP, "version=1.3.0rc21"),
    "args/many-drafts": ("speculative_config: {decoding_type: MTP, max_draft_len: 5}", RELAXED % "false", "version=1.3"),
    "args/autodeploy-speculation": (
        f"backend: _autodeploy, {MTP}", f"backend: _autodeploy, {MTP}, disable_overlap_scheduler: true", "version=1.2",
    ),
}  # fmt: skip
KEPT_OTHERWISE = {"args/value": "version=1.2", "args/without-effect": "version=1.2", "args/old-release": "version=1.0",
                  "args/broken-release": "version=1.3.0rc22"}  # fmt: skip
"""Rules that depend on the release alone: the release that keeps them."""

UCX = "cache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 8448}"
SIDE = f"num_instances: 1, urls: ['a:8001'], {UCX}, disable_overlap_scheduler: true"
OTHER = f"num_instances: 1, urls: ['b:8002'], {UCX}"


def servers(context: str = SIDE, generation: str = OTHER, top: str = "hostname: localhost") -> str:
    return f"{top}, context_servers: {{{context}}}, generation_servers: {{{generation}}}"


DISAGGREGATED: dict[str, tuple[str, str, str]] = {
    "disagg/section": (f"context_servers: {{{SIDE}}}", servers(), ""),
    "disagg/urls": (servers(SIDE.replace("num_instances: 1", "num_instances: 2")), servers(), ""),
    "disagg/url": (servers(SIDE.replace("a:8001", "http://a:8001")), servers(), ""),
    "disagg/url-twice": (servers(generation=OTHER.replace("b:8002", "a:8001")), servers(), ""),
    "disagg/both-places": (servers(f"{SIDE}, max_batch_size: 8", top="max_batch_size: 16"), servers(top="max_batch_size: 16"), ""),
    "disagg/no-transfer": (servers("num_instances: 1, disable_overlap_scheduler: true"), servers(), ""),
    "disagg/alike": (
        servers(f"{SIDE}, kv_cache_config: {{dtype: fp8}}", f"{OTHER}, kv_cache_config: {{dtype: auto}}"),
        servers(f"{SIDE}, kv_cache_config: {{dtype: fp8}}", f"{OTHER}, kv_cache_config: {{dtype: fp8}}"), "",
    ),
    "disagg/drafts": (servers(generation=f"{OTHER}, {MTP}"), servers(f"{SIDE}, {MTP}", f"{OTHER}, {MTP}"), "version=1.2"),
    "disagg/overlap": (servers(SIDE.replace("disable_overlap_scheduler: true", "max_batch_size: 2")), servers(), ""),
    "disagg/stages": (
        servers(f"{SIDE}, tensor_parallel_size: 2, pipeline_parallel_size: 2", f"{OTHER}, tensor_parallel_size: 4"),
        servers(f"{SIDE}, tensor_parallel_size: 4", f"{OTHER}, tensor_parallel_size: 4"), "version=1.2",
    ),
    "disagg/buffer": (servers(generation=OTHER.replace("8448", "1024")), servers(), ""),
    "disagg/length": (
        servers(f"{SIDE}, max_seq_len: 8192", f"{OTHER}, max_seq_len: 4096"),
        servers(f"{SIDE}, max_seq_len: 8192", f"{OTHER}, max_seq_len: 9216"), "",
    ),
    "disagg/schedule-style": (servers(top="schedule_style: both"), servers(top="schedule_style: context_first"), ""),
    "disagg/node-id": (servers(top="node_id: 300"), servers(top="node_id: 3"), ""),
}  # fmt: skip


def found(folder: Path, text: str, settings: str) -> dict[str, Finding]:
    file = folder / "args.yaml"
    file.write_text(f"{{{text}}}\n", encoding="utf-8")
    return {finding.rule: finding for finding in lint([file], target_of(settings.split())).findings}


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    ids = [rule.id for rule in (*RULES, *disaggregated.RULES, *disaggregated.PAIR_RULES)]
    assert set(ids) == CASES.keys() | DISAGGREGATED.keys()
    assert len(set(ids)) == len(ids)
    assert all(
        rule.fix and rule.source and rule.level in (ERROR, WARNING, NOTE)
        for rule in (*RULES, *disaggregated.RULES, *disaggregated.PAIR_RULES)
    )


@pytest.mark.parametrize("rule", [*CASES, *DISAGGREGATED])
def test_rule(rule: str, tmp_path: Path) -> None:
    breaking, keeping, settings = (CASES | DISAGGREGATED)[rule]
    finding = found(tmp_path, breaking, settings)[rule]
    assert finding.reason and finding.fix and finding.source
    assert finding.place.file == tmp_path / "args.yaml"
    assert rule not in found(tmp_path, keeping, KEPT_OTHERWISE.get(rule, settings))


LEGACY = {
    "pytorch_backend_config: {use_cuda_graph: true}": "its keys at the top",
    "use_cuda_graph: true": "cuda_graph_config",
    "cuda_graph_padding_enabled: true": "cuda_graph_config.enable_padding",
    "cuda_graph_batch_sizes: [1, 2]": "cuda_graph_config.batch_sizes",
    "enable_overlap_scheduler: true": "disable_overlap_scheduler",
    "kv_cache_dtype: fp8": "kv_cache_config.dtype",
    "kv_cache_free_gpu_memory_fraction: 0.8": "kv_cache_config.free_gpu_memory_fraction",
    "moe_backend: TRTLLM": "moe_config.backend",
    "moe_max_num_tokens: 1024": "moe_config.max_num_tokens",
    "moe_load_balancer: /e.yaml": "moe_config.load_balancer",
    "tp_size: 8": "tensor_parallel_size",
    "ep_size: 8": "moe_expert_parallel_size",
    "pp_size: 2": "pipeline_parallel_size",
    "enable_sleep: true": "sleep_config",
    "torch_compile_config: {enable_piecewise_cuda_graph: true}": "prefill_cuda_graph_backend",
    "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 1}": "speculative_config.max_draft_len",
    "disable_flashinfer_sampling: true": "sampl",
}
"""Names that guides still show -> the name, or the subject, that the finding must lead to on 1.4."""


@pytest.mark.parametrize("text", LEGACY)
def test_a_name_of_an_old_guide_leads_to_the_new_one(text: str, tmp_path: Path) -> None:
    findings = found(tmp_path, f"{text}, stream_interval: 1", "version=1.4")
    told = [
        f"{item.reason} {item.fix}"
        for rule, item in findings.items()
        if rule in ("args/renamed", "args/removed", "args/without-effect")
    ]
    assert any(LEGACY[text] in said for said in told), told or findings


def test_addresses_alone_are_no_servers_without_arguments(tmp_path: Path) -> None:
    """The file of a router, whose servers are started with files of their own."""
    text = "hostname: a, port: 8000, context_servers: {num_instances: 2, urls: ['a:1', 'b:1']}, generation_servers: {urls: ['c:1']}"
    assert found(tmp_path, text, "version=1.2") == {}


def test_instances_with_files_of_their_own_are_held_against_each_other(tmp_path: Path) -> None:
    for name, dtype in (("context", "fp8"), ("generation", "auto")):
        (tmp_path / "instances" / name).mkdir(parents=True)
        lines = ("tensor_parallel_size: 8", "disable_overlap_scheduler: true", "cache_transceiver_config: {backend: UCX}")
        text = "\n".join([*lines, "kv_cache_config:", f"  dtype: {dtype}", ""])
        (tmp_path / "instances" / name / "llm_args.yaml").write_text(text, encoding="utf-8")
    (finding,) = lint([tmp_path], target_of(["version=1.2"])).findings
    assert (finding.rule, finding.place.line, finding.place.file.parent.name) == ("disagg/alike", 5, "generation")


@pytest.mark.parametrize("settings", ["version=1.0", "version=1.2", B200])
@pytest.mark.parametrize(
    "text",
    [
        "enable_attention_dp: true, moe_expert_parallel_size: 8, kv_cache_config: {dtype: fp8}",
        "cuda_graph_config: {enable_padding: true, batch_sizes: [1, 2, 4, 8]}, max_batch_size: 64",
        "cuda_graph_config: {enable_padding: true, batch_sizes: [1, 2, 4, 8]}, stream_interval: 1",
    ],
)
def test_what_the_command_line_or_an_unset_default_says_is_no_mistake_of_the_file(text: str, settings: str, tmp_path: Path) -> None:
    """As guides have it: `trtllm-serve MODEL --tp_size 8 --max_num_tokens 1160 --extra_llm_api_options FILE`."""
    told = [finding for finding in found(tmp_path, text, settings).values() if finding.level != NOTE]
    assert told == []
