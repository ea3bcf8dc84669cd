"""The planner's arithmetic and choices, on public numbers and published measurements."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path

import pytest
import yaml

import pipeline
from pipeline.checkpoint.reader import raw_header
from pipeline.config.load import choices, load
from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.core.jsonio import read_json
from pipeline.models.arch import Arch
from pipeline.planner.case import case_of
from pipeline.planner.params import LINEAR_CLASSES, main_parts, num_params, stored_bytes
from pipeline.planner.plan import Plan, make_plan
from pipeline.planner.render import render
from pipeline.planner.stored import read_headers
from pipeline.planner.torch_limits import torch_memory

R1 = load(["+hw=b200", "model=deepseek_r1"]).model.hf
FP8 = dict.fromkeys((*LINEAR_CLASSES, "mtp"), "fp8_block")
TINY_FOLDER = Path(pipeline.__file__).parent / "data" / "tiny_r1"
TINY = read_json(TINY_FOLDER / "config.json")


def config_of(*overrides: str) -> Config:
    """What `load` gives for choices of groups, with single values set without Hydra, which takes a third of a second a call."""
    groups = tuple(text for text in overrides if "." not in text.partition("=")[0])
    config = copy.deepcopy(_chosen(groups))
    for name, _, value in (text.partition("=") for text in overrides if text not in groups):
        *path, last = name.split(".")
        section = reduce(getattr, path, config)
        assert last in section.__slots__, name
        setattr(section, last, value if last == "version" else yaml.safe_load(value))
    return config


@cache
def _chosen(groups: tuple[str, ...]) -> Config:
    return load(list(groups))


@cache
def plan(*overrides: str) -> Plan:
    """Kept for the next test that asks the same: do not change it."""
    return fresh(*overrides)


def fresh(*overrides: str) -> Plan:
    config = config_of(*overrides)
    return make_plan(config, config.model.hf or TINY)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        plan(*overrides)
    return str(error.value)


def test_bytes_of_the_embedded_checkpoint_are_exact():
    index = read_json(TINY_FOLDER / "model.safetensors.index.json")
    assert sum(stored_bytes(Arch.from_hf(TINY), FP8).values()) == index["metadata"]["total_size"]


def test_kimi_k2_has_a_trillion_parameters():
    hf = load(["+hw=b200", "model=kimi_k2"]).model.hf
    assert round(num_params(main_parts(Arch.from_hf(hf))) / 1e9) == 1026


@pytest.mark.parametrize("hw", ["b200", "b300", "gb200", "gb300"])
def test_blackwell_plans_fp4_with_attention_dp(hw):
    deploy = plan(f"+hw={hw}", "model=deepseek_r1").deploy
    assert deploy["attention_dp"]
    assert deploy["moe_backend"] == "CUTLASS"
    assert deploy["cuda_graph_max_batch_size"] <= deploy["max_batch_size"]


def test_h200_needs_the_node_and_h20_attention_tp():
    h200, h20 = plan("+hw=h200", "model=deepseek_r1").deploy, plan("+hw=h20", "model=deepseek_r1").deploy
    assert (h200["tp"], h200["ep"], h200["attention_dp"]) == (8, 8, True)
    assert (h20["tp"], h20["attention_dp"]) == (8, False)


def test_h100_is_refused_with_bytes_and_the_number_of_gpus_that_would_do():
    text = refusal("+hw=h100", "model=deepseek_r1")
    assert "bytes" in text and "79.2 GiB" in text and "16 GPUs" in text


def test_latency_takes_nvidias_layout_and_three_drafts():
    deploy = plan("+hw=b200", "model=deepseek_r1", "workload=latency").deploy
    assert (deploy["tp"], deploy["attention_dp"], deploy["mtp"]) == (8, False, 3)
    assert (deploy["moe_backend"], deploy["max_batch_size"], deploy["stream_interval"]) == ("TRTLLM", 1, 1)


def test_batch_and_tokens_are_per_rank_as_in_nvidias_recipe():
    """1k/1k on four B200 at concurrency 256: NVIDIA's file says 64 and 1,216."""
    given = ("workload.osl=1024", "workload.concurrency=256", "parallel=adp4_ep4", "engine.trtllm.mtp=1")
    deploy = plan("+hw=b200", "model=deepseek_r1", *given).deploy
    assert (deploy["tp"], deploy["attention_dp"], deploy["mtp"]) == (4, True, 1)
    assert (deploy["max_batch_size"], deploy["max_num_tokens"]) == (64, 1216)


def test_fp8_on_blackwell_takes_deepgemm_only_under_attention_dp():
    fp8 = ("+hw=b200", "model=deepseek_r1", "quant=fp8_block")
    assert plan(*fp8, "workload.concurrency=256").deploy["moe_backend"] == "DEEPGEMM"
    assert plan(*fp8, "workload.concurrency=8").deploy["moe_backend"] == "TRTLLM"


def test_a_time_limit_per_token_turns_attention_dp_off():
    deploy = plan("+hw=b200", "model=deepseek_r1", "workload.concurrency=32", "slo.tpot_ms=8").deploy
    assert not deploy["attention_dp"]


@pytest.mark.parametrize("hw", choices("hw"))
def test_the_embedded_model_plans_everywhere(hw):
    found = plan(f"+hw={hw}")
    assert found.deploy["max_seq_len"] <= TINY["max_position_embeddings"]
    assert found.precision["formats"].keys() == {*LINEAR_CLASSES, "mtp", "embed", "lm_head", "norm", "router"}


def test_tiny_r1_on_eight_gpus_falls_back_to_attention_dp():
    deploy = plan("+hw=h200", "parallel.tp=8").deploy
    assert (deploy["tp"], deploy["ep"], deploy["attention_dp"]) == (8, 8, True)


def test_the_torch_engine_keeps_its_own_limits():
    deploy = plan("+hw=cpu", "engine.torch.max_batch_size=3").deploy
    assert (deploy["engine"], deploy["max_batch_size"], deploy["tp"]) == ("torch", 3, 1)


def test_the_command_line_wins_over_a_hardware_file():
    config = load(["+hw=b200", "model=deepseek_r1", "quant=fp8_block", "engine=torch"])
    assert (config.quant.name, config.engine.kind) == ("fp8_block", "torch")


def test_every_decision_has_a_reason_and_the_report_prints():
    report = plan("+hw=b200", "model=deepseek_r1").report
    assert all(row["reason"] for row in report["decisions"])
    text = "\n".join(render(report))
    for word in ("routed_experts", "kv_cache", "max_batch_size", "178.35", "671,026,419,200"):
        assert word in text
    assert sum(row["bytes"] for row in report["memory"]["rows"]) == report["memory"]["visible"]


def test_the_report_has_formats_and_every_stage():
    memory = plan("+hw=h100", "model=deepseek_r1", "hw.num_nodes=2", "parallel=tp8_ep8_pp2").report["memory"]
    formats = {row["component"]: row["format"] for row in memory["rows"]}
    assert (formats["routed_experts"], formats["attention"], formats["kv_cache"]) == ("fp8_block", "fp8_block", "fp8")
    assert [stage["ranks"] for stage in memory["stages"]] == [[0, 7], [8, 15]]
    assert memory["weights"] in {stage["weights"] for stage in memory["stages"]}


def test_a_plan_is_the_same_twice():
    assert fresh("+hw=b200", "model=deepseek_r1") == fresh("+hw=b200", "model=deepseek_r1")


def test_experts_that_plugins_compute_keep_their_format_in_the_torch_engine():
    words = ["+hw=h200", "model=deepseek_r1", "quant=fp8_block", "engine=torch"]
    config = config_of(*words, "engine.torch.device=cuda", "engine.torch.dtype=bfloat16")
    sizes = {}
    for plugins in ("auto", "off"):
        config.engine.torch.plugins = plugins
        sizes[plugins] = torch_memory(case_of(config, Arch.from_hf(R1)))
    experts = 58 * 256 * 3 * 7168 * 2048
    assert sizes["off"]["routed_experts"] == 2 * experts
    assert sizes["auto"]["routed_experts"] == experts + 4 * experts // 128**2
    assert sizes["auto"]["attention"] == sizes["off"]["attention"]


def test_planning_needs_no_torch():
    code = (
        "import sys; from pipeline.config.load import load; from pipeline.planner.plan import make_plan; "
        "c = load(['+hw=b200', 'model=deepseek_r1']); make_plan(c, c.model.hf); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_mtp_layer_counts_once():
    none, one, many = (stored_bytes(Arch.from_hf({**R1, "num_nextn_predict_layers": n}), FP8)["mtp"] for n in (0, 1, 7))
    assert none == 0 and many == 7 * one > 7 * 10e9


def test_weights_are_counted_in_the_headers_of_the_checkpoint(tmp_path, monkeypatch):
    """What is stored decides: a weight of another shape is refused, an MTP layer that is not there is not planned for."""
    arch = Arch.from_hf(TINY)
    found = read_headers(TINY_FOLDER, arch)
    assert found.parameters == num_params(main_parts(arch)) and found.drafts
    assert read_headers(tmp_path, arch) is None, "a folder without weights yet"
    wrong = replace(arch, moe_intermediate_size=arch.moe_intermediate_size * 2)
    with pytest.raises(ConfigError, match=r"_proj\.weight is \[.*config\.json there makes it"):
        read_headers(TINY_FOLDER, wrong)

    def bare(file: Path) -> dict:
        return {name: entry for name, entry in raw_header(file).items() if f"layers.{arch.num_hidden_layers}." not in name}

    monkeypatch.setattr("pipeline.checkpoint.reader.raw_header", bare)
    config = config_of("+hw=b200", "model=tiny_r1")
    report = make_plan(config, TINY, TINY_FOLDER).report
    assert report["checkpoint"]["mtp_layer"] is False and report["deploy"]["mtp"] == 0
    assert any("the checkpoint has none" in text for text in report["warnings"])
