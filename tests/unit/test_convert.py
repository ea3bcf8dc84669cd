"""Conversion of whole checkpoints: bytes, bookkeeping, resumption, refusal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.checkpoint.reader import read_tensor
from pipeline.core.errors import ConfigError, StageError
from pipeline.formats import FORMATS
from pipeline.formats.numerics import BF16
from pipeline.layouts.patterns import exclude_patterns
from tests._utils import random_checkpoint
from tests._utils.run_stage import Notes, convert, recipe
from tests.unit.test_checkpoint import replace_tensors

ROOT = Path(__file__).parents[2]
TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
FORMAT_NAMES = ("bf16", "fp8", "fp8_block", "nvfp4")  # the others: test_recipes.py


@pytest.fixture(scope="module")
def random_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=["random", "tiny_r1"])
def source(request: pytest.FixtureRequest, random_source: Path) -> Path:
    if request.param == "random":
        return random_source
    if not (TINY_R1 / "config.json").is_file():
        pytest.skip("pipeline/data/tiny_r1 is not there")
    return TINY_R1


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source in every format; the MTP layer in BF16 for nvfp4, as NVIDIA ships it."""
    tables = {name: recipe(name, mtp="bf16" if name == "nvfp4" else name) for name in FORMAT_NAMES}
    return {name: convert(source, tmp_path_factory.mktemp(name), table) for name, table in tables.items()}


@pytest.fixture
def copy(random_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_source, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def weights(folder: Path) -> dict[str, bytes]:
    return {name: read_tensor(info).tobytes() for name, info in Checkpoint.open(folder).tensors.items()}


def quant_tables(folder: Path) -> tuple[dict | None, dict | None]:
    inline = json.loads((folder / "config.json").read_text()).get("quantization_config")
    file = folder / "hf_quant_config.json"
    return inline, json.loads(file.read_text()) if file.exists() else None


class TestBytes:
    def test_fp8_blocks_pass_through_unchanged(self, source: Path, converted: dict[str, Path]) -> None:
        assert weights(source) == weights(converted["fp8_block"])

    @pytest.mark.parametrize("name", FORMAT_NAMES)
    def test_linear_layers_have_the_format_and_the_rest_is_kept(
        self, source: Path, converted: dict[str, Path], name: str
    ) -> None:
        before, after = Checkpoint.open(source), Checkpoint.open(converted[name])
        assert before.entries.keys() == after.entries.keys()
        for key, entry in after.entries.items():
            mtp_in_bf16 = name == "nvfp4" and entry.place.kind == "mtp"
            kv_b = entry.place.module.endswith("kv_b_proj") and name != "fp8_block"
            wanted = "bf16" if not entry.place.linear or mtp_in_bf16 or kv_b else name
            assert (entry.format.name, entry.shape) == (wanted, before.entries[key].shape), key
            if not entry.place.linear:
                assert entry.main.dtype == before.entries[key].main.dtype
                assert read_tensor(entry.main).tobytes() == read_tensor(before.entries[key].main).tobytes()

    @pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4"])
    def test_values_are_the_formats_own_of_the_bf16_source(
        self, source: Path, converted: dict[str, Path], name: str
    ) -> None:
        before, after = Checkpoint.open(source), Checkpoint.open(converted[name])
        for key, entry in list(after.entries.items())[::7]:
            if not entry.quantised and not entry.place.linear:
                continue
            dense = {
                k: before.entries[k].dequantized().astype(BF16)
                for k in (key, f"{entry.place.partner}.weight")
                if k in before.entries
            }
            amax = max(float(np.abs(a.astype(np.float32)).max()) for a in dense.values())
            wanted = entry.format.quantize(dense[key], amax=amax, input_scale=1.0)
            stored = entry.load()
            assert {s: a.tobytes() for s, a in wanted.items()} == {s: a.tobytes() for s, a in stored.items()}, key

    @pytest.mark.parametrize("name", ["nvfp4", "fp8"])
    def test_fused_layers_share_their_scales(self, converted: dict[str, Path], name: str) -> None:
        entries, pairs = Checkpoint.open(converted[name]).entries, 0
        scale = {"nvfp4": "weight_scale_2", "fp8": "weight_scale"}[name]
        for entry in entries.values():
            if entry.quantised and entry.place.partner:
                mine, other = entry.load(), entries[f"{entry.place.partner}.weight"].load()
                assert mine[scale] == other[scale] and mine["input_scale"] == other["input_scale"] == 1.0
                pairs += 1
        assert pairs > 100

    def test_a_pair_across_shards_is_joined(self, random_source: Path, tmp_path: Path) -> None:
        after = Checkpoint.open(convert(random_source, tmp_path, recipe("nvfp4"))).entries
        up = after[random_checkpoint.STRADDLING_UP]
        gate = after[up.name.replace("up_proj", "gate_proj")]
        assert up.main.file != gate.main.file
        assert up.load()["weight_scale_2"] == gate.load()["weight_scale_2"]
        scale = after[random_checkpoint.STRADDLING_SCALE]
        assert len({info.file for info in scale.tensors.values()}) == 1

    def test_the_bias_of_the_router_stays_float32(self, converted: dict[str, Path]) -> None:
        for folder in converted.values():
            biases = [e for e in Checkpoint.open(folder).entries.values() if e.name.endswith("e_score_correction_bias")]
            assert len(biases) == 5 and {e.main.dtype for e in biases} == {"F32"}

    def test_a_bias_in_bf16_is_widened(self, copy: Path, tmp_path: Path) -> None:
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        replace_tensors(copy, {name: ("BF16", np.full(16, 0.5, BF16))})
        entry = Checkpoint.open(convert(copy, tmp_path / "w", recipe("bf16"))).entries[name]
        assert entry.main.dtype == "F32" and (read_tensor(entry.main) == 0.5).all()

    def test_equal_inputs_give_equal_bytes(self, random_source: Path, tmp_path: Path) -> None:
        one, two = (convert(random_source, tmp_path / n, recipe("nvfp4")) for n in ("a", "b"))
        assert contents(one) == contents(two)
        assert not any(part.startswith(".") for file in contents(one) for part in Path(file).parts)

    def test_a_converted_checkpoint_can_be_converted(self, random_source: Path, tmp_path: Path) -> None:
        dense = convert(random_source, tmp_path / "bf16", recipe("bf16"))
        assert weights(convert(dense, tmp_path / "from_bf16", recipe("nvfp4"))) == weights(
            convert(random_source, tmp_path / "from_fp8", recipe("nvfp4"))
        )

    def test_a_zero_tensor_stays_zero_and_finite(self, copy: Path, tmp_path: Path) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        codes = np.zeros(
            (256, 512), FORMATS["fp8_block"].quantize(np.zeros((1, 1)), amax=0, input_scale=1)["weight"].dtype
        )
        replace_tensors(copy, {name: ("F8_E4M3", codes)})
        for kind in ("nvfp4", "fp8"):
            entry = Checkpoint.open(convert(copy, tmp_path / kind, recipe(kind))).entries[name]
            assert all(np.isfinite(a.astype(np.float32)).all() for a in entry.load().values())
            assert not entry.dequantized().any()


class TestDescription:
    @pytest.mark.parametrize("name", FORMAT_NAMES)
    def test_index_lists_what_the_shards_hold(self, converted: dict[str, Path], name: str) -> None:
        folder = converted[name]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        tensors = Checkpoint.open(folder).tensors
        assert index["weight_map"] == {n: info.file.name for n, info in tensors.items()}
        assert index["metadata"]["total_size"] == sum(info.num_bytes for info in tensors.values())

    def test_pass_through_and_bf16_have_one_config_only(self, converted: dict[str, Path]) -> None:
        inline, modelopt = quant_tables(converted["fp8_block"])
        assert (
            modelopt is None
            and inline is not None
            and inline["quant_method"] == "fp8"
            and inline["weight_block_size"] == [128, 128]
        )
        assert quant_tables(converted["bf16"]) == (None, None)

    @pytest.mark.parametrize(("name", "group"), [("nvfp4", 16), ("fp8", None)])
    def test_both_configs_agree(self, converted: dict[str, Path], name: str, group: int | None) -> None:
        inline, modelopt = quant_tables(converted[name])
        assert inline is not None and modelopt is not None
        truth = modelopt["quantization"]
        assert truth["quant_algo"] == inline["quant_algo"] == FORMATS[name].quant_algo
        assert truth["exclude_modules"] == inline["ignore"] and truth["kv_cache_quant_algo"] == "FP8"
        assert truth.get("group_size") == inline.get("group_size") == group
        assert modelopt["producer"]["name"] == "modelopt" and inline["quant_method"] == "modelopt"

    @pytest.mark.parametrize("name", ["nvfp4", "fp8"])
    def test_excludes_match_exactly_the_unquantised_matrices(self, converted: dict[str, Path], name: str) -> None:
        patterns = quant_tables(converted[name])[1]["quantization"]["exclude_modules"]
        matrices = [e for e in Checkpoint.open(converted[name]).entries.values() if len(e.shape) == 2]
        for entry in matrices:
            assert any(fnmatchcase(entry.place.module, p) for p in patterns) != entry.quantised, entry.name
        for pattern in patterns:
            assert any(fnmatchcase(entry.place.module, pattern) for entry in matrices), pattern

    def test_the_mtp_layer_is_excluded_by_its_own_name(self, converted: dict[str, Path]) -> None:
        patterns = quant_tables(converted["nvfp4"])[1]["quantization"]["exclude_modules"]
        assert any(fnmatchcase("model.layers.5", pattern) for pattern in patterns)
        assert any(fnmatchcase("model.layers.5.mlp.experts.0.gate_proj", pattern) for pattern in patterns)

    def test_several_formats_are_declared_layer_by_layer(self, random_source: Path, tmp_path: Path) -> None:
        folder = convert(
            random_source, tmp_path, recipe("fp8_block", routed_experts="nvfp4", dense_mlp="bf16", o_proj="fp8")
        )
        inline, modelopt = quant_tables(folder)
        layers = modelopt["quantization"]["quantized_layers"]
        assert modelopt["quantization"]["quant_algo"] == inline["quant_algo"] == "MIXED_PRECISION"
        assert inline["quantized_layers"] == layers
        entries = Checkpoint.open(folder).entries.values()
        assert layers.keys() == {e.place.module for e in entries if e.quantised}
        assert layers["model.layers.2.mlp.experts.3.up_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
        assert layers["model.layers.2.self_attn.o_proj"] == {"quant_algo": "FP8"}
        assert layers["model.layers.2.self_attn.q_a_proj"] == {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}
        assert "model.layers.0.mlp*" in modelopt["quantization"]["exclude_modules"]

    def test_blocks_beside_bf16_are_not_called_a_pass_through(self, random_source: Path, tmp_path: Path) -> None:
        inline, modelopt = quant_tables(convert(random_source, tmp_path, recipe("fp8_block", mtp="bf16")))
        assert modelopt["quantization"]["quant_algo"] == "FP8_BLOCK_SCALES"
        assert "model.layers.5*" in modelopt["quantization"]["exclude_modules"] == inline["modules_to_not_convert"]

    def test_patterns_do_not_reach_into_other_layers(self) -> None:
        plain = {"model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head", "model.layers.61.eh_proj"}
        quantised = {f"model.layers.{i}.mlp.{n}_proj" for i in range(10, 20) for n in ("up", "down")}
        patterns = exclude_patterns(plain, quantised)
        assert patterns == ["lm_head", "model.layers.1.mlp*", "model.layers.61*"]

    def test_companions_come_along(self, source: Path, converted: dict[str, Path]) -> None:
        for folder in converted.values():
            for name in ("tokenizer.json", "generation_config.json", "heldout.txt"):
                assert (folder / name).read_bytes() == (source / name).read_bytes()
        config = json.loads((converted["bf16"] / "config.json").read_text())
        before = json.loads((source / "config.json").read_text())
        assert config == {name: value for name, value in before.items() if name != "quantization_config"}

    def test_the_summary_counts(self, source: Path, converted: dict[str, Path]) -> None:
        summary = json.loads((converted["nvfp4"] / "conversion.json").read_text())
        tensors = Checkpoint.open(converted["nvfp4"]).tensors
        assert summary["parameters_in"] == summary["parameters_out"] == len(Checkpoint.open(source).entries)
        assert summary["tensors_out"] == len(tensors)
        counted = Counter(
            {kind: sum(row["bytes"] for row in rows.values()) for kind, rows in summary["classes"].items()}
        )
        assert counted.total() == summary["bytes_out"] == sum(info.num_bytes for info in tensors.values())
        assert "bf16 first" in summary["rounding"]

    def test_progress_is_the_source_in_bytes(self, random_source: Path, tmp_path: Path) -> None:
        notes = Notes()
        convert(random_source, tmp_path, recipe("fp8_block"), notes)
        assert notes.done == notes.total == sum(i.num_bytes for i in Checkpoint.open(random_source).tensors.values())
        assert notes.notes[-1:] == ["331 parameters; linear layers: 288 in fp8_block; 13.8 MB became 13.8 MB"]


class TestResume:
    def test_an_interrupted_run_goes_on_to_the_same_bytes(self, random_source: Path, tmp_path: Path) -> None:
        clean = contents(convert(random_source, tmp_path / "clean", recipe("nvfp4")))
        with pytest.raises(KeyboardInterrupt):
            convert(random_source, tmp_path / "cut", recipe("nvfp4"), Notes(stop_after=8_000_000))
        out = tmp_path / "cut" / "out"
        finished = {f.name: f.stat().st_mtime_ns for f in out.glob("*.safetensors")}
        assert 1 <= len(finished) < 4
        assert all(contents(out)[name] == clean[name] for name in finished)
        notes = Notes()
        assert contents(convert(random_source, tmp_path / "cut", recipe("nvfp4"), notes)) == clean
        assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
        assert notes.notes[0] == f"{len(finished)} of 4 shards are finished from an earlier run"
        assert notes.done == notes.total

    def test_a_killed_process_leaves_no_half_shard(self, random_source: Path, tmp_path: Path) -> None:
        code = (
            "import os, sys; from pathlib import Path; from tests._utils.run_stage import *\n"
            "class Killed(Notes):\n"
            "    def advance(self, amount=1):\n"
            "        self.done += amount\n"
            "        if self.done > 8_000_000: os.kill(os.getpid(), 9)\n"
            "convert(Path(sys.argv[1]), Path(sys.argv[2]), recipe('nvfp4'), Killed())"
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code, str(random_source), str(tmp_path / "cut")], cwd=ROOT, env=environment
        )
        assert done.returncode == -9
        out = tmp_path / "cut" / "out"
        assert list((tmp_path / "cut" / "state").rglob("*.part")) and not (out / "config.json").exists()
        clean = contents(convert(random_source, tmp_path / "clean", recipe("nvfp4")))
        for file in out.glob("*.safetensors"):
            assert file.read_bytes() == clean[file.name]
        assert contents(convert(random_source, tmp_path / "cut", recipe("nvfp4"))) == clean

    @pytest.mark.parametrize("damage", ["flip", "recipe"])
    def test_a_shard_that_is_not_as_recorded_is_written_again(
        self, random_source: Path, tmp_path: Path, damage: str
    ) -> None:
        with pytest.raises(KeyboardInterrupt):
            convert(
                random_source,
                tmp_path / "cut",
                recipe("fp8" if damage == "recipe" else "nvfp4"),
                Notes(stop_after=8_000_000),
            )
        victim = min((tmp_path / "cut" / "out").glob("*.safetensors"))  # of two that are made at once, either may be first
        raw = bytearray(victim.read_bytes())
        raw[-5] ^= 1
        if damage == "flip":
            victim.write_bytes(bytes(raw))
        again = contents(convert(random_source, tmp_path / "cut", recipe("nvfp4")))
        assert again == contents(convert(random_source, tmp_path / "clean", recipe("nvfp4")))

    def test_files_of_an_earlier_attempt_are_removed(self, random_source: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model-00009-of-00009.safetensors").write_bytes(b"old")
        (tmp_path / "out" / "hf_quant_config.json").write_text("{}")
        out = convert(random_source, tmp_path, recipe("bf16"))
        assert not (out / "model-00009-of-00009.safetensors").exists() and not (out / "hf_quant_config.json").exists()


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "where"),
        [("bf16", "codes"), ("fp8_block", "codes"), ("nvfp4", "codes"), ("fp8", "scale"), ("fp8_block", "norm")],
    )
    def test_nan_is_refused_by_name(self, copy: Path, tmp_path: Path, name: str, where: str) -> None:
        entry = Checkpoint.open(copy).entries["model.layers.2.self_attn.q_a_proj.weight"]
        codes, scales = (array.copy() for array in entry.load().values())
        if where == "codes":
            codes.view(np.uint8)[3, 5] = 0x7F
            replace_tensors(copy, {entry.name: ("F8_E4M3", codes)})
        elif where == "scale":
            scales[0, 1] = np.inf
            replace_tensors(copy, {entry.name + "_scale_inv": ("F32", scales)})
        else:
            replace_tensors(copy, {"model.norm.weight": ("BF16", np.full(256, np.nan, BF16))})
        wanted = "model.norm.weight" if where == "norm" else entry.name
        with pytest.raises(ConfigError, match=f"holds NaN or infinity in {wanted}"):
            convert(copy, tmp_path / "w", recipe(name))

    def test_a_width_that_nvfp4_cannot_hold_is_refused_before_writing(self, tmp_path: Path) -> None:
        source = random_checkpoint.write(tmp_path / "s", {"moe_intermediate_size": 120})
        with pytest.raises(ConfigError, match=r"experts\.0\.down_proj\.weight has shape \[256, 120\].*multiple of 16"):
            convert(source, tmp_path / "w", recipe("nvfp4"))
        assert not list((tmp_path / "w" / "out").iterdir())

    def test_an_incomplete_recipe_is_refused(self, random_source: Path, tmp_path: Path) -> None:
        table = recipe("bf16")
        del table["formats"]["o_proj"]
        with pytest.raises(ConfigError, match="no format for o_proj: run plan again"):
            convert(random_source, tmp_path, table)

    def test_a_full_disk_is_foreseen(
        self, random_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(StageError, match=r"takes 2\d\.\d MiB, but .* has 976\.6 KiB free: make room"):
            convert(random_source, tmp_path, recipe("bf16"))


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Of three times the layers only the names take more; a shard of weights would be 5 MB."""
    peaks = []
    for layers in (2, 6):
        source = random_checkpoint.write(tmp_path / f"s{layers}", {"num_hidden_layers": layers})
        tracemalloc.start()
        convert(source, tmp_path / f"w{layers}", recipe("nvfp4"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 3e6 and peaks[1] < 16e6
