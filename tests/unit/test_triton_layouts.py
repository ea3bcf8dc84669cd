"""Which layout is chosen, what the package stage makes of it, and the names of the ensemble, without a server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.core.jsonio import read_json
from pipeline.core.stage import StageContext
from pipeline.share import share
from pipeline.stages import package
from pipeline.triton import releases
from pipeline.triton.check import check_repository
from pipeline.triton.dialect import Dialect
from pipeline.triton.layouts import NO_REPOSITORY, bls, chosen, llmapi, torch, vllm
from pipeline.triton.smoke import calls, room_of
from tests._utils import serving

R1 = ("+hw=b200", "model=deepseek_r1")
APART = ("engine.trtllm.serving=disaggregated",)


def ensemble() -> ModuleType:
    """triton_repo/llmapi/1/ensemble.py, which the stub finds beside model.py."""
    spec = importlib.util.spec_from_file_location("names_of_ensemble", share("triton_repo") / "llmapi" / "1" / "ensemble.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        (["+hw=cpu"], "torch"),
        ([*R1], "llmapi"),
        ([*R1, "serve.layout=llmapi"], "llmapi"),
        ([*R1, "serve.layout=bls"], "bls"),
        ([*R1, "engine=vllm"], "vllm"),
        ([*R1, *APART], NO_REPOSITORY),
    ],
)
def test_the_engine_has_a_layout(words, layout):
    assert chosen(load(words)) == layout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["+hw=cpu", "serve.layout=bls"], r"serve\.layout=bls needs engine=trtllm, but engine=torch: use .*=torch, or auto"),
        ([*R1, "serve.layout=vllm"], r"needs engine=vllm, but engine=trtllm: use serve\.layout=llmapi or bls, or auto"),
        ([*R1, *APART, "serve.layout=bls"], "Triton, which cannot serve prefill and decode apart"),
        ([*R1, "serve.layout=ensemble"], "serve.layout=ensemble is not supported: choose one of auto, torch, llmapi, bls, vllm"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_those_that_do(words, says):
    with pytest.raises(ConfigError, match=says):
        chosen(load(words))


def test_a_stage_is_keyed_by_layout_and_release():
    assert package.toolchain(load([*R1]))["triton"] == "26.07"
    assert package.toolchain(load([*R1, "serve.layout=bls"]))["layout"] == "bls"
    with pytest.raises(ConfigError, match=r"serve\.triton=25\.12 holds trtllm 1\.1\.0"):
        package.toolchain(load([*R1, "serve.triton=25.12"]))


def written(layout: ModuleType, folder: Path, release: str | None) -> Path:
    engine = folder / "engine"
    if layout is torch:
        serving.write_fake_engine(engine)
    elif layout is vllm:
        serving.write_fake_vllm_bundle(engine)
    else:
        serving.write_fake_bundle(engine)
    (folder / "out" / "repository").mkdir(parents=True)
    common = {"config": serving.serve_config(), "checkpoint": None, "progress": serving.Quiet()}
    layout.layout(StageContext(inputs={"engine": engine}, out=folder / "out", **common), release and releases.release(release))
    return folder / "out" / "repository"


@pytest.mark.parametrize("layout", [torch, llmapi, bls, vllm])
def test_nothing_but_models_lies_in_the_root_and_our_own_check_passes(layout, tmp_path):
    repository = written(layout, tmp_path, None)
    models = check_repository(repository, "24.10")
    assert {path.name for path in repository.iterdir()} == models.keys() == {"fake_r1"}
    assert not any(config.HasField("model_metrics") for config in models.values()), "no release holds it: what every server takes"


def test_the_adapter_declares_what_it_translates_and_the_engine_what_it_gets():
    module = ensemble()
    declared = {spec.name for spec in bls.INPUTS}
    assert declared == module.NAMES.keys() | set(module.REFUSED) | {"beam_width"}
    assert set(module.NAMES.values()) <= {spec.name for spec in llmapi.INPUTS}
    kinds = {spec.name: spec.kind for spec in llmapi.INPUTS}
    assert all(spec.kind == kinds[module.NAMES[spec.name]] for spec in bls.INPUTS if spec.name in module.NAMES)
    assert {spec.name for spec in bls.OUTPUTS} <= {spec.name for spec in llmapi.OUTPUTS}


def test_names_are_translated_as_old_clients_send_them():
    def text(*words):
        return np.array([[word.encode() for word in words]], np.object_)

    found = ensemble().translate({
        "text_input": text("a"), "max_tokens": np.array([[5]], np.int32), "stream": np.array([[True]]), "stop_words": text(""),
        "bad_words": text("x", ""), "return_num_output_tokens": np.array([[True]]), "beam_width": np.array([[1]], np.int32),
    })  # fmt: skip
    assert {name: array.tolist() for name, array in found.items()} == {
        "text_input": [b"a"], "sampling_param_max_tokens": [5], "streaming": [True], "sampling_param_bad": [b"x"],
        "return_num_output_tokens": [True],
    }  # fmt: skip
    for wrong, says in (
        ({"beam_width": np.array([[4]], np.int32)}, "beam_width=4: there is one completion"),
        ({"return_log_probs": np.array([[True]])}, "return_log_probs: not served by this model"),
    ):
        with pytest.raises(ValueError, match=says):
            ensemble().translate({"text_input": text("a")} | wrong)


def test_answers_come_without_the_prompt_wherever_a_model_can_leave_it_out():
    declared = ("text_input", "sampling_parameters", "exclude_input_in_output")
    dialect = Dialect.of({"name": "m", "input": [{"name": name, "data_type": "TYPE_STRING"} for name in declared]})
    assert dialect.tensors("a", max_tokens=2) == {
        "text_input": "a", "sampling_parameters": '{"max_tokens": 2}', "exclude_input_in_output": True,
    }  # fmt: skip


def test_the_models_behind_a_model():
    parameters = {"tensorrt_llm_model_name": {"string_value": "tensorrt_llm"}, "max_seq_len": {"string_value": "512"}}
    assert calls({"parameters": parameters}) == {"tensorrt_llm"}
    assert calls({"ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]}}) == {"a", "b"}
    assert (room_of({"parameters": parameters}), room_of({})) == (256, 1024)


def test_prefill_and_decode_apart_leave_no_repository(tmp_path, monkeypatch):
    config = load([*R1, *APART])
    monkeypatch.setattr("pipeline.launch.render.write", lambda ctx, out: out.mkdir())
    ctx = StageContext(config=config, inputs={"engine": tmp_path}, checkpoint=None, out=tmp_path, progress=serving.Quiet())
    package.run(ctx)
    assert not (tmp_path / "repository").exists()
    written = read_json(tmp_path / "package.json")
    assert (written["layout"], written["models"], written["sources"]) == ("none", {}, {})
    assert written["triton"]["container"] == "tritonserver:26.07-trtllm-python-py3"
    assert "trtllm-serve serves the bundle" in ctx.progress.notes[0]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("serve.layout=torch", "needs engine=torch"),
        ("serve.triton=25.12", "holds trtllm 1.1.0"),
        ("engine.trtllm.serving=disaggregated serve.layout=bls", "apart"),
    ],
)
def test_what_package_would_refuse_is_said_before_anything_is_built(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        package.STAGE.requires(load(["+hw=h200", "model=deepseek_r1", *word.split()]), None)
    package.STAGE.requires(load(["+hw=h200", "model=deepseek_r1"]), None)
