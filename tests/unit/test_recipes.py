"""Every recipe of conf/quant on the embedded model: converted, declared, read back, verified; and what plan says of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint, dequantized
from pipeline.config.load import load
from pipeline.config.schema import MIN_SQNR_DB, NVFP4_MODES, SCALE_SEARCHES, WEIGHT_FORMATS, QuantConfig
from pipeline.core.errors import ConfigError
from pipeline.formats import FORMATS, get_format
from pipeline.formats.numerics import BF16
from pipeline.formats.nvfp4_search import SEARCHES
from pipeline.layouts.modelopt import AWQ_FIELDS
from pipeline.planner.params import STORAGE, matrix_bytes
from tests._utils import random_checkpoint
from tests._utils.run_stage import convert, recipe, verify
from tests.unit.test_checkpoint import replace_tensors
from tests.unit.test_plan import plan, refusal

ROOT = Path(__file__).parents[2]
TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
ALGORITHM = {
    "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN", "mxfp8": "MXFP8", "w4a16_nvfp4": "W4A16_NVFP4", "int4_awq": "W4A16_AWQ",
    "w4a8_nvfp4": "W4A8_NVFP4_FP8", "nvfp4_mse": "NVFP4", "nvfp4_experts": "MIXED_PRECISION",
    "w4a8_hopper": "MIXED_PRECISION", "mxfp4_experts": "MIXED_PRECISION",
}  # fmt: skip
"""Recipe -> quant_algo of hf_quant_config.json."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"), {"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model without its text: verify compares weights only."""
    folder = Path(shutil.copytree(TINY_R1, tmp_path_factory.mktemp("silent") / "tiny_r1"))
    (folder / "heldout.txt").unlink()
    return folder


def quantization(folder: Path) -> dict:
    inline = json.loads((folder / "config.json").read_text())["quantization_config"]
    truth = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert inline["quant_algo"] == truth["quant_algo"] and inline["ignore"] == truth["exclude_modules"]
    return truth


@pytest.mark.skipif(not (TINY_R1 / "config.json").is_file(), reason="pipeline/data/tiny_r1 is not there")
@pytest.mark.parametrize("name", ALGORITHM)
def test_the_embedded_model_passes_the_gate_on_weights(silent: Path, tmp_path: Path, name: str) -> None:
    found = plan("+hw=cpu", f"quant={name}")
    out = convert(TINY_R1, tmp_path, found.precision)
    checkpoint = Checkpoint.open(out)
    for entry in checkpoint.entries.values():
        wanted = found.precision["formats"].get(entry.place.kind, "bf16") if entry.place.linear else "bf16"
        folded = entry.place.module.endswith("kv_b_proj") and wanted != "fp8_block"
        assert entry.format.name == ("bf16" if folded else wanted), entry.name
    assert quantization(out)["quant_algo"] == ALGORITHM[name]
    stored = sum(info.num_bytes for info in checkpoint.tensors.values())
    assert found.report["model"]["checkpoint_bytes"] == stored
    report = verify(silent, out, tmp_path / "v")
    assert report["verdict"] == "passed" and len(report["tensors"]) == len(checkpoint.entries)


@pytest.mark.skipif(not (TINY_R1 / "config.json").is_file(), reason="pipeline/data/tiny_r1 is not there")
def test_the_reference_model_runs_on_what_was_written(tmp_path: Path) -> None:
    """On a short text: what the gate says of logits is tested in test_verify."""
    pytest.importorskip("torch", reason="the reference model is torch's")
    out = convert(TINY_R1, tmp_path, plan("+hw=cpu", "quant=nvfp4_experts").precision)
    report = verify(TINY_R1, out, tmp_path / "v", tokens=256, window=128)
    assert report["verdict"] == "passed" and 0 < report["logits"]["kl"] < 0.05


def test_every_recipe_is_tested_or_older() -> None:
    names = {file.stem for file in (ROOT / "conf" / "quant").glob("*.yaml")}
    assert names == ALGORITHM.keys() | {"bf16", "fp8", "fp8_block", "nvfp4", "nvfp4_v2"}


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bf16", "fp8", "fp8_block", "nvfp4")])
def test_each_format_is_written_and_read_back(source: Path, tmp_path: Path, name: str) -> None:
    out = convert(source, tmp_path, recipe(name))
    before, after = Checkpoint.open(source).entries, Checkpoint.open(out).entries
    weights = dict(dequantized(out))
    for key in list(after)[::5]:
        entry, item = after[key], get_format(name)
        if not entry.quantised:
            continue
        dense = {k: before[k].dequantized().astype(BF16) for k in (key, f"{entry.place.partner}.weight") if k in before}
        amax = max(float(np.abs(array.astype(np.float32)).max()) for array in dense.values())
        wanted = item.quantize(dense[key], amax=amax, input_scale=1.0)
        assert {s: a.tobytes() for s, a in wanted.items()} == {s: a.tobytes() for s, a in entry.load().items()}, key
        np.testing.assert_array_equal(weights[key], item.dequantize(wanted))
    truth = quantization(out)
    assert (truth["quant_algo"], truth.get("group_size")) == (FORMATS[name].quant_algo, FORMATS[name].group_size)
    assert (AWQ_FIELDS.items() <= truth.items()) == name.endswith("awq")
    kept = convert(out, tmp_path / "again", recipe(name))
    assert (kept / "model-00002-of-00004.safetensors").read_bytes() == (out / "model-00002-of-00004.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["w4a16_nvfp4", "w4a8_nvfp4_fp8", "w4a8_awq"])
def test_fused_layers_share_the_scale_of_the_tensor(source: Path, tmp_path: Path, name: str) -> None:
    entries = Checkpoint.open(convert(source, tmp_path, recipe(name))).entries
    pairs = [(entry, entries[f"{entry.place.partner}.weight"]) for entry in entries.values() if entry.place.partner]
    assert len(pairs) > 50
    for one, other in pairs:
        assert one.load()["weight_scale_2"] == other.load()["weight_scale_2"], one.name


def test_the_search_is_written_down_and_changes_only_numbers(source: Path, tmp_path: Path) -> None:
    plain = Checkpoint.open(convert(source, tmp_path / "a", recipe("nvfp4")))
    better = Checkpoint.open(convert(source, tmp_path / "b", recipe("nvfp4") | {"nvfp4_scale_search": "mse"}))
    summary = json.loads((better.folder / "conversion.json").read_text())
    assert summary["recipe"]["nvfp4_scale_search"] == "mse" and summary["recipe"]["nvfp4_mode"] == "modelopt"
    layouts = [{n: (i.dtype, i.shape) for n, i in side.tensors.items()} for side in (plain, better)]
    assert layouts[0] == layouts[1] and quantization(plain.folder) == quantization(better.folder)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    want = Checkpoint.open(source).entries[name].dequantized()
    noise = [float(np.square(side.entries[name].dequantized() - want).sum()) for side in (plain, better)]
    assert noise[1] < 0.82 * noise[0], "1.1 dB is a factor of 0.78"


def test_exact_mode_leaves_out_the_step_through_bf16(source: Path, tmp_path: Path) -> None:
    table = recipe("nvfp4", o_proj="fp8") | {"nvfp4_mode": "exact"}
    out = convert(source, tmp_path, table)
    before, after = Checkpoint.open(source).entries, Checkpoint.open(out).entries
    for leaf in ("mlp.experts.3.up_proj", "self_attn.o_proj"):
        entry = after[f"model.layers.1.{leaf}.weight"]
        dense = [before[f"{m}.weight"].dequantized() for m in (entry.place.module, entry.place.partner) if m]
        dense = dense if entry.format.name == "nvfp4" else [array.astype(BF16) for array in dense]
        amax = max(float(np.abs(array.astype(np.float32)).max()) for array in dense)
        wanted = entry.format.quantize(dense[0], amax=amax, input_scale=1.0)
        assert {s: a.tobytes() for s, a in wanted.items()} == {s: a.tobytes() for s, a in entry.load().items()}, leaf
    summary = json.loads((out / "conversion.json").read_text())
    assert "exact float32" in summary["rounding"] and summary["recipe"]["nvfp4_mode"] == "exact"


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_source_without_quantisation(source: Path, tmp_path: Path, dtype: str) -> None:
    """What R1's derivatives come as; MXFP8 needs no second pass, NVFP4 the fused amax."""
    plain, kind = tmp_path / "plain", {"BF16": BF16, "F16": np.float16, "F32": np.float32}[dtype]
    shutil.copytree(source, plain)
    name = "model.layers.1.mlp.experts.3.up_proj"
    dense = Checkpoint.open(source).entries[f"{name}.weight"].dequantized().astype(kind)
    replace_tensors(plain, {f"{name}.weight_scale_inv": None, f"{name}.weight": (dtype, dense)})
    for target in ("mxfp8", "bf16"):
        entry = Checkpoint.open(convert(plain, tmp_path / target, recipe(target))).entries[f"{name}.weight"]
        wanted = get_format(target).quantize(dense.astype(np.float32).astype(BF16), amax=0.0, input_scale=1.0)
        assert {s: a.tobytes() for s, a in wanted.items()} == {s: a.tobytes() for s, a in entry.load().items()}


def test_nan_in_a_block_exponent_is_refused(source: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    out = convert(source, tmp_path, recipe("mxfp8"))
    scales = Checkpoint.open(out).entries[name].load()["weight_scale"].copy()
    scales[3, 1] = 0xFF
    replace_tensors(out, {f"{name}_scale": ("U8", scales)})
    with pytest.raises(ConfigError, match=f"NaN or infinity in {name}"):
        convert(out, tmp_path / "again", recipe("nvfp4"))


def test_the_schema_the_formats_and_the_planner_agree() -> None:
    assert set(WEIGHT_FORMATS) == FORMATS.keys() == STORAGE.keys() == MIN_SQNR_DB.keys() - {"kept"}
    assert SCALE_SEARCHES == SEARCHES and NVFP4_MODES[0] == QuantConfig().nvfp4_mode
    from pipeline.checkpoint.reader import DTYPES

    for name, item in FORMATS.items():
        for shape in ((256, 128), (64, 384)):
            outputs = item.outputs("x", shape)
            stored = sum(int(np.prod(o.shape)) * DTYPES[o.dtype].itemsize for o in outputs)
            assert matrix_bytes(name, *shape) == stored, name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("+hw=h200", "quant=mxfp8"), ("cannot multiply mxfp8", "SM90")),
        (("+hw=b200", "quant=mxfp8"), ("No MoE backend", "mxfp8 experts on SM100", "nvfp4", "engine=torch")),
        (("+hw=b200", "quant=fp8_channel"), ("No MoE backend", "fp8_channel experts")),
        (("+hw=h200", "quant=int4_awq"), ("No MoE backend", "int4_awq experts on SM90", "w4a8_awq")),
        (("+hw=b200", "quant=w4a8_hopper"), ("cannot multiply w4a8_awq", "SM100")),
        (("+hw=h200", "quant=mxfp4_experts", "quant.dense_mlp=mxfp4"), ("routed experts only", "quant.dense_mlp=fp8_block")),
        (("+hw=h200", "quant=w4a8_nvfp4"), ("cannot multiply w4a8_nvfp4_fp8", "SM90")),
        (("+hw=cpu", "quant.nvfp4_scale_search=best"), ("nvfp4_scale_search=best", "four_over_six", "mse_full")),
        (("+hw=cpu", "quant.nvfp4_mode=fast"), ("nvfp4_mode=fast", "modelopt", "exact")),
    ],
)
def test_what_an_engine_cannot_load_is_refused(overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    if "cpu" in overrides[0]:
        with pytest.raises(ConfigError) as error:
            load(list(overrides))
        text = str(error.value)
    else:
        text = refusal(*overrides, "model=deepseek_r1")
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("hw", "name", "backend"),
    [("b200", "nvfp4_experts", "CUTLASS"), ("b200", "w4a8_nvfp4", "TRTLLM"), ("h200", "w4a8_hopper", "CUTLASS"),
     ("h200", "w4a16_nvfp4", "CUTLASS"), ("h200", "mxfp4_experts", "CUTLASS"), ("b200", "nvfp4_mse", "CUTLASS")],
)  # fmt: skip
def test_what_an_engine_can_load_is_planned(hw: str, name: str, backend: str) -> None:
    found = plan(f"+hw={hw}", "model=deepseek_r1", f"quant={name}")
    assert found.deploy["moe_backend"] == backend
    mixed = any("MIXED_PRECISION" in text for text in found.report["warnings"])
    assert mixed == (ALGORITHM[name] == "MIXED_PRECISION")
    assert found.report["model"]["checkpoint_bytes"] < 450e9
