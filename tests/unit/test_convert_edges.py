"""Tensors that other converters lose, spoil or crash on, through the whole conversion; whole and cut into 128 rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.checkpoint.reader import read_tensor
from pipeline.core.errors import ConfigError
from pipeline.formats.numerics import BF16, E4M3
from tests._utils import random_checkpoint
from tests._utils.killing import small_steps
from tests._utils.run_stage import convert, recipe
from tests.unit.test_checkpoint import replace_tensors

ARCH = {"num_hidden_layers": 2, "n_routed_experts": 8, "kv_lora_rank": 512}
"""kv_a_proj_with_mqa has R1's 576 rows: its last block has 64."""
GATE, UP = (f"model.layers.1.mlp.experts.3.{name}_proj.weight" for name in ("gate", "up"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"), ARCH)


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


@pytest.fixture(params=["whole", "cut"], autouse=True)
def sizes(request: pytest.FixtureRequest) -> Iterator[None]:
    with small_steps(task=1, unit=1) if request.param == "cut" else small_steps(task=1 << 24, unit=1 << 25):
        yield


def test_the_last_block_of_576_rows(source: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    before = Checkpoint.open(source).entries
    assert before[name].shape == (576, 256) and before[name].tensors["weight_scale_inv"].shape == (5, 2)
    after = Checkpoint.open(convert(source, tmp_path, recipe("nvfp4"))).entries[name]
    dense = before[name].dequantized().astype(BF16)
    amax = max(before[n].amax() for n in (name, name.replace("kv_a_proj_with_mqa", "q_a_proj")))
    wanted = after.format.quantize(dense, amax=amax, input_scale=1.0)
    assert {s: a.tobytes() for s, a in after.load().items()} == {s: a.tobytes() for s, a in wanted.items()}


def zero(folder: Path, *names: str) -> None:
    for name in names:
        replace_tensors(folder, {name: ("F8_E4M3", np.zeros((128, 256), E4M3))})


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "w4a8_awq"])
def test_a_dead_half_of_an_expert_takes_the_scale_of_the_living(copy: Path, tmp_path: Path, name: str) -> None:
    zero(copy, GATE)
    after = Checkpoint.open(convert(copy, tmp_path / "w", recipe(name))).entries
    scale = "weight_scale" if name == "fp8" else "weight_scale_2"
    assert after[GATE].load()[scale] == after[UP].load()[scale] > 0
    assert not after[GATE].dequantized().any() and after[UP].dequantized().any()


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "mxfp4", "int4_awq"])
def test_a_dead_expert_is_zero_and_finite(copy: Path, tmp_path: Path, name: str) -> None:
    zero(copy, GATE, UP)
    after = Checkpoint.open(convert(copy, tmp_path / "w", recipe(name))).entries
    for key in (GATE, UP):
        assert all(np.isfinite(array.astype(np.float32)).all() for array in after[key].load().values())
        assert not after[key].dequantized().any()


def test_mtp_keeps_its_bytes_when_kept_and_is_never_lost(source: Path, tmp_path: Path) -> None:
    before = Checkpoint.open(source)
    after = Checkpoint.open(convert(source, tmp_path, recipe("nvfp4", mtp="fp8_block")))
    layer = {name: info for name, info in before.tensors.items() if name.startswith("model.layers.2.")}
    assert len(layer) > 60
    for name, info in layer.items():
        assert read_tensor(after.tensors[name]).tobytes() == read_tensor(info).tobytes(), name


def test_router_and_its_bias_are_untouched(source: Path, tmp_path: Path) -> None:
    before, after = Checkpoint.open(source), Checkpoint.open(convert(source, tmp_path, recipe("nvfp4")))
    for leaf, dtype in (("weight", "BF16"), ("e_score_correction_bias", "F32")):
        name = f"model.layers.1.mlp.gate.{leaf}"
        assert after.tensors[name].dtype == dtype
        assert read_tensor(after.tensors[name]).tobytes() == read_tensor(before.tensors[name]).tobytes()


def test_tensors_with_equal_bytes_are_all_written(copy: Path, tmp_path: Path) -> None:
    """Deduplicating by content, or by address, has dropped weights that were not tied."""
    embed = read_tensor(Checkpoint.open(copy).tensors["model.embed_tokens.weight"]).copy()
    replace_tensors(copy, {"lm_head.weight": ("BF16", embed)})
    after = Checkpoint.open(convert(copy, tmp_path / "w", recipe("nvfp4"))).tensors
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert read_tensor(after[name]).tobytes() == embed.tobytes()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_what_is_not_finite_is_refused_in_copied_tensors_too(copy: Path, tmp_path: Path, value: float, dtype: str) -> None:
    from pipeline.checkpoint.reader import DTYPES

    weight = np.zeros((1024, 256), DTYPES[dtype])
    weight[777, 200] = value
    replace_tensors(copy, {"lm_head.weight": (dtype, weight)})
    with pytest.raises(ConfigError, match=r"holds NaN or infinity in lm_head\.weight"):
        convert(copy, tmp_path / "w", recipe("nvfp4"))


def test_signs_of_zero_and_the_smallest_codes(copy: Path, tmp_path: Path) -> None:
    """-0 becomes +0 in NVFP4, the least subnormal next to 448 becomes a signed zero, as in ModelOpt."""
    codes = np.zeros((128, 256), np.uint8)
    codes[0, :4] = (0x80, 0x7E, 0x01, 0x81)
    replace_tensors(copy, {GATE: ("F8_E4M3", codes.view(E4M3)), UP: ("F8_E4M3", codes.view(E4M3))})
    before = Checkpoint.open(copy).entries[GATE]
    after = Checkpoint.open(convert(copy, tmp_path / "w", recipe("nvfp4"))).entries[GATE]
    assert after.load()["weight"][0, :2].tolist() == [0x70, 0x80]
    amax = max(before.amax(), Checkpoint.open(copy).entries[UP].amax())
    wanted = after.format.quantize(before.dequantized().astype(BF16), amax=amax, input_scale=1.0)
    assert after.load()["weight"].tobytes() == wanted["weight"].tobytes()


def test_block_scales_below_zero_are_refused_by_name(copy: Path, tmp_path: Path) -> None:
    scales = read_tensor(Checkpoint.open(copy).tensors[f"{GATE.removesuffix('.weight')}.weight_scale_inv"]).copy()
    scales[0, 0] *= -1
    replace_tensors(copy, {f"{GATE.removesuffix('.weight')}.weight_scale_inv": ("F32", scales)})
    with pytest.raises(ConfigError, match=r"1 block scales below 0 in .*gate_proj\.weight_scale_inv.*download it again"):
        convert(copy, tmp_path / "w", recipe("nvfp4"))


def test_a_git_lfs_pointer_is_named(copy: Path, tmp_path: Path) -> None:
    file = min(copy.glob("*.safetensors"))
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d2\nsize 4302350824\n")
    with pytest.raises(ConfigError, match="Git LFS pointer instead of the file: run `git lfs pull`"):
        convert(copy, tmp_path / "w", recipe("nvfp4"))
