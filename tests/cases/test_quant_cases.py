"""What went wrong for users of other quantisers, case by case (`cases.yaml`): the tests that no other file has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.checkpoint.digest import digest
from pipeline.checkpoint.layout import place_of
from pipeline.checkpoint.reader import read_tensor
from pipeline.cli import main
from pipeline.core.errors import ConfigError
from pipeline.formats import FORMATS
from pipeline.formats.numerics import BF16
from pipeline.models.arch import Arch
from scripts.make_foreign_checkpoints import CONFIG
from tests._utils import random_checkpoint
from tests._utils.run_stage import convert, recipe
from tests.unit.test_checkpoint import replace_tensors

DOWN = "model.layers.1.mlp.experts.2.down_proj"
MTP = "model.layers.2."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and an MTP layer in FP8 blocks, over four shards."""
    return random_checkpoint.write(tmp_path_factory.mktemp("cases"), CONFIG | {"num_nextn_predict_layers": 1})


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


@pytest.fixture(scope="module")
def nvfp4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(convert(source, tmp_path_factory.mktemp("nvfp4"), recipe("nvfp4", mtp="bf16")))


def in_bf16(name: str, weight: np.ndarray) -> dict[str, tuple[str, np.ndarray] | None]:
    """A weight of FP8 blocks, replaced by a plain one."""
    return {f"{name}.weight": ("BF16", weight.astype(BF16)), f"{name}.weight_scale_inv": None}


def shape_of(folder: Path, name: str) -> tuple[int, ...]:
    return Checkpoint.open(folder).entries[f"{name}.weight"].shape


def test_every_expert_has_a_finite_positive_input_scale(nvfp4: Checkpoint) -> None:
    """Left out, loaders fill in 0 and divide by it for the prompts that reach that expert."""
    experts = [entry for entry in nvfp4.entries.values() if entry.place.kind == "routed_experts"]
    assert len(experts) == 3 * CONFIG["n_routed_experts"]
    for entry in experts:
        scale = float(entry.load()["input_scale"])
        assert np.isfinite(scale) and scale > 0, entry.name


def test_block_scales_are_clamped_before_they_are_rounded(copy: Path, tmp_path: Path) -> None:
    """An unclamped cast to e4m3 gives NaN (0x7f, 0xff); so does any scale above 448."""
    rows, columns = shape_of(copy, DOWN)
    weight = np.outer(np.logspace(-30, 4, rows), np.ones(columns)) * np.where(np.arange(columns) % 2, 1, -1)
    weight[3, :16] = 0
    replace_tensors(copy, in_bf16(DOWN, weight))
    stored = Checkpoint.open(convert(copy, tmp_path / "w", recipe("nvfp4"))).entries[f"{DOWN}.weight"].load()
    scales = stored["weight_scale"]
    assert not (scales.view(np.uint8) & 0x7F == 0x7F).any()
    assert scales.astype(np.float32).min() == 2.0**-9 and scales.astype(np.float32).max() == 448


def test_weights_alone_are_declared_so_in_both_configs(source: Path, tmp_path: Path) -> None:
    """Declared as W4A4, runtimes multiply by an input_scale that nobody wrote."""
    out = convert(source, tmp_path, recipe("w4a16_nvfp4"))
    assert not any(name.endswith("input_scale") for name in Checkpoint.open(out).tensors)
    inline = json.loads((out / "config.json").read_text())["quantization_config"]
    file = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert inline["quant_algo"] == file["quant_algo"] == FORMATS["w4a16_nvfp4"].quant_algo
    assert "A16" in file["quant_algo"]


def test_mtp_keeps_its_bytes_beside_other_formats(source: Path, tmp_path: Path) -> None:
    before = Checkpoint.open(source).tensors
    after = Checkpoint.open(convert(source, tmp_path, recipe("nvfp4", mtp="fp8_block"))).tensors
    ours = {name for name in after if name.startswith(MTP)}
    assert ours == {name for name in before if name.startswith(MTP)} and len(ours) > 50
    assert all(read_tensor(before[name]).tobytes() == read_tensor(after[name]).tobytes() for name in ours)


@pytest.mark.parametrize("name", FORMATS)
def test_a_zero_weight_has_finite_scales_and_stays_zero(name: str) -> None:
    item = FORMATS[name]
    stored = item.quantize(np.zeros((128, 256), np.float32), amax=0.0, input_scale=1.0)
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in stored.values() if array.dtype != np.uint8)
    assert not np.any(item.dequantize(stored))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_values_beyond_float16_come_through(name: str) -> None:
    """Calibration in float16 overflows at the last layers of DeepSeek-V3; nothing here is ever float16."""
    weight = (1e6 * np.random.default_rng(0).standard_normal((128, 256))).astype(BF16).astype(np.float32)
    item = FORMATS[name]
    back = item.dequantize(item.quantize(weight, amax=float(np.abs(weight).max()), input_scale=1.0))
    assert np.isfinite(back).all() and np.linalg.norm(back - weight) < 0.2 * np.linalg.norm(weight)


@pytest.mark.parametrize("name", ["int4_awq", "mxfp4", "fp8_channel"])
def test_a_scale_in_another_shard_is_applied(tmp_path: Path, name: str) -> None:
    """Without it, raw FP8 codes are taken for weights: hundreds instead of hundredths."""
    straddling = random_checkpoint.STRADDLING_SCALE
    folder = random_checkpoint.write(tmp_path / "source", {"num_hidden_layers": 2, "num_nextn_predict_layers": 0})
    before = Checkpoint.open(folder)
    assert len({info.file for info in before.entries[straddling].tensors.values()}) == 2
    after = Checkpoint.open(convert(folder, tmp_path, recipe(name)))
    weight, back = before.entries[straddling].dequantized(), after.entries[straddling].dequantized()
    assert np.linalg.norm(back - weight) < 0.3 * np.linalg.norm(weight)
    assert not any(tensor.endswith("_scale_inv") for tensor in after.tensors), "no orphan is left"


def test_equal_tensors_are_both_written(copy: Path, tmp_path: Path) -> None:
    """Leaving out what looks tied has cost models their heads."""
    entries = Checkpoint.open(copy).entries
    replace_tensors(copy, {"lm_head.weight": ("BF16", read_tensor(entries["model.embed_tokens.weight"].main).copy())})
    after = Checkpoint.open(convert(copy, tmp_path / "w", recipe("nvfp4"))).tensors
    head, table = after["lm_head.weight"], after["model.embed_tokens.weight"]
    assert read_tensor(head).tobytes() == read_tensor(table).tobytes()
    assert (head.file, head.start) != (table.file, table.start)


def test_layers_that_run_as_one_cannot_get_different_formats() -> None:
    arch = Arch.from_hf(random_checkpoint.ARCH)
    pairs = [("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj")]
    for one, other in pairs:
        first, second = (place_of(f"model.layers.1.{module}", arch) for module in (one, other))
        assert first.kind == second.kind and first.partner == second.module and second.partner == first.module


def test_a_refused_conversion_poisons_nothing(copy: Path, source: Path, tmp_path: Path) -> None:
    """A quantiser that patches its library and fails leaves the patch behind; the next model is then wrong in silence."""
    before = digest(convert(source, tmp_path / "a", recipe("nvfp4")))
    replace_tensors(copy, {f"{DOWN}.weight_scale_inv": ("F32", np.full((1, 1), np.nan, np.float32))})
    with pytest.raises(ConfigError, match=r"experts\.2\.down_proj"):
        convert(copy, tmp_path / "b", recipe("nvfp4"))
    assert digest(convert(source, tmp_path / "c", recipe("nvfp4"))) == before


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ({f"{DOWN}.weight_scale_inv": None}, f"{DOWN}.weight"),
        ({f"{DOWN}.weight": None}, f"{DOWN}.weight"),
        ({f"{DOWN}.weight_scale_inv": ("F32", np.full((1, 1), np.inf, np.float32))}, f"{DOWN}.weight"),
        (dict.fromkeys((f"{DOWN}.weight", f"{DOWN}.weight_scale_inv")), f"{DOWN}.weight"),
        ({"lm_head.weight": ("F16", np.ones((3, 5), np.float16))}, "lm_head.weight"),
    ],
    ids=["no scale", "no weight", "infinite scale", "no layer", "shape"],
)
def test_a_refusal_names_the_tensor_exits_with_2_and_loses_nothing(
    copy: Path,
    tmp_path: Path,
    damage: dict[str, tuple[str, np.ndarray] | None],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_tensors(copy, damage)
    before = digest(copy)
    store = tmp_path / "store"
    words = ["+hw=cpu", "quant=nvfp4", "executor=inline", "engine.torch.max_seq_len=128", f"checkpoint={copy}"]
    assert main(["convert", *words, f"store.root={store}"]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said
    assert not (store / "results" / "convert").exists() and digest(copy) == before
