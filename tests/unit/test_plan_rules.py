"""Every rule with a case that breaks it and one that keeps it; what is known to run is not refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load
from pipeline.config.schema import HwConfig
from pipeline.core.errors import ConfigError
from pipeline.models.arch import Arch
from pipeline.planner.case import case_of
from pipeline.planner.choose import choose
from pipeline.planner.llm_args_file import read_llm_args
from pipeline.planner.params import LINEAR_CLASSES
from pipeline.planner.rules import REFUSE, RULES, WARN, Finding, check, table
from pipeline.planner.setup import Layout, Setup
from tests.unit.test_plan import config_of, plan, refusal

R1_B200 = ("+hw=b200", "model=deepseek_r1")
FP8 = dict.fromkeys((*LINEAR_CLASSES, "mtp"), "fp8_block")
V2 = dict.fromkeys(("o_proj", "dense_mlp", "shared_experts", "routed_experts"), "nvfp4")
W4A16 = dict.fromkeys(LINEAR_CLASSES, "w4a16_nvfp4")
DATA = Path(__file__).parents[1] / "data"
KNOWN = json.loads((DATA / "known_good.json").read_text(encoding="utf-8"))
RECIPES = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted((DATA / "recipes").glob("*.yaml"))}


@cache
def machine(name: str) -> HwConfig:
    return load([f"+hw={name}", "model=deepseek_r1"]).hw


@cache
def arch(name: str = "deepseek_r1") -> Arch:
    return Arch.from_hf(load(["+hw=b200", f"model={name}"]).model.hf)


def setup(hw: str | HwConfig = "b200", formats: Mapping[str, str] = V2, layout: Layout | None = None, **changed: Any) -> Setup:
    """R1 in FP4 on eight B200 under attention DP, which keeps every rule, but for `changed`."""
    chip = machine(hw) if isinstance(hw, str) else hw
    base = Setup(arch=arch(), hw=chip, formats=formats, layout=layout or Layout(8, 8, True), max_batch_size=64)
    return replace(base, **changed)


def found(asked: Setup) -> dict[str, Finding]:
    return {finding.rule: finding for finding in check(asked)}


TP8, TP8_EP8 = Layout(8, 1, False), Layout(8, 8, False)
CHIP_107 = HwConfig(name="sm107", sm=107, num_devices=8, nvlink_domain=8, memory_bytes=2e11, weight_formats=["nvfp4", "bf16"])
NARROW = replace(arch(), moe_intermediate_size=2056)
CASES: dict[str, tuple[Setup, Setup]] = {
    # rule: (breaks it, the nearest that keeps it)
    "stored_as": (setup(stored_as="compressed_tensors"), setup()),
    "version": (setup(version="0.21"), setup(version="1.2.1")),
    "release": (setup(version="1.3.0rc20"), setup(version="1.3.0rc22")),
    "mtp": (setup(arch=arch("kimi_k2"), mtp=1), setup(mtp=1)),
    "relaxed_adp": (setup(relaxed_acceptance=True, mtp=3), setup(layout=TP8_EP8, relaxed_acceptance=True, mtp=3)),
    "graph_list": (setup(graph_sizes=(1, 2, 4), graph_batch=8), setup(graph_sizes=(1, 2, 4), graph_batch=4)),
    "fraction": (setup(fraction=1.5), setup(fraction=0.8)),
    "block_reuse": (setup(kv_format="nvfp4"), setup(kv_format="nvfp4", block_reuse=False)),
    "chunked_prefill": (setup(hw=CHIP_107, chunked_prefill=True), setup(chunked_prefill=True)),
    "block_size": (setup("h200", FP8, tokens_per_block=32), setup("h200", FP8, tokens_per_block=64)),
    "graphs_above": (setup(graph_sizes=(1, 2, 4), max_batch_size=2), setup(graph_sizes=(1, 2), max_batch_size=2)),
    "graphs_below": (setup(graph_batch=32, max_batch_size=256, concurrency=2048), setup(graph_batch=32, concurrency=256)),
    "many_graphs": (setup("h200", FP8, graph_sizes=tuple(range(1, 129)), max_batch_size=128),
                    setup("h200", FP8, graph_sizes=(128,), max_batch_size=128)),
    "mtp_crash": (setup("gb300", version="1.3", mtp=1), setup("gb300", version="1.3")),
    "mtp_accuracy": (setup(version="1.0", mtp=1), setup(version="1.0", mtp=1, overlap=False)),
    "relaxed": (setup(layout=TP8_EP8, relaxed_acceptance=True), setup(layout=TP8_EP8)),
    "transfer": (setup(role="decode", transfer="UCX"), setup("h200", FP8, role="decode", transfer="UCX")),
    "measured": (setup("b300"), setup()),
    "sm": (setup("rtx_pro_6000"), setup("b300")),
    "format": (setup("h200", V2), setup("h200", W4A16)),
    "experts": (setup(formats=dict.fromkeys(LINEAR_CLASSES, "mxfp8")), setup()),
    "experts_only": (setup("h200", FP8 | {"o_proj": "mxfp4"}), setup("h200", FP8 | {"routed_experts": "mxfp4"})),
    "columns": (setup(arch=NARROW), setup()),
    "kv_nvfp4": (setup(kv_format="nvfp4"), setup()),
    "kv_bf16": (setup(kv_format="bf16"), setup()),
    "weight_only": (setup("h200", W4A16), setup("h200", FP8)),
    "mixed": (setup(formats=V2 | {"attention": "fp8_block"}), setup()),
    "length": (setup(isl=163_000, osl=2_000, chunked_prefill=True), setup(isl=161_000, osl=2_000, chunked_prefill=True)),
    "positions": (setup(max_seq_len=200_000), setup(max_seq_len=163_840)),
    "max_seq_len": (setup(max_seq_len=2_047), setup(max_seq_len=2_048)),
    "prompt": (setup(isl=8192), setup(isl=8192, chunked_prefill=True)),
    "beside": (setup("h200", FP8, isl=1000, max_num_tokens=1024, max_batch_size=128),
               setup("h200", FP8, isl=1000, max_num_tokens=1127, max_batch_size=128)),
    "decode_tokens": (setup(max_batch_size=2048, max_num_tokens=2176, mtp=1),
                      setup(max_batch_size=1024, max_num_tokens=2176, mtp=1)),
    "gpus": (setup(layout=Layout(16, 16, True)), setup("gb200", layout=Layout(16, 16, True))),
    "expert_ep": (setup("gb200", layout=Layout(72, 72, True)), setup("gb200", layout=Layout(72, 72, True), expert_slots=288)),
    "expert_tp": (setup(layout=Layout(4, 8, True)), setup(layout=Layout(4, 4, True))),
    "expert_blocks": (setup("h200", FP8, layout=Layout(32, 1, False)), setup("h200", FP8, layout=TP8)),
    "heads": (setup(arch=arch("kimi_k2"), layout=Layout(6, 6, False)), setup(arch=arch("kimi_k2"), layout=Layout(4, 4, False))),
    "attention_blocks": (setup("gb200", FP8, layout=Layout(128, 128, False), arch=replace(arch(), v_head_dim=64)),
                         setup("gb200", FP8, layout=TP8, arch=replace(arch(), v_head_dim=64))),
    "stages": (setup(layout=Layout(1, 1, False, pp=62)), setup(layout=Layout(4, 4, True, pp=2))),
    "prefill_stages": (setup(layout=Layout(4, 4, True, pp=2), role="prefill"), setup(layout=Layout(8, 8, True), role="prefill")),
    "nodes": (setup("gb200"), setup()),
    "idle": (setup(concurrency=4), setup(layout=TP8_EP8, concurrency=4)),
    "uneven": (setup(concurrency=20), setup(concurrency=24)),
    "shared_experts": (setup("gb200", FP8, layout=Layout(32, 32, False)), setup("gb200", FP8, layout=Layout(16, 16, False))),
    "balance": (setup(version="1.0", balanced=False), setup()),
    "moe_kernels": (setup(formats=FP8, moe_backend="CUTLASS"), setup(formats=FP8, moe_backend="TRTLLM")),
    "moe_of_line": (setup(version="1.3", moe_backend="WIDEEP"), setup(version="1.2", moe_backend="WIDEEP")),
    "wideep": (setup(layout=TP8_EP8, moe_backend="WIDEEP"), setup(moe_backend="WIDEEP")),
    "moe_slots": (setup(expert_slots=248), setup(expert_slots=256)),
    "moe_balancer": (setup(expert_slots=288, moe_backend="VANILLA"), setup(expert_slots=288)),
    "moe_unknown": (setup(moe_backend="TRITON"), setup(moe_backend="AUTO")),
    "mtp_format": (setup(moe_backend="TRTLLM", mtp=1), setup(moe_backend="CUTLASS", mtp=1)),
    "deepgemm_mtp": (setup(formats=FP8, moe_backend="DEEPGEMM", mtp=1, fraction=0.6),
                     setup(formats=FP8, moe_backend="DEEPGEMM", mtp=1, fraction=0.5)),
    "deepgemm_tp": (setup(formats=FP8, layout=TP8, moe_backend="DEEPGEMM"), setup(formats=FP8, moe_backend="DEEPGEMM")),
    "deepep_fp4": (setup(version="1.0", moe_backend="WIDEEP"), setup(version="1.2", moe_backend="WIDEEP")),
    "fits": (setup("h20", FP8), setup("h20", FP8, layout=TP8_EP8)),
    "one": (setup("h20", FP8, layout=TP8_EP8, isl=80_000, osl=50_000, chunked_prefill=True),
            setup("h20", FP8, layout=TP8_EP8, isl=8_000, osl=1_000, chunked_prefill=True)),
    "room": (setup(concurrency=12_000, ttft_ms=2_000.0), setup(concurrency=5_000, ttft_ms=2_000.0)),
    "queue": (setup(concurrency=12_000), setup(concurrency=5_000)),
    "sequence": (setup("h20", FP8, layout=TP8_EP8, max_seq_len=163_840), setup(max_seq_len=163_840)),
}  # fmt: skip
PUBLIC: dict[str, str] = {
    "NVIDIA/TensorRT-LLM issue 2869": "format",
    "NVIDIA/TensorRT-LLM issue 5018": "version",
    "NVIDIA/TensorRT-LLM issue 5064": "moe_kernels",
    "NVIDIA/TensorRT-LLM issue 3118": "moe_kernels",
    "NVIDIA/TensorRT-LLM issue 10395": "moe_kernels",
    "NVIDIA/TensorRT-LLM pull request 19199": "sm",
    "NVIDIA/TensorRT-LLM issue 18039": "sm",
    "NVIDIA/TensorRT-LLM issue 4037": "version",
    "NVIDIA/TensorRT-LLM issue 3486": "beside",
    "NVIDIA/TensorRT-LLM pull request 13357": "deepgemm_mtp",
    "NVIDIA/TensorRT-LLM pull request 12823": "deepgemm_mtp",
    "NVIDIA/TensorRT-LLM issue 17025": "mtp_crash",
    "deepseek_v3/README.md, relaxed acceptance": "relaxed_adp",
    "deepseek_v3/README.md, known issues": "mtp_accuracy",
    "NVIDIA/TensorRT-LLM issue 10688": "graphs_above",
    "SemiAnalysisAI/InferenceX pull request 2596": "graphs_above",
    "NVIDIA/TensorRT-LLM issue 2968": "version",
    "NVIDIA/TensorRT-LLM issue 17665": "transfer",
    "NVIDIA/TensorRT-LLM issue 9752": "transfer",
    "NVIDIA/TensorRT-LLM pull request 6024": "transfer",
    "NVIDIA/TensorRT-LLM pull request 4792": "deepep_fp4",
    "TensorRT-LLM 1.2 release notes": "prefill_stages",
    "TensorRT-LLM 1.3.0rc20 release notes": "release",
    "NVIDIA/TensorRT-LLM issue 5872": "fits",
    "vllm-project/vllm issue 54189": "weight_only",
    "ai-dynamo/aiconfigurator issue 652": "queue",
    "ai-dynamo/dynamo issue 8469": "fits",
}
ASKED: dict[str, Setup] = {
    "NVIDIA/TensorRT-LLM issue 2869": setup("h200", V2),
    "NVIDIA/TensorRT-LLM issue 5018": setup("rtx_pro_6000", V2, version="0.19"),
    "NVIDIA/TensorRT-LLM issue 5064": setup(formats=FP8, moe_backend="CUTLASS", layout=TP8),
    "NVIDIA/TensorRT-LLM issue 3118": setup(formats=FP8, moe_backend="CUTLASS", layout=TP8, mtp=3),
    "NVIDIA/TensorRT-LLM issue 10395": setup("b300", FP8, moe_backend="CUTLASS"),
    "NVIDIA/TensorRT-LLM pull request 19199": setup(hw=CHIP_107, formats=FP8),
    "NVIDIA/TensorRT-LLM issue 18039": setup("rtx_pro_6000", V2),
    "NVIDIA/TensorRT-LLM issue 4037": setup(version="0.20", chunked_prefill=True),
    "NVIDIA/TensorRT-LLM issue 3486": setup("h200", FP8, isl=1000, osl=2000, max_num_tokens=1024, max_batch_size=128,
                                            graph_sizes=tuple(range(1, 129)), concurrency=1024),
    "NVIDIA/TensorRT-LLM pull request 13357": setup(formats=FP8, moe_backend="DEEPGEMM", mtp=1, fraction=0.6),
    "NVIDIA/TensorRT-LLM pull request 12823": setup("b300", FP8, moe_backend="DEEPGEMM", mtp=1, fraction=0.6),
    "NVIDIA/TensorRT-LLM issue 17025": setup("gb300", version="1.3.0rc21", mtp=1, layout=Layout(4, 4, True)),
    "deepseek_v3/README.md, relaxed acceptance": setup(relaxed_acceptance=True, mtp=3),
    "deepseek_v3/README.md, known issues": setup(version="1.0", mtp=3),
    "NVIDIA/TensorRT-LLM issue 10688": setup(graph_sizes=(1, 2, 114), max_batch_size=5),
    "SemiAnalysisAI/InferenceX pull request 2596": setup(graph_sizes=(1, 2, 4), max_batch_size=2),
    "NVIDIA/TensorRT-LLM issue 2968": setup("h20", FP8, layout=TP8_EP8, version="0.19"),
    "NVIDIA/TensorRT-LLM issue 17665": setup("gb200", layout=Layout(32, 32, True), role="decode", transfer="NIXL"),
    "NVIDIA/TensorRT-LLM issue 9752": setup(role="prefill"),
    "NVIDIA/TensorRT-LLM pull request 6024": setup(role="prefill", transfer="UCX"),
    "NVIDIA/TensorRT-LLM pull request 4792": setup(version="1.0", moe_backend="WIDEEP"),
    "TensorRT-LLM 1.2 release notes": setup(layout=Layout(4, 4, True, pp=2), role="prefill"),
    "TensorRT-LLM 1.3.0rc20 release notes": setup(version="1.3.0rc20"),
    "NVIDIA/TensorRT-LLM issue 5872": setup("h100", FP8),
    "vllm-project/vllm issue 54189": setup("h200", W4A16),
    "ai-dynamo/aiconfigurator issue 652": setup(concurrency=12_000),
    "ai-dynamo/dynamo issue 8469": setup("h100", FP8, layout=TP8_EP8),
}  # fmt: skip


def test_every_rule_has_a_case_a_source_and_its_own_name():
    assert {rule.id for rule in RULES} == CASES.keys()
    assert len({rule.id for rule in RULES}) == len(RULES) == len(table())
    assert all(rule.source and rule.level in (REFUSE, WARN) for rule in RULES)


@pytest.mark.parametrize("rule", CASES)
def test_rule(rule):
    breaking, keeping = CASES[rule]
    finding = found(breaking)[rule]
    assert re.search(r"\d|=", finding.text) and finding.text.endswith((".", "them."))
    assert rule not in found(keeping)


@pytest.mark.parametrize("case", PUBLIC)
def test_public_case(case):
    assert PUBLIC[case] in found(ASKED[case])


def test_nothing_is_found_where_nothing_is_odd():
    assert found(setup()) == {}


@pytest.mark.parametrize("name", RECIPES)
def test_published_recipe_is_not_refused(name):
    hw, formats = "h200" if "__H200__" in name else "b200", FP8 if "0528__" in name else V2
    lengths = re.search(r"(\d)k(\d)k_tp\d_conc(\d+)", name)
    isl, osl, concurrency = (int(text) for text in lengths.groups()) if lengths else (1, 1, None)
    model = arch("kimi_k2" if "kimi" in name else "deepseek_r1")
    base = setup(hw, formats, arch=model, isl=1024 * isl, osl=1024 * osl, concurrency=concurrency)
    read = read_llm_args(RECIPES[name], base)
    assert [finding.text for finding in check(read.setup) if finding.level == REFUSE] == []


@pytest.mark.parametrize("row", KNOWN["measured"], ids=lambda row: "-".join(map(str, row)))
def test_measured_configuration_is_not_refused(row):
    asked = dict(zip(KNOWN["columns"], row, strict=True))
    fp4, adp, tp = asked["precision"] == "fp4", asked["attention_dp"], asked["tp"]
    hw = replace(machine(asked["hw"]), num_nodes=max(1, tp // machine(asked["hw"]).num_devices))
    backend = "CUTLASS" if hw.sm == 90 or (fp4 and adp) else "DEEPGEMM" if adp and asked["ep"] > 1 else "TRTLLM"
    known = setup(
        hw=hw, formats=V2 if fp4 else FP8, layout=Layout(tp, asked["ep"], adp), version=asked["version"],
        mtp=(1 if adp else 3) if asked["mtp"] else 0, moe_backend=backend, max_num_tokens=asked["isl"] + 512,
        isl=asked["isl"], osl=asked["osl"], concurrency=asked["concurrency"], role=asked["role"],
    )  # fmt: skip
    assert [finding.text for finding in check(known) if finding.level == REFUSE] == []


def test_old_spellings_are_read_and_named():
    read = read_llm_args({"tp_size": 8, "moe_backend": "TRTLLM", "kv_cache_dtype": "fp8", "cuda_graph_config": None}, setup())
    assert (read.setup.layout, read.setup.moe_backend, read.setup.kv_format) == (TP8, "TRTLLM", "fp8")
    assert read.setup.captured == 0
    assert len(read.renamed) == 3 and "moe_config.backend" in read.renamed[1]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_llm_args({"max_batch_size": "many"}, setup())


def test_unknown_keys_are_named_with_the_nearest():
    args = {"max_num_token": 8192, "moe_config": {"backend": "TRTLLM", "max_tokens": 1}, "use_cuda_graph": False}
    read = read_llm_args(args, setup())
    assert [re.findall(r"did you mean (\w+)", text) for text in read.unknown] == [["max_num_tokens"], ["max_num_tokens"]]
    assert read.setup.captured == 0 and len(read.renamed) == 1


def test_no_key_of_a_published_recipe_is_unknown():
    assert [text for args in RECIPES.values() for text in read_llm_args(args, setup()).unknown] == []


def test_absent_arguments_are_the_engines_defaults():
    read = read_llm_args({"tensor_parallel_size": 8}, setup()).setup
    assert (read.layout, read.max_batch_size, read.max_num_tokens, read.captured, read.fraction) == (TP8, 2048, 8192, 128, 0.9)
    assert read.moe_backend == "AUTO"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("+hw=h200", "model=deepseek_r1", "quant=nvfp4"), ("nvfp4", "SM90", "Nearest that works: quant=fp8_block (ADP8+EP8)")),
        (("+hw=rtx_pro_6000", "model=deepseek_r1", "engine=trtllm"), ("SM120", "engine=torch")),
        (("+hw=cpu", "engine=trtllm"), ("a CPU", "engine=torch")),
        ((*R1_B200, "workload.isl=163000", "workload.osl=2000"), ("165,000", "163,840", "1,160", "workload.isl=161840")),
        ((*R1_B200, "parallel.tp=16"), ("parallel.tp=16", "8 GPUs", "hw.num_nodes=2")),
        ((*R1_B200, "parallel.tp=3"), ("parallel.tp=3 does not divide the 256 routed", "set parallel.tp=2", "parallel.tp=null")),
        ((*R1_B200, "parallel.tp=8", "parallel.ep=3"), ("parallel.ep=3", "256 routed experts", "parallel.ep=null")),
        ((*R1_B200, "parallel.tp=4", "parallel.ep=8"), ("parallel.ep=8", "parallel.tp=4")),
        (("+hw=b200", "parallel.tp=8", "parallel.attention_dp=false"), ("4 heads", "attention_dp=true")),
        (("+hw=h200", "parallel.tp=4", "parallel.ep=2"), ("128 columns", "fp8_block", "raise parallel.ep")),
        ((*R1_B200, "parallel.pp=62"), ("parallel.pp=62", "61 layers")),
        (("+hw=b200", "model=kimi_k2", "engine.trtllm.mtp=2"), ("no MTP layer", "mtp=0")),
        ((*R1_B200, "engine.trtllm.moe_backend=DEEPGEMM"), ("DEEPGEMM", "nvfp4", "TRTLLM", "moe_backend=auto")),
        ((*R1_B200, "engine.trtllm.version=0.21"), ("0.21", "1.2")),
        ((*R1_B200, "engine.trtllm.version=1.3", "engine.trtllm.moe_backend=WIDEEP"), ("1.3", "WIDEEP")),
        ((*R1_B200, "workload.concurrency=40000"), ("holds", "concurrency=40000", "queue", "works: workload.concurrency=")),
        (
            (*R1_B200, "workload.concurrency=20000", "slo.ttft_ms=9000", "engine.trtllm.free_gpu_memory_fraction=0.3"),
            ("concurrency=20000", "Nearest that works: workload.concurrency=2"),
        ),
        (
            (*R1_B200, "workload.concurrency=6000", "slo.ttft_ms=9000", "engine.trtllm.free_gpu_memory_fraction=0.5"),
            ("concurrency=6000", "works: engine.trtllm.free_gpu_memory_fraction=null"),
        ),
        ((*R1_B200, "workload.concurrency=8000", "slo.ttft_ms=500"), ("holds", "slo.ttft_ms=500")),
        (("+hw=h20", "model=deepseek_r1", "parallel=adp8_ep8"), ("does not fit", "95.0 GiB", "(TP8+EP8)")),
        (("+hw=h200", "model=deepseek_r1", "quant=bf16"), ("does not fit", "139.8 GiB", "quant=fp8_block")),
        (("+hw=h100", "model=deepseek_r1"), ("does not fit", "79.2 GiB", "hw.num_nodes=2")),
        ((*R1_B200, "quant.kv_dtype=nvfp4"), ("kv_dtype=nvfp4", "MLA", "kv_dtype=fp8")),
        (("+hw=cpu", "model=deepseek_r1"), ("2,685,292,992,512", "8,589,934,592", "engine=trtllm")),
        (("+hw=cpu", "engine.torch.max_seq_len=4096"), ("4096", "2048")),
    ],
)
def test_refusal_names_the_value_the_limit_and_the_way_out(overrides, words):
    text = refusal(*overrides)
    for word in words:
        assert word in text, text


def test_all_reasons_come_together_with_one_way_out():
    text = refusal(
        "+hw=h200", "model=deepseek_r1", "quant=nvfp4", "parallel.tp=16", "parallel.ep=3", "workload.isl=200000",
        "engine.trtllm.moe_backend=DEEPGEMM",
    )  # fmt: skip
    *reasons, last = text.splitlines()
    assert len(reasons) == 6
    assert last.startswith("Nearest that works: ") and "quant=fp8_block" in last
    edits = dict(word.split("=", 1) for word in re.findall(r"[\w.]+=\S+", last))
    assert edits.keys() >= {"parallel.ep", "workload.isl", "engine.trtllm.moe_backend"}


def test_the_nearest_that_works_does():
    last = refusal("+hw=h200", "model=deepseek_r1", "quant=nvfp4", "parallel.tp=16", "parallel.ep=3").splitlines()[-1]
    edits = re.findall(r"[\w.]+=\S+", last)
    assert plan("+hw=h200", "model=deepseek_r1", *edits).report["layout"] in last


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (("+hw=gb200", "model=deepseek_r1", "parallel.tp=8"), "nodes"),
        ((*R1_B200, "parallel=adp8_ep8", "workload.concurrency=4"), "idle"),
        (("+hw=h200", "model=deepseek_r1"), "measured"),
        ((*R1_B200, "workload=latency"), "mtp_format"),
        ((*R1_B200, "quant=fp8_block", "workload.concurrency=256"), "deepgemm_mtp"),
        ((*R1_B200, "engine.trtllm.version=1.0"), "balance"),
        (("+hw=gb300", "model=deepseek_r1", "engine.trtllm.version=1.3", "workload.concurrency=256"), "mtp_crash"),
        ((*R1_B200, "engine.trtllm.moe_backend=WIDEEP"), "moe_unknown"),
        ((*R1_B200, "quant.kv_dtype=bf16"), "kv_bf16"),
        ((*R1_B200, "workload.concurrency=8000"), "queue"),
        (("+hw=h100", "model=deepseek_r1", "hw.num_nodes=2"), "nodes"),
        (R1_B200, None),
    ],
)
def test_what_the_recipes_choose_is_warned_of(overrides, rule):
    config = config_of(*overrides)
    findings = check(choose(case_of(config, Arch.from_hf(config.model.hf))).setup)
    assert not rule or rule in {finding.rule for finding in findings}
    assert bool(findings) == bool(rule) and all(finding.level == WARN for finding in findings)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (("+hw=b200",), "2048 positions"),
        (("+hw=h100", "model=deepseek_r1", "hw.num_nodes=2", "parallel=adp16_ep16"), "cross the network"),
        (("+hw=cpu",), "the engine holds 1,024"),
    ],
)
def test_a_plan_says_what_it_was_warned_of(overrides, word):
    warnings = plan(*overrides).report["warnings"]
    assert any(word in text for text in warnings), warnings


def test_nothing_is_said_where_nothing_is_odd():
    assert plan(*R1_B200).report["warnings"] == []
