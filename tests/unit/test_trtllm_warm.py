"""Warming a bundle, with a double of the engine (tests/_utils/fake_warm_engine.py) and of nvidia-smi. Nothing here has a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import load
from pipeline.core.errors import MissingToolError, StageError
from pipeline.engines import trtllm
from pipeline.engines.trtllm.warm import warm

ARGS = {
    "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "cuda_graph_config": {"max_batch_size": 8},
    "cache_transceiver_config": {"backend": "UCX"},
}  # fmt: skip


class Notes(list):
    """A `Progress`."""

    start = advance = note = list.append


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


@pytest.mark.parametrize(("installed", "said"), [(None, "no tensorrt_llm is"), ("1.3.0rc22", "tensorrt_llm 1.3.0rc22 is")])
def test_warming_takes_the_engine_of_the_line(monkeypatch, installed, said):
    monkeypatch.setattr(trtllm, "installed_version", lambda: installed)
    config = load(["+hw=b200", "model=deepseek_r1", "engine.trtllm.warm=true"])
    with pytest.raises(MissingToolError, match=said):
        trtllm.requires(config)
    assert trtllm.determinism(config) == "numeric"
    monkeypatch.setattr(trtllm, "installed_version", lambda: "1.2.1")
    trtllm.requires(config)
