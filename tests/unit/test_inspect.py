"""What a checkpoint is said to be: formats, sizes, ranks, and every oddity with its tensor and its consequence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint, ShardWriter
from pipeline.checkpoint.reader import DTYPES, TensorInfo, read_tensor
from pipeline.cli import main
from pipeline.config.schema import HwConfig
from pipeline.formats.numerics import BF16
from pipeline.inspect import Inspection, inspect
from pipeline.inspect.ranks import RankOptions
from pipeline.inspect.recognise import recognise
from pipeline.models.arch import Arch
from pipeline.planner.memory import memory_of
from pipeline.planner.setup import Layout, Setup
from scripts import make_r1_headers
from tests._utils import random_checkpoint
from tests._utils.run_stage import convert, recipe
from tests.unit.test_checkpoint import edit_index, replace_tensors

ROOT = Path(__file__).parents[2]
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"), {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2})


@pytest.fixture(scope="module")
def nvfp4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("nvfp4"), recipe("nvfp4", attention="bf16", o_proj="bf16", mtp="bf16"))


@pytest.fixture
def blocks(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "blocks"))


@pytest.fixture
def fours(nvfp4: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nvfp4, tmp_path / "fours"))


def faults(found: Inspection) -> list[tuple[str, str]]:
    return [(problem.kind, problem.tensor) for problem in found.oddities if not problem.note]


def text_of(found: Inspection, kind: str) -> str:
    return " ".join(problem.text for problem in found.oddities if problem.kind == kind)


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_modelopt(folder: Path, **changes: Any) -> None:
    table = json.loads((folder / "hf_quant_config.json").read_text())
    table["quantization"] |= changes
    (folder / "hf_quant_config.json").write_text(json.dumps(table))


def tensor(dtype: str, shape: tuple[int, ...]) -> tuple[str, np.ndarray]:
    return dtype, np.ones(shape, DTYPES[dtype])


class TestWhatItIs:
    @pytest.mark.parametrize(
        "table",
        [
            recipe("fp8_block"),
            recipe("bf16"),
            recipe("fp8", mtp="bf16"),
            recipe("nvfp4"),
            recipe("fp8_block", routed_experts="nvfp4", dense_mlp="bf16", o_proj="fp8"),
        ],
    )
    def test_what_convert_writes_is_named_and_not_odd(self, source: Path, tmp_path: Path, table: dict[str, Any]) -> None:
        out = convert(source, tmp_path, table)
        found, entries = inspect(out), Checkpoint.open(out).entries.values()
        assert faults(found) == []
        rows = found.rows()
        for row in rows:
            mine = [e for e in entries if e.place.kind == row["class"] and e.format.name in (row["format"], "bf16")]
            formats = {row["format"] for row in rows if row["class"] == mine[0].place.kind}
            assert formats == {e.format.name for e in entries if e.place.kind == row["class"]}
        assert sum(row["bytes"] for row in rows) == sum(entry.num_bytes for entry in entries)
        assert sum(row["parameters"] for row in rows) == sum(int(np.prod(entry.shape)) for entry in entries)

    def test_the_command(self, nvfp4: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(nvfp4), "tp=2", "ep=2"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == "quantisation: config.json says NVFP4; hf_quant_config.json says NVFP4; KV cache FP8"
        assert lines[2].startswith("MTP: layer 2, ") and lines[-1] == "nothing odd" and "a rank, TP2+EP2" in lines[4]
        assert main(["inspect", str(nvfp4), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["declared"]["hf_quant_config.json"] == {"algorithm": "NVFP4", "kv_cache": "FP8"}
        assert {(row["class"], row["format"]) for row in result["rows"]} >= {("routed_experts", "nvfp4"), ("mtp", "bf16")}

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            ([], "inspect takes one checkpoint folder, but got 0"),
            (["nowhere"], "nowhere is not a folder"),
            (["{}", "--draw", "x.svg"], "--draw is for results of engine=tensorrt or of onnx"),
            (["{}", "pp=2"], "does not know pp"),
            (["{}", "tp=4", "ep=3"], "ep=3 does not divide tp=4"),
            (["{}", "tp=none"], "tp=none is no number"),
            (["{}", "attention_dp=yes"], "attention_dp=yes is neither"),
        ],
    )
    def test_refusals(self, source: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", *(word.format(source) for word in words)]) == 2
        assert sentence in capsys.readouterr().err

    def test_it_imports_no_torch(self, source: Path) -> None:
        code = f"import sys; from pipeline.cli import main; main(['inspect', {str(source)!r}]); assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)

    def test_copies_are_found_by_content(self, blocks: Path) -> None:
        assert inspect(blocks).copies == {}
        embedding = Checkpoint.open(blocks).entries["model.embed_tokens.weight"].load()["weight"].copy()
        replace_tensors(blocks, {"model.layers.2.embed_tokens.weight": ("BF16", embedding)})
        found = inspect(blocks, RankOptions(Layout(1, 1, False)))
        assert found.copies == {"model.layers.2.embed_tokens": "model.embed_tokens"}
        total = sum(row["bytes"] for row in found.rows())
        assert sum(row["rank_bytes"] for row in found.rows()) == total - embedding.nbytes


FORMATS: dict[str, tuple[dict[str, tuple[str, tuple[int, ...]]], tuple[int, int]]] = {
    "awq": ({"qweight": ("I32", (256, 64)), "qzeros": ("I32", (2, 64)), "scales": ("F16", (2, 512))}, (512, 256)),
    "gptq": ({"qweight": ("I32", (32, 512)), "qzeros": ("I32", (2, 64)), "scales": ("F16", (2, 512))}, (512, 256)),
    "compressed-tensors int4": (
        {"weight_packed": ("I32", (512, 32)), "weight_scale": ("BF16", (512, 2)), "weight_shape": ("I64", (2,))}, (512, 256),
    ),
    "compressed-tensors nvfp4": (
        {"weight_packed": ("U8", (512, 128)), "weight_scale": ("F8_E4M3", (512, 16)), "weight_global_scale": ("F32", (1,))},
        (512, 256),
    ),
    "compressed-tensors fp8_block": ({"weight": ("F8_E4M3", (512, 256)), "weight_scale": ("BF16", (4, 2))}, (512, 256)),
    "fp8_per_channel": ({"weight": ("F8_E4M3", (512, 256)), "weight_scale": ("F32", (512, 1))}, (512, 256)),
    "fp8": ({"weight": ("F8_E4M3", (512, 256)), "weight_scale": ("F32", ())}, (512, 256)),
    "mxfp8": ({"weight": ("F8_E4M3", (512, 256)), "weight_scale": ("U8", (512, 8))}, (512, 256)),
    "mxfp4": ({"weight": ("U8", (512, 128)), "weight_scale": ("F8_E8M0", (512, 8))}, (512, 256)),
    "nvfp4_weight_only": (
        {"weight": ("U8", (512, 128)), "weight_scale": ("F8_E4M3", (512, 16)), "weight_scale_2": ("F32", ())}, (512, 256),
    ),
    "int4_awq": (
        {"weight": ("U8", (256, 256)), "weight_scale": ("F32", (512, 2)), "pre_quant_scale": ("BF16", (256,))}, (512, 256),
    ),
    "int8": ({"weight": ("I8", (512, 256)), "weight_scale": ("F32", (512, 1))}, (512, 256)),
    "unknown": ({"weight": ("F8_E5M2", (512, 256))}, (512, 256)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_other_tools(name: str) -> None:
    stored, shape = FORMATS[name]
    infos = {leaf: TensorInfo(leaf, dtype, dims, Path(), 0, 0) for leaf, (dtype, dims) in stored.items()}
    assert recognise(infos) == (name, shape)


def test_a_checkpoint_of_another_model_and_tool(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = "model.layers.0.mlp.experts.0.up_proj."
    stored = {base + leaf: value for leaf, value in FORMATS["awq"][0].items()} | {"lm_head.weight": ("F16", (64, 256))}
    with ShardWriter(tmp_path / "model.safetensors", [(n, d, s) for n, (d, s) in stored.items()]) as writer:
        for name, (dtype, shape) in stored.items():
            writer.write(name, np.ones(shape, DTYPES[dtype]))
    found = inspect(tmp_path)
    assert [(row["class"], row["format"], row["parameters"]) for row in found.rows()] == [
        ("lm_head", "f16", 64 * 256), ("routed_experts", "awq", 512 * 256),
    ]  # fmt: skip
    assert faults(found) == [] and "model_type is 'qwen3_moe'" in text_of(found, "architecture")


class TestRanks:
    @pytest.mark.parametrize("layout", [Layout(8, 8, True), Layout(8, 8, False), Layout(8, 2, False), Layout(4, 4, True)])
    def test_they_are_the_planners(self, tmp_path: Path, layout: Layout) -> None:
        config = make_r1_headers.r1_config() | {"num_hidden_layers": 5}
        found = inspect(make_r1_headers.write(tmp_path, config, 6), RankOptions(layout))
        formats = dict.fromkeys(("attention", "o_proj", "dense_mlp", "shared_experts", "routed_experts"), "fp8_block")
        machine = HwConfig(num_devices=8, memory_bytes=1)
        (planned,) = memory_of(Setup(arch=Arch.from_hf(config), hw=machine, formats=formats, layout=layout))
        mine = {row["class"]: row["rank_bytes"] for row in found.rows() if row["class"] != "mtp"}
        assert mine == {kind: pytest.approx(size, rel=1e-6) for kind, size in planned.weights.items()}


def drop(*names: str) -> Damage:
    return lambda folder: replace_tensors(folder, dict.fromkeys(names))


def put(name: str, value: tuple[str, np.ndarray]) -> Damage:
    return lambda folder: replace_tensors(folder, {name: value})


def drop_mtp(folder: Path) -> None:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    edit_index(folder, lambda table: [table.pop(name) for name in list(table) if name.startswith("model.layers.2.")])
    kept = Checkpoint.survey(folder)[0].tensors.values()
    for file in set(weight_map.values()):
        arrays = {info.name: (info.dtype, read_tensor(info).copy()) for info in kept if info.file.name == file}
        if not arrays:
            (folder / file).unlink()
            continue
        with ShardWriter(folder / file, [(n, d, a.shape) for n, (d, a) in arrays.items()]) as writer:
            for name, (_, array) in arrays.items():
                writer.write(name, array)


BLOCK_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
UP = "model.layers.1.mlp.experts.0.up_proj"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
Q_A = "model.layers.0.self_attn.q_a_proj"
BLOCK_FAULTS: dict[str, tuple[Damage, str, str, str]] = {
    "no scale": (drop(f"{UP}.weight_scale_inv"), "missing-scale", f"{UP}.weight", "codes for weights"),
    "no weight": (drop(f"{UP}.weight"), "orphan-scale", f"{UP}.weight_scale_inv", "no weight beside it"),
    "no layer": (drop(f"{UP}.weight", f"{UP}.weight_scale_inv"), "missing-parameter", f"{UP}.weight", "loaders stop"),
    "bias in bf16": (put(BIAS, ("BF16", np.zeros(4, BF16))), "router-bias-type", BIAS, "which experts are chosen"),
    "scale shape": (
        put(f"{UP}.weight_scale_inv", tensor("F32", (1, 1))), "shape-of-a-scale", f"{UP}.weight_scale_inv", "needs [1, 2]",
    ),
    "shape": (put("lm_head.weight", tensor("BF16", (8, 256))), "shape", "lm_head.weight", "config.json means [1024, 256]"),
    "unknown": (put("lm_head.weight", tensor("U8", (1024, 256))), "missing-scale", "lm_head.weight", "without a scale"),
    "ghost": (
        lambda folder: edit_index(folder, lambda table: table.update(ghost="model-00001-of-00004.safetensors")),
        "index-without-tensor", "ghost", "does not hold it",
    ),
    "unlisted": (
        lambda folder: edit_index(folder, lambda table: table.pop("model.norm.weight")),
        "tensor-without-index", "model.norm.weight", "index and shard disagree",
    ),
    "spare file": (
        lambda folder: shutil.copy(folder / "model-00001-of-00004.safetensors", folder / "old.safetensors") and None,
        "file-without-index", "", "old.safetensors lies beside the index",
    ),
    "undeclared": (
        lambda folder: edit_json(folder / "config.json", quantization_config=None),
        "not-declared", "", "take the checkpoint for BF16",
    ),
    "tied": (
        lambda folder: edit_json(folder / "config.json", tie_word_embeddings=True), "tied-head", "lm_head.weight", "ties it",
    ),
    "MTP dropped": (drop_mtp, "mtp-dropped", "model.layers.2", "no speculative decoding"),
    "mtp-not-announced": (
        lambda folder: edit_json(folder / "config.json", num_nextn_predict_layers=0),
        "mtp-not-announced", "model.layers.2", "no loader",
    ),
    "formats-of-a-pair": (
        lambda folder: replace_tensors(folder, {f"{Q_A}.weight": tensor("BF16", (128, 256)), f"{Q_A}.weight_scale_inv": None}),
        "formats-of-a-pair", "", "run the two as one matrix",
    ),
}  # fmt: skip
FOUR_FAULTS: dict[str, tuple[Damage, str, str, str]] = {
    "pair": (put(f"{UP}.weight_scale_2", ("F32", np.array(3e-4, np.float32))), "scales-of-a-pair", "", "off by a factor of"),
    "zero scale": (put(f"{UP}.input_scale", ("F32", np.array(0, np.float32))), "unusable-scale", f"{UP}.input_scale", "NaN or 0"),
    "no input_scale": (drop(f"{UP}.input_scale"), "missing-input-scale", f"{UP}.input_scale", "fill in 0"),
    "algorithm": (
        lambda folder: edit_modelopt(folder, quant_algo="FP8"),
        "configs-disagree-on-algorithm", "", "config.json says algorithm NVFP4",
    ),
    "declared-otherwise": (
        lambda folder: edit_modelopt(folder, quant_algo="FP8"), "declared-otherwise", "", "says FP8, the tensors show",
    ),
    "kv": (lambda folder: edit_modelopt(folder, kv_cache_quant_algo=None), "configs-disagree-on-kv-cache", "", "FP8"),
    "leftover fp8 config": (
        lambda folder: edit_json(folder / "config.json", quantization_config=dict(BLOCK_CONFIG)),
        "configs-disagree-on-algorithm", "", "config.json says algorithm FP8_BLOCK_SCALES, hf_quant_config.json NVFP4",
    ),
    "pattern": (
        lambda folder: edit_modelopt(folder, exclude_modules=["lm_headd", "model.layers.*self_attn*", "model.layers.2*"]),
        "pattern-without-a-module", "lm_headd", "matches no module",
    ),
    "not excluded": (
        lambda folder: edit_modelopt(folder, exclude_modules=["model.layers.0.self_attn*", "model.layers.2*"]),
        "plain-but-not-excluded", "model.layers.1.self_attn.q_a_proj", "build it quantised",
    ),
    "excluded": (
        lambda folder: edit_modelopt(folder, exclude_modules=[r"re:.*\.self_attn\..*", "model.layers.2*", UP]),
        "excluded-but-quantised", UP, "read codes",
    ),
    "width": (
        lambda folder: replace_tensors(folder, {f"{UP}.weight": tensor("U8", (128, 125))}),
        "width", f"{UP}.weight", "250 is no multiple of 16",
    ),
}  # fmt: skip


class TestOddities:
    @pytest.mark.parametrize("name", BLOCK_FAULTS)
    def test_of_fp8_blocks(self, blocks: Path, name: str) -> None:
        self.check(blocks, *BLOCK_FAULTS[name])

    @pytest.mark.parametrize("name", FOUR_FAULTS)
    def test_of_nvfp4(self, fours: Path, name: str) -> None:
        self.check(fours, *FOUR_FAULTS[name])

    def check(self, folder: Path, damage: Damage, kind: str, tensor: str, words: str) -> None:
        """The fault is not there before, and is told after, with its tensor and what comes of it."""
        assert kind not in {problem.kind for problem in inspect(folder).oddities}
        damage(folder)
        found = inspect(folder)
        told = [problem for problem in found.oddities if problem.kind == kind]
        assert told and (not tensor or tensor in {problem.tensor for problem in told}), faults(found)
        assert words in text_of(found, kind) and all(problem.text.endswith(".") for problem in told)
        assert f"! {told[0].text}" in found.lines()

    def test_a_dropped_mtp_layer_is_one_oddity(self, blocks: Path) -> None:
        drop_mtp(blocks)
        found = inspect(blocks)
        assert faults(found) == [("mtp-dropped", "model.layers.2")] and "MTP: dropped" in found.lines()

    def test_an_unreadable_shard_is_one_oddity(self, blocks: Path) -> None:
        (blocks / "model-00002-of-00004.safetensors").write_bytes(b"cut")
        assert faults(inspect(blocks)) == [("unreadable-file", "")]

    def test_many_are_counted(self, blocks: Path) -> None:
        scales = [name for name in Checkpoint.open(blocks).tensors if name.endswith("up_proj.weight_scale_inv")]
        replace_tensors(blocks, dict.fromkeys(scales))
        lines = [line for line in inspect(blocks).lines() if "without a scale" in line or "more like it (missing-scale)" in line]
        assert len(lines) == 6 and f"and {len(scales) - 5} more" in lines[-1]

    def test_partial_blocks_are_only_noted(self, source: Path) -> None:
        found = inspect(source)
        assert faults(found) == [] and "192 x 256: the last block of 192 covers 64" in text_of(found, "partial-block")


def test_it_takes_about_a_second(tmp_path: Path) -> None:
    """A third of R1; all of it takes 2 s on a core of 2.4 GHz."""
    folder = make_r1_headers.write(tmp_path, make_r1_headers.r1_config() | {"num_hidden_layers": 20}, 50)
    start = time.process_time()
    found = inspect(folder)
    assert len(found.lines()) > 10 and len(found.contents.tensors) > 28_000
    assert time.process_time() - start < 10
