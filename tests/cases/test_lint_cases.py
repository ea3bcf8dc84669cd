"""Configurations that failed in public, as they were reported, and the verdict of `lint` on each: its rule, level and reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.lint.base import ERROR, NOTE, WARNING
from pipeline.lint.report import Report, lint
from pipeline.lint.target import target_of
from tests.unit.test_lint_repository import CASES as REPOSITORIES
from tests.unit.test_lint_repository import linted

TABLE: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text(encoding="utf-8"))
R1 = "model=deepseek_r1"
TP8 = "tensor_parallel_size: 8"
DEP8 = f"{TP8}, moe_expert_parallel_size: 8, enable_attention_dp: true"
MTP3 = "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}"
GRAPHS = f"max_batch_size: 128, max_num_tokens: 1024, cuda_graph_config: {{batch_sizes: {list(range(1, 129))}}}"
NIXL = "cache_transceiver_config: {backend: NIXL}"
DISAGGREGATED = (
    "context_servers: {num_instances: 1, urls: ['a:1'], tensor_parallel_size: 4, pipeline_parallel_size: 2, "
    "disable_overlap_scheduler: true, cache_transceiver_config: {backend: UCX}}, "
    "generation_servers: {num_instances: 1, urls: ['b:2'], tensor_parallel_size: 8, cache_transceiver_config: {backend: UCX}}"
)

ARGUMENTS: dict[str, tuple[str, str, str, str, str]] = {
    # case: (LLM arguments, what they were meant for, rule, level, what its reason says)
    "trtllm-2": (DEP8, f"version=1.0 hw=h200 {R1} quant=nvfp4", "plan/format", ERROR, "SM90.*cannot multiply nvfp4"),
    "trtllm-3": (DEP8, f"version=0.19 hw=rtx_pro_6000 {R1} quant=nvfp4", "args/old-release", ERROR, "no FP4 on SM120"),
    "trtllm-4": (TP8, f"version=0.21 hw=b200 {R1} quant=fp8_block", "plan/moe_kernels", ERROR, "no kernels for fp8_block.*SM100"),
    "trtllm-6": (
        f"{TP8}, {MTP3}", f"version=1.0 hw=b200 {R1} quant=fp8_block", "plan/moe_kernels", ERROR, "fp8_block experts on SM100",
    ),
    "trtllm-7": (DEP8, f"version=1.0 hw=b300 {R1} quant=fp8_block", "plan/moe_kernels", ERROR, "fp8_block experts on SM103"),
    "trtllm-9": (  # reported for SM107; the kernels are those of SM103
        f"{DEP8}, moe_config: {{backend: CUTLASS}}", f"version=1.4 hw=b300 {R1} quant=fp8_block", "plan/moe_kernels", ERROR,
        "CUTLASS has no",
    ),
    "trtllm-10": (DEP8, f"version=1.2 hw=rtx_pro_6000 {R1} quant=nvfp4", "plan/sm", ERROR, "no MLA kernels"),
    "trtllm-14": (
        f"{DEP8}, enable_chunked_prefill: true", f"version=0.20 hw=b200 {R1} quant=nvfp4", "args/old-release", ERROR,
        "chunked prefill",
    ),
    "trtllm-15": (
        f"{DEP8}, {GRAPHS}", f"version=1.0 hw=h200 {R1} quant=fp8_block workload.isl=1000", "args/many-graphs", WARNING,
        "128 CUDA",
    ),
    "trtllm-17": (
        f"{DEP8}, {MTP3}, moe_config: {{backend: DEEPGEMM}}, kv_cache_config: {{free_gpu_memory_fraction: 0.6}}",
        f"version=1.2 hw=b200 {R1} quant=fp8_block", "plan/deepgemm_mtp", NOTE, "ran out of memory at a fraction of 0.6",
    ),
    "trtllm-18": (
        f"{DEP8}, {MTP3}, moe_config: {{backend: DEEPGEMM}}, kv_cache_config: {{free_gpu_memory_fraction: 0.6}}",
        f"version=1.2 hw=b300 {R1} quant=fp8_block", "plan/deepgemm_mtp", NOTE, "ran out of memory",
    ),
    "trtllm-19": (
        "tensor_parallel_size: 4, moe_expert_parallel_size: 4, enable_attention_dp: true, "
        "speculative_config: {decoding_type: MTP, max_draft_len: 1}", "version=1.3.0rc21", "args/mtp-crash", WARNING,
        "crashed on GB300",
    ),
    "trtllm-20": (
        f"{DEP8}, {MTP3[:-1]}, use_relaxed_acceptance_for_thinking: true}}", "version=1.2", "args/relaxed-adp", ERROR,
        "cannot be enabled at the same time",
    ),
    "trtllm-21": (f"{DEP8}, {MTP3}", "version=1.0", "args/mtp-accuracy", WARNING, "accuracy issues"),
    "trtllm-22": (TP8, f"version=1.2 hw=h100 {R1} quant=fp8_block", "plan/fits", ERROR, "does not fit hw=h100.*79.2 GiB"),
    "trtllm-23": (
        "backend: _autodeploy, max_batch_size: 5, cuda_graph_config: {batch_sizes: [1, 2, 114]}", "version=1.2",
        "args/graphs-above-autodeploy", ERROR, "cu_seqlen",
    ),
    "trtllm-25": (
        "backend: _autodeploy, tensor_parallel_size: 8", "version=1.2", "args/autodeploy", WARNING,
        "CUDA error with DeepSeek-R1",
    ),
    "trtllm-26": (TP8, f"version=0.19 hw=h20 {R1} quant=fp8_block", "args/old-release", ERROR, "garbled text on H20"),
    "trtllm-28": (f"tensor_parallel_size: 32, {NIXL}", "version=1.2", "args/transfer-timeout", NOTE, "hanging for good"),
    "trtllm-30": (f"{TP8}, {NIXL}", "version=1.1", "args/nixl-release", WARNING, "nixlDescList"),
    "trtllm-31": (
        f"{TP8}, cache_transceiver_config: {{backend: UCX}}", f"version=1.2 hw=b200 {R1}", "args/ucx-nvlink", NOTE,
        "does not use NVLink",
    ),
    "trtllm-32": (
        f"{DEP8}, moe_config: {{backend: WIDEEP}}", "version=1.0", "args/deepep-fp4", WARNING, "cannot send FP4 activations",
    ),
    "trtllm-35": (
        f"backend: tensorrt, {TP8}", "version=1.2", "args/tensorrt-backend", ERROR,
        "no way from a MoE checkpoint.*to an engine",
    ),
    "trtllm-38": (
        "max_batch_size: 2, cuda_graph_config: {batch_sizes: [1, 2, 4]}", "", "args/graphs-listed-above", WARNING,
        "graphs for 4",
    ),
    "trtllm-39": (DISAGGREGATED, "version=1.2", "disagg/stages", ERROR, "hang before generation_servers with TP"),
    "trtllm-40": (DEP8, "version=1.3.0rc20", "args/broken-release", ERROR, "crashes with an illegal memory access, or hangs"),
}  # fmt: skip
RULES: dict[str, tuple[str, str, str]] = {
    # case: (rule of the repository that shows it, level, what its reason says)
    "trtllm-36": ("triton/world-size", WARNING, r"mpiSize == tp \* pp"),
    "triton-1": ("triton/placeholder", ERROR, r"\$\{triton_max_batch_size\} is a placeholder that nobody filled.*cannot parse"),
    "triton-3": ("triton/placeholder", ERROR, "cannot parse"),
    "triton-4": ("triton/placeholder-required", ERROR, "the file parses, and the model fails"),
    "triton-6": ("ensemble/decoupled", ERROR, "decoupled is false in tensorrt_llm_bls, true in tensorrt_llm"),
    "triton-8": ("triton/code-responses", WARNING, "execute must return None"),
    "triton-9": ("engine/batch", ERROR, "max_batch_size 8 exceeds the 4 that the engine was built for, which wins"),
    "triton-12": ("triton/stray-folder", ERROR, r"\.ipynb_checkpoints.*takes it for one and fails"),
    "triton-16": ("ensemble/version", ERROR, r"version 0 \(it is left out"),
    "triton-17": ("ensemble/end-id", WARNING, "no end_id: it may run to max_tokens"),
    "triton-18": ("ensemble/stop-words", WARNING, "reaches no step: it is ignored"),
    "triton-19": ("ensemble/optional", ERROR, "requests without it fail"),
    "triton-21": ("bls/token-by-token", WARNING, "spaces and split characters are lost"),
    "triton-23": ("bls/one-at-a-time", WARNING, "one request at a time"),
    "triton-25": ("engine/max-utilization", WARNING, "pauses requests and computes them again"),
    "triton-26": ("triton/memory-shared", WARNING, r"claimed 1\.\d+ times: 0\.7 of llm \+ 0\.9 of two"),
    "triton-27": ("engine/instances", ERROR, "2 instances, but the engine backend serves one"),
    "triton-28": ("engine/version", ERROR, r"built with TensorRT-LLM 1\.0\.0, and would be loaded by 1\.1\.0 \(Triton 25\.12\)"),
    "triton-29": ("engine/guided", NOTE, "no guided_decoding_backend is set"),
}
NO_FILE_SHOWS = (
    "trtllm-12", "trtllm-37", "triton-5", "triton-10", "triton-11", "triton-14", "triton-30", "triton-34", "triton-35",
)  # fmt: skip
"""Cases without a configuration that is wrong by itself; `pipeline/lint/not_static.yaml` says where each is looked at."""


def test_every_case_of_a_deployment_has_its_verdict() -> None:
    cases = {name for name in TABLE if name.startswith(("trtllm", "triton"))}
    assert cases == ARGUMENTS.keys() | RULES.keys() | set(NO_FILE_SHOWS)
    assert {rule for rule, _, _ in RULES.values()} <= REPOSITORIES.keys()


def judge(report: Report, rule: str, level: str, says: str) -> None:
    found = {finding.rule: finding for finding in report.findings}
    assert rule in found, list(found)
    assert found[rule].level == level and re.search(says, found[rule].reason), found[rule].reason


def linted_arguments(folder: Path, case: str) -> Report:
    """What lint says of the arguments of one case."""
    text, settings, *_ = ARGUMENTS[case]
    file = folder / f"{case}.yaml"
    file.write_text(f"{{{text}}}\n", encoding="utf-8")
    return lint([file], target_of(settings.split()))


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str, tmp_path: Path) -> None:
    judge(linted_arguments(tmp_path, case), *ARGUMENTS[case][2:])


@pytest.mark.parametrize("case", RULES)
def test_repository(case: str, tmp_path: Path) -> None:
    judge(linted(tmp_path, RULES[case][0]), *RULES[case])
