"""engine=vllm: what it refuses, the engine arguments that it writes, and the repository for Triton's vLLM backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.core.jsonio import read_json, write_json
from pipeline.core.stage import StageContext
from pipeline.engines.vllm.build import build
from pipeline.engines.vllm.loading import LOADERS, loader_of, refusal
from pipeline.formats import FORMATS
from pipeline.layouts import LAYOUTS, get_layout, stored_as
from pipeline.planner.plan import make_plan
from pipeline.triton import pbtxt, releases
from pipeline.triton.check import check_repository
from pipeline.triton.layouts.vllm import layout
from tests._utils import serving

R1 = ("model=deepseek_r1", "engine=vllm")


def plan(*overrides: str) -> Any:
    config = load([*overrides, *R1])
    return make_plan(config, config.model.hf)


def packaged(folder: Path, *overrides: str) -> tuple[Path, dict[str, Any]]:
    """Plan, engine and package of R1 over a stand-in for convert's files: the package and model.json."""
    config = load([*overrides, *R1])
    for name in ("plan", "convert", "engine", "package/repository"):
        (folder / name).mkdir(parents=True)
    (folder / "convert" / "config.json").write_text("{}")
    write_json(folder / "plan" / "deploy.json", make_plan(config, config.model.hf).deploy)
    common = {"config": config, "checkpoint": None, "progress": serving.Quiet()}
    build(StageContext(inputs={name: folder / name for name in ("plan", "convert")}, out=folder / "engine", **common))
    layout(StageContext(inputs={"engine": folder / "engine"}, out=folder / "package", **common), releases.target(config))
    return folder / "package", read_json(folder / "package" / "repository" / "deepseek_r1" / "1" / "model.json")


def test_the_repository_is_whole_and_its_checkpoint_linked(tmp_path: Path) -> None:
    package, args = packaged(tmp_path, "+hw=b200")
    config = pbtxt.read(package / "repository" / "deepseek_r1" / "config.pbtxt")
    assert (config.backend, config.max_batch_size, config.model_transaction_policy.decoupled) == ("vllm", 0, True)
    assert [pbtxt.pb.ModelInstanceGroup.Kind.Name(group.kind) for group in config.instance_group] == ["KIND_MODEL"]
    assert args["model"] == "repository/deepseek_r1/1/checkpoint", "relative to the folder that the server is started in"
    assert (package / args["model"] / "config.json").samefile(tmp_path / "convert" / "config.json")
    assert check_repository(package / "repository").keys() == {"deepseek_r1"}


def test_many_requests_are_spread_over_engines_and_few_share_one(tmp_path: Path) -> None:
    _, many = packaged(tmp_path / "many", "+hw=b200")
    _, few = packaged(tmp_path / "few", "+hw=b200", "workload.concurrency=8")
    assert (many["data_parallel_size"], many["tensor_parallel_size"], many["enable_expert_parallel"]) == (8, 1, True)
    assert (few["data_parallel_size"], few["tensor_parallel_size"], few["enable_expert_parallel"]) == (1, 8, True)
    assert few["max_num_seqs"] == 8 and many["max_num_seqs"] > 256
    for args in (many, few):
        assert args["max_model_len"] == 1024 + 2048 + 256
        assert args["max_num_batched_tokens"] >= args["max_num_seqs"]
        assert (args["quantization"], args["kv_cache_dtype"], args["block_size"]) == ("modelopt_fp4", "fp8", 64)
        assert (args["gpu_memory_utilization"], args["enable_prefix_caching"]) == (0.9, True)


def test_settings_reach_the_arguments(tmp_path: Path) -> None:
    words = ["engine.vllm.mtp=1", "engine.vllm.version='0.11'", "engine.vllm.enable_prefix_caching=false", "quant.kv_dtype=bf16"]
    _, args = packaged(tmp_path, "+hw=h200", *words)
    assert args["speculative_config"] == {"method": "deepseek_mtp", "num_speculative_tokens": 1}
    assert (args["quantization"], args["kv_cache_dtype"], args["enable_prefix_caching"]) == ("fp8", "auto", False)
    assert read_json(tmp_path / "engine" / "environment.json") == []


def test_the_bundle_says_what_was_not_run_and_names_its_instance(tmp_path: Path) -> None:
    packaged(tmp_path, "+hw=b200")
    engine = read_json(tmp_path / "engine" / "engine.json")
    assert "nothing was loaded or served on NVIDIA B200" in engine["not_run"]
    [instance] = engine["instances"]
    assert (instance["role"], instance["gpus_per_instance"]) == ("aggregated", 8)
    [variable] = read_json(tmp_path / "engine" / "environment.json")
    assert variable["name"] == "VLLM_USE_FLASHINFER_MOE_FP4" and variable["source"]


def test_the_target_is_a_vllm_container() -> None:
    found = releases.target(load(["+hw=b200", *R1, "engine.vllm.version='0.19'"]))
    assert found is not None and found.images["vllm"].container == "tritonserver:26.05-vllm-python-py3"
    with pytest.raises(ConfigError, match=r"serve.triton=26.08 holds vllm 0.27.1, but engine.vllm.version=0.19"):
        releases.target(load(["+hw=b200", *R1, "engine.vllm.version='0.19'", "serve.triton=26.08"]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["+hw=b200", "quant=w4a16_nvfp4"], r"input_scale that nobody wrote .*: set quant\.layout=compressed_tensors"),
        (["+hw=b200", "quant=nvfp4_experts"], r"one format for all weights.*: set quant\.layout=compressed_tensors"),
        (["+hw=b200", "quant=mxfp4_experts"], r"no loader for mxfp4 .*choose quant=nvfp4 or quant=fp8_block"),
        (["+hw=b200", "quant.kv_dtype=nvfp4"], "no NVFP4 cache for MLA"),
        (["+hw=b200", "parallel.tp=8", "parallel.ep=4"], "over all 8 ranks or none: set 8 or 1"),
        (["+hw=b200", "parallel.tp=16"], r"16 GPUs and Triton's vLLM backend serves from one node, which has 8"),
        (["+hw=h200", "quant=bf16"], r"GiB of weights a rank, .* leave no room for one request of 3,072 tokens"),
        (["+hw=b200", "engine.vllm.version='0.9'"], "choose 0.10 or later"),
    ],
)
def test_what_vllm_cannot_load_or_hold_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(*words)


def test_a_cpu_is_refused_with_the_way_out() -> None:
    config = load(["+hw=cpu", *R1])
    with pytest.raises(ConfigError, match="engine=vllm needs GPUs, hw=cpu has none: use engine=torch"):
        make_plan(config, config.model.hf)


def test_every_layout_and_format_has_a_loader_or_a_way_out() -> None:
    for name in LAYOUTS:
        for fmt in FORMATS:
            said = refusal(name, ["bf16", fmt])
            assert (said is None) == (fmt == "bf16" or (name, fmt) in LOADERS)
            assert said is None or ": set quant.layout=" in said or ": choose quant=" in said
    for (name, fmt), loader in LOADERS.items():
        assert loader_of(name, ["bf16", fmt]) == loader
        stored_as(get_layout(name), FORMATS[fmt])  # raises where convert could not write it


def test_an_fp8_cache_on_hopper_is_doubted_in_old_versions() -> None:
    def doubts(*words: str) -> bool:
        return any("vllm issue 18888" in text for text in plan(*words).report["warnings"])

    assert doubts("+hw=h200", "engine.vllm.version='0.10.2'")
    assert not doubts("+hw=h200") and not doubts("+hw=b200", "engine.vllm.version='0.10.2'")
    assert not doubts("+hw=h200", "engine.vllm.version='0.10.2'", "quant.kv_dtype=bf16")


def test_the_report_says_that_no_speed_is_predicted() -> None:
    report = plan("+hw=b200", "workload.concurrency=20000").report
    assert any("No speed is predicted for vLLM" in text for text in report["warnings"])
    assert any("do not fit the cache" in text for text in report["warnings"])
    assert json.dumps(report)
