"""Warming a bundle, with a double of the engine (tests/_utils/fake_warm_engine.py) and of nvidia-smi. Nothing here has a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import load
from pipeline.core.errors import MissingToolError, StageError
from pipeline.core.jsonio import read_json, write_json
from pipeline.core.stage import StageContext
from pipeline.engines import trtllm
from pipeline.engines.trtllm.build import build
from pipeline.engines.trtllm.llm_args import render, to_yaml
from pipeline.engines.trtllm.versions import version_line
from pipeline.engines.trtllm.warm import warm
from pipeline.launch.render import write
from pipeline.launch.script import fill
from pipeline.planner.plan import make_plan
from scripts.lint_rendered import lint_text
from tests._utils.trtllm import Notes

ARGS = {
    "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "cuda_graph_config": {"max_batch_size": 8},
    "cache_transceiver_config": {"backend": "UCX"},
}  # fmt: skip


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle, on a machine that seems to have two GPUs and tensorrt_llm."""
    tools, out = tmp_path / "tools", tmp_path / "out"
    (out / "checkpoint").mkdir(parents=True)
    (out / "checkpoint" / "config.json").write_text("{}")
    (out / "llm_args.yaml").write_text(yaml.safe_dump(ARGS))
    tools.mkdir()
    shutil.copyfile(Path(__file__).parents[1] / "_utils" / "fake_warm_engine.py", tools / "tensorrt_llm.py")
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: double (UUID: a)'\necho 'GPU 1: double (UUID: b)'\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(tools), prepend=":")
    return out


def test_it_keeps_tactics_and_kernels_and_says_how_far_it_is(bundle):
    progress = Notes()
    kept = warm(bundle, {"aggregated": ARGS}, [{"name": "A", "value": "b"}], progress)
    assert kept == [
        "cache/aggregated/autotuner.json", "cache/aggregated/deep_gemm/cache/kernel.fp8_gemm/nvrtc_kernel.cubin",
    ]  # fmt: skip
    assert [note.removeprefix("aggregated: the engine ") for note in progress] == [
        "loads the weights", "tunes kernels", "has tuned 112 shapes", "captures 1 CUDA graphs", "answers a first prompt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("crash", "was ended by signal 11 .*\n.*\n  Signal: Segmentation fault"),
        ("refuse", "ended with code 1 (.|\n)*could not be created: KV cache"),
    ],
)
def test_an_engine_that_dies_is_a_sentence(bundle, monkeypatch, end, said):
    monkeypatch.setenv("FAKE_END", end)
    with pytest.raises(StageError, match=said):
        warm(bundle, {"aggregated": ARGS}, [], Notes())


def test_too_few_gpus_are_told_before_anything_is_loaded(bundle):
    with pytest.raises(MissingToolError, match="takes 4 GPUs, and this machine shows 2"):
        warm(bundle, {"aggregated": {**ARGS, "pipeline_parallel_size": 2}}, [], Notes())
    assert not (bundle / "cache").exists()


def test_the_engine_stage_lists_what_was_kept(bundle):
    config = load(["+hw=b200", "model=deepseek_r1", "engine.trtllm.warm=true"])
    out, plan, convert = (bundle.parent / name for name in ("stage", "plan", "convert"))
    for folder in (out, plan, convert):
        folder.mkdir()
    write_json(plan / "deploy.json", {**make_plan(config, config.model.hf).deploy, "tp": 2, "ep": 2})
    (convert / "config.json").write_text("{}")
    ctx = StageContext(
        config=config, inputs={"plan": plan, "convert": convert}, checkpoint=None, out=out, progress=Notes()
    )  # fmt: skip
    build(ctx)
    engine = read_json(out / "engine.json")
    assert engine["warmed"] and all((out / name).is_file() for name in engine["warmed"])
    assert "loaded and warmed here; not served" in engine["not_run"]
    assert "aggregated: the engine tunes kernels" in ctx.progress


def test_a_server_starts_with_a_writable_copy_of_what_was_kept(tmp_path):
    kept = tmp_path / "package" / "cache" / "generation"
    kept.mkdir(parents=True)
    (kept / "autotuner.json").write_text("tuned")
    (kept / "autotuner.json").chmod(0o444)
    script = f"set -eu; package={tmp_path}/package name=generation-1 prefix=generation_1_ rank=3\n{fill('warm.sh')}"
    script += 'echo more >>"$TLLM_AUTOTUNER_CACHE_PATH"; env | grep TRTLLM_DG_CACHE_DIR'
    for _ in range(2):  # what an earlier run left is replaced
        done = subprocess.run(["bash", "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}, text=True, capture_output=True)
        copy = tmp_path / "warmed_generation_1_3"
        assert done.stdout == f"TRTLLM_DG_CACHE_DIR={copy}/deep_gemm\n", done.stderr
        assert (copy / "autotuner.json").read_text() == "tunedmore\n"


def test_a_warmed_bundle_is_packaged_with_what_was_kept(tmp_path):
    engine = tmp_path / "engine"
    (engine / "cache" / "aggregated").mkdir(parents=True)
    (engine / "cache" / "aggregated" / "autotuner.json").write_text("tuned")
    config = load(["+hw=b200", "model=deepseek_r1"])
    deploy = make_plan(config, config.model.hf).deploy
    args = render(deploy, version_line("1.2"))
    (engine / "llm_args.yaml").write_text(to_yaml(args))
    write_json(engine / "engine.json", {"kind": "trtllm", "line": "1.2", "warmed": ["cache/aggregated/autotuner.json"]})
    write_json(tmp_path / "deploy.json", deploy)
    package = tmp_path / "package"
    package.mkdir()
    ctx = StageContext(config=config, inputs={"engine": engine, "plan": tmp_path}, checkpoint=None, out=package, progress=Notes())
    write(ctx, package / "launch")
    assert (package / "cache" / "aggregated" / "autotuner.json").read_text() == "tuned"
    script = (package / "launch" / "instance.sh").read_text()
    assert "TLLM_AUTOTUNER_CACHE_PATH" in script and list(lint_text("instance.sh", script)) == []


@pytest.mark.parametrize(("installed", "said"), [(None, "no tensorrt_llm is"), ("1.3.0rc22", "tensorrt_llm 1.3.0rc22 is")])
def test_warming_takes_the_engine_of_the_line(monkeypatch, installed, said):
    monkeypatch.setattr(trtllm, "installed_version", lambda: installed)
    config = load(["+hw=b200", "model=deepseek_r1", "engine.trtllm.warm=true"])
    with pytest.raises(MissingToolError, match=said):
        trtllm.requires(config)
    assert trtllm.determinism(config) == "numeric"
    monkeypatch.setattr(trtllm, "installed_version", lambda: "1.2.1")
    trtllm.requires(config)
