"""The bundle for TensorRT-LLM: arguments of each version line, environment, linked checkpoint; and its repository."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError, StageError
from pipeline.core.jsonio import read_json, write_json
from pipeline.core.stage import StageContext
from pipeline.engines.trtllm import toolchain
from pipeline.engines.trtllm.build import build
from pipeline.engines.trtllm.environment import environment
from pipeline.engines.trtllm.llm_args import check, render
from pipeline.engines.trtllm.versions import known_lines, version_line
from pipeline.planner.plan import make_plan
from pipeline.triton import pbtxt
from pipeline.triton.check import check_repository
from pipeline.triton.layouts.llmapi import layout
from tests._utils.trtllm import Notes

R1_B200 = ("+hw=b200", "model=deepseek_r1")


def config_of(*overrides: str) -> Config:
    return load(list(overrides))


@cache
def _planned(overrides: tuple[str, ...]) -> dict:
    config = config_of(*overrides)
    return make_plan(config, config.model.hf).deploy


def deploy_of(*overrides: str) -> dict:
    return dict(_planned(overrides))


def context(folder: Path, config: Config, **inputs: Path) -> StageContext:
    out = folder / "out"
    out.mkdir(parents=True)
    return StageContext(config=config, inputs=inputs, checkpoint=None, out=out, progress=Notes())


@pytest.fixture
def built(tmp_path: Path) -> StageContext:
    """The engine stage's output for R1 on B200, over a stand-in for convert's files."""
    config = config_of(*R1_B200)
    plan, convert = tmp_path / "plan", tmp_path / "convert"
    plan.mkdir()
    (convert / "sub").mkdir(parents=True)
    (convert / "model-00001-of-00001.safetensors").write_bytes(b"weights")
    (convert / "sub" / "config.json").write_text("{}")
    write_json(plan / "deploy.json", deploy_of(*R1_B200))
    ctx = context(tmp_path / "engine", config, plan=plan, convert=convert)
    build(ctx)
    return ctx


@pytest.mark.parametrize("line", known_lines())
@pytest.mark.parametrize("more", [(), ("workload=latency",), ("workload.concurrency=256",), ("quant.kv_dtype=bf16",)])
def test_arguments_are_valid_in_every_line(line, more):
    args = render(deploy_of(*R1_B200, *more), version_line(line))
    assert check(args, version_line(line)) == []
    assert args["trust_remote_code"] is False


def test_the_draft_length_has_the_name_of_its_line():
    deploy = deploy_of(*R1_B200, "workload=latency")
    for line, name in {"1.2": "num_nextn_predict_layers", "1.3": "max_draft_len"}.items():
        assert render(deploy, version_line(line))["speculative_config"] == {"decoding_type": "MTP", name: 3}


def test_balance_is_emitted_only_where_it_means_something():
    assert "attention_dp_config" in render(deploy_of(*R1_B200), version_line("1.2"))
    assert "attention_dp_config" not in render(deploy_of(*R1_B200), version_line("1.0"))
    assert "attention_dp_config" not in render(deploy_of(*R1_B200, "workload=latency"), version_line("1.2"))


def test_agrees_with_nvidias_recipe_for_256_requests_on_four_b200():
    """examples/configs/database/nvidia/DeepSeek-R1-0528-FP4-v2/B200/1k1k_tp4_conc256.yaml @97408a34."""
    recipe = {
        "max_batch_size": 64, "cuda_graph_config": {"enable_padding": True, "max_batch_size": 64},
        "enable_attention_dp": True, "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.8},
        "stream_interval": 10, "moe_config": {"backend": "CUTLASS"},
        "attention_dp_config": {"batching_wait_iters": 0, "enable_balance": True, "timeout_iters": 60},
        "speculative_config": {"decoding_type": "MTP", "max_draft_len": 1},
        "tensor_parallel_size": 4, "moe_expert_parallel_size": 4, "max_num_tokens": 1216, "max_seq_len": 2304,
    }  # fmt: skip
    given = ("parallel=adp4_ep4", "engine.trtllm.mtp=1")
    deploy = deploy_of(*R1_B200, "quant=nvfp4_v2", "workload.osl=1024", "workload.concurrency=256", *given)
    args = render(deploy, version_line("1.3"))
    assert {name: args[name] for name in recipe} == recipe


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"moe_backend": "nope"}, "moe_config.backend=nope must be one of"),
        ({"tp": 0}, "tensor_parallel_size=0"),
        ({"cuda_graph_max_batch_size": 5000}, "exceeds max_batch_size"),
        ({"free_gpu_memory_fraction": 1.5}, "free_gpu_memory_fraction=1.5"),
        ({"ep": 3}, "does not divide"),
        ({"max_num_tokens": 1}, "below max_batch_size"),
    ],
)
def test_wrong_arguments_are_refused_before_a_gpu_is_held(change, word):
    with pytest.raises(StageError, match=word):
        render(deploy_of(*R1_B200) | change, version_line("1.2"))


def test_an_argument_that_the_line_lacks_is_refused():
    line = version_line("1.2")
    fields = {name: row for name, row in line.rows["fields"].items() if name != "stream_interval"}
    with pytest.raises(StageError, match="stream_interval is not an argument"):
        render(deploy_of(*R1_B200), dataclasses.replace(line, rows={**line.rows, "fields": fields}))


def test_unknown_version_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"1\.0, 1\.1, 1\.2, 1\.3, 1\.4"):
        version_line("2.0")
    assert version_line("1.2.1").line == "1.2"


def test_environment_names_reasons_and_leaves_out_defaults():
    h200 = deploy_of("+hw=h200", "model=deepseek_r1", "workload.isl=8192")
    names = {row["name"] for row in environment(h200, version_line("1.1"))}
    assert names == {"TRTLLM_ENABLE_PDL", "TRTLLM_DG_JIT_USE_NVCC", "PYTORCH_ALLOC_CONF"}
    assert environment(deploy_of(*R1_B200), version_line("1.2")) == []
    assert all(row["reason"] and row["source"] for row in environment(h200, version_line("1.0")))


def test_build_links_the_checkpoint_and_says_what_was_not_run(built):
    linked = built.out / "checkpoint" / "model-00001-of-00001.safetensors"
    assert linked.samefile(built.inputs["convert"] / linked.name)
    assert read_json(built.out / "checkpoint.json")["files"] == {linked.name: 7, "sub/config.json": 2}
    assert yaml.safe_load((built.out / "llm_args.yaml").read_text())["tensor_parallel_size"] == 8
    engine = read_json(built.out / "engine.json")
    assert engine["validated_by_engine"] is False
    assert "nothing was loaded or served on NVIDIA B200" in engine["not_run"]
    assert list(built.progress) == [engine["not_run"]]


def test_a_checkpoint_is_never_copied(built, tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    with pytest.raises(StageError, match="one file system"):
        build(context(tmp_path / "again", built.config, **built.inputs))


def test_toolchain_holds_the_line_and_the_installed_version():
    assert toolchain(config_of(*R1_B200)) == {"tensorrt_llm": "not installed", "tensorrt_llm line": "1.2"}


def test_layout_says_decoupled_in_both_places_and_links_the_checkpoint(built, tmp_path):
    ctx = context(tmp_path / "package", built.config, engine=built.out)
    layout(ctx)
    model = ctx.out / "repository" / "deepseek_r1"
    config, settings = pbtxt.read(model / "config.pbtxt"), yaml.safe_load((model / "1" / "model.yaml").read_text())
    assert settings.pop("triton_config") == {"decoupled": True, "max_batch_size": 0}
    assert (config.model_transaction_policy.decoupled, config.max_batch_size) == (True, 0)
    assert settings.pop("model") == "checkpoint"
    assert settings == yaml.safe_load((built.out / "llm_args.yaml").read_text())
    linked = model / "1" / "checkpoint" / "sub" / "config.json"
    assert linked.samefile(built.inputs["convert"] / "sub" / "config.json")
    assert check_repository(ctx.out / "repository").keys() == {"deepseek_r1"}
