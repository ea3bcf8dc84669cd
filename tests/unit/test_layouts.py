"""Layouts: every form there and back, words against their definition bit by bit, config tables by their readers' rules."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.checkpoint.dry_run import dry_run
from pipeline.checkpoint.reader import DTYPES
from pipeline.checkpoint.recipe import Recipe
from pipeline.config.load import load
from pipeline.config.schema import LAYOUTS as NAMES
from pipeline.core.errors import ConfigError
from pipeline.formats import FORMATS, get_format
from pipeline.formats.int4_awq import INT4_AWQ, Int4Awq
from pipeline.formats.numerics import BF16
from pipeline.inspect import inspect
from pipeline.layouts import LAYOUTS, Form, get_layout, stored_as
from pipeline.planner.plan import make_plan
from scripts.make_foreign_checkpoints import CONFIG, write_source
from tests._utils.run_stage import convert, recipe

SHAPE = (256, 384)
WRITTEN = [(name, form) for name, layout in LAYOUTS.items() for form in layout.forms if form.written]
KINDS = ("normal", "subnormal", "tiles", "extremes", "zero")
ONLY_MLPS = {"attention": "bf16", "o_proj": "bf16", "mtp": "bf16"}


def weight(kind: str, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    rng = np.random.default_rng(len(kind))
    values = rng.normal(0, 0.02, shape)
    if kind == "subnormal":
        values = rng.choice([2.0**-133, -(2.0**-127), 3 * 2.0**-130, 0.0], shape)
    elif kind == "tiles":
        values[:, 16:160], values[4], values[130:, 128:] = 0, -0.0, 0
    elif kind == "extremes":
        values = rng.choice([448.0, -448.0, 0.0, -0.0, 1.0, -0.25], shape)
    elif kind == "zero":
        values = np.zeros(shape)
    return values.astype(np.float32).astype(BF16)


def quantised(form: Form, array: np.ndarray) -> dict[str, np.ndarray]:
    """As convert does it for the form's layout."""
    item = form.item
    if isinstance(item, Int4Awq):
        item = replace(item, scale_rounding=get_layout(form.layout).scale_rounding)
    top = float(np.abs(array.astype(np.float32)).max())
    return item.quantize(array, amax=top, input_scale=0.37)


def int4(seed: int, zero_points: bool) -> dict[str, np.ndarray]:
    """Canonical tensors with every code, scales that BF16 and F16 hold, and maybe zero points."""
    rng = np.random.default_rng(seed)
    n, k = SHAPE
    scales = rng.uniform(1e-3, 1e-1, (n, k // 128)).astype(BF16).astype(np.float32)
    tensors = {"weight": rng.integers(0, 256, (n // 2, k), np.uint8), "weight_scale": scales, "pre_quant_scale": np.ones(k, BF16)}
    return tensors | ({"weight_zero_point": rng.integers(-8, 8, (n, k // 128)).astype(np.int8)} if zero_points else {})


class TestForms:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("layout", "form"), WRITTEN, ids=[f"{name}-{form.item.name}" for name, form in WRITTEN])
    def test_there_and_back(self, layout: str, form: Form, kind: str) -> None:
        canonical = quantised(form, weight(kind))
        announced = {o.suffix: (DTYPES[o.dtype], o.shape) for o in form.outputs("x", SHAPE)}
        if "weight_global_scale" in announced and canonical["weight_scale_2"] < 2.0**-128:
            with pytest.raises(ConfigError, match=r"reciprocal, which compressed-tensors stores, is beyond float32"):
                form.store(canonical, SHAPE)
            return
        stored = form.store(canonical, SHAPE)
        assert announced == {suffix: (array.dtype, array.shape) for suffix, array in stored.items()}
        back = form.load(stored, SHAPE)
        for suffix, array in canonical.items():
            if suffix in back:
                assert (back[suffix].dtype, back[suffix].shape) == (array.dtype, array.shape)
                same = array.tobytes() == back[suffix].tobytes()
                near = suffix in ("weight_scale_2", "input_scale") and array == pytest.approx(back[suffix], rel=2.0**-23)
                assert same or (layout == "compressed_tensors" and near), suffix
        dynamic = (layout, form.item.name) == ("compressed_tensors", "w4a8_awq")  # activations get their scales at run time
        assert canonical.keys() - back.keys() == ({"weight_scale_2", "input_scale"} if dynamic else set())
        one, two = form.item.dequantize(canonical), form.item.dequantize(back)
        np.testing.assert_allclose(two, one, rtol=2.0**-22 if layout == "compressed_tensors" else 0, atol=0)

    @pytest.mark.parametrize("name", ["compressed_tensors", "autoawq", "gptq"])
    def test_int4_keeps_every_code(self, name: str) -> None:
        form, tensors = stored_as(get_layout(name), INT4_AWQ), int4(1, False)
        back = form.load(form.store(tensors, SHAPE), SHAPE)
        assert not back.pop("weight_zero_point", np.zeros(1)).any()
        assert {k: v.tobytes() for k, v in back.items()} == {k: v.tobytes() for k, v in tensors.items()}

    @pytest.mark.parametrize("name", ["autoawq", "gptq"])
    def test_int4_keeps_zero_points(self, name: str) -> None:
        form, tensors = stored_as(get_layout(name), INT4_AWQ), int4(2, True)
        back = form.load(form.store(tensors, SHAPE), SHAPE)
        assert {k: v.tobytes() for k, v in back.items()} == {k: v.tobytes() for k, v in tensors.items()}

    def test_zero_points_and_factors_are_not_lost_in_silence(self) -> None:
        for layout in ("modelopt", "compressed_tensors"):
            with pytest.raises(ConfigError, match="weight_zero_point, for which the layout"):
                stored_as(get_layout(layout), INT4_AWQ).store(int4(3, True), SHAPE)
        factors = int4(3, False) | {"pre_quant_scale": np.full(SHAPE[1], 0.5, BF16)}
        with pytest.raises(ConfigError, match="pre_quant_scale, for which the layout autoawq has no place"):
            stored_as(get_layout("autoawq"), INT4_AWQ).store(factors, SHAPE)

    def test_a_layout_refuses_what_it_cannot_hold(self) -> None:
        with pytest.raises(ConfigError, match=r"autoawq has no form for nvfp4, only for int4_awq: set quant.layout to one of"):
            stored_as(get_layout("autoawq"), get_format("nvfp4"))
        with pytest.raises(ConfigError, match="compressed_tensors has no form for w4a8_nvfp4_fp8"):
            stored_as(get_layout("compressed_tensors"), get_format("w4a8_nvfp4_fp8"))

    def test_names_are_those_of_the_configuration(self) -> None:
        assert tuple(LAYOUTS) == NAMES
        assert {form.item.name for form in get_layout("modelopt").forms} == FORMATS.keys()


def signed(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Codes [N, K] of -8 to 7, unpacked one by one from the canonical bytes."""
    n, k = SHAPE
    codes = np.zeros((n, k), int)
    for row in range(n):
        nibbles = (tensors["weight"][row // 2] >> (4 * (row % 2))) & 15
        codes[row] = np.where(nibbles > 7, nibbles.astype(int) - 16, nibbles)
    return codes


class TestWords:
    """No GPTQ or AWQ library runs here: these packers are written from the kernels' definition of a word, bit by bit."""

    def test_awq(self) -> None:
        tensors = int4(4, True)
        stored = stored_as(get_layout("autoawq"), INT4_AWQ).store(tensors, SHAPE)
        codes, zeros = signed(tensors) + 8, tensors["weight_zero_point"].astype(int) + 8
        for inputs, outputs in ((0, 0), (17, 8), (383, 248)):
            word = sum(int(codes[outputs + (0, 2, 4, 6, 1, 3, 5, 7)[i], inputs]) << (4 * i) for i in range(8))
            assert stored["qweight"][inputs, outputs // 8].view(np.uint32) == word
            word = sum(int(zeros[outputs + (0, 2, 4, 6, 1, 3, 5, 7)[i], inputs // 128]) << (4 * i) for i in range(8))
            assert stored["qzeros"][inputs // 128, outputs // 8].view(np.uint32) == word
        assert stored["scales"].dtype == np.float16 and stored["scales"][1, 5] == tensors["weight_scale"][5, 1]

    def test_gptq(self) -> None:
        tensors = int4(5, True)
        stored = stored_as(get_layout("gptq"), INT4_AWQ).store(tensors, SHAPE)
        codes, zeros = signed(tensors) + 8, tensors["weight_zero_point"].astype(int) + 8
        for inputs, outputs in ((0, 0), (16, 8), (376, 248)):
            word = sum(int(codes[outputs, inputs + i]) << (4 * i) for i in range(8))
            assert stored["qweight"][inputs // 8, outputs].view(np.uint32) == word
            word = sum(((int(zeros[outputs + i, inputs // 128]) - 1) % 16) << (4 * i) for i in range(8))
            assert stored["qzeros"][inputs // 128, outputs // 8].view(np.uint32) == word
        np.testing.assert_array_equal(stored["g_idx"], np.arange(384) // 128)

    def test_gptq_v2_is_told_by_its_zero_points(self) -> None:
        form, tensors = stored_as(get_layout("gptq"), INT4_AWQ), int4(6, False)
        stored = form.store(tensors, SHAPE)
        assert (stored["qzeros"].view(np.uint32) == 0x77777777).all()
        other = stored | {"qzeros": np.full_like(stored["qzeros"].view(np.uint32), 0x88888888).view(np.int32)}
        assert not form.load(other, SHAPE)["weight_zero_point"].any()

    def test_gptq_refuses_inputs_in_another_order(self) -> None:
        form = stored_as(get_layout("gptq"), INT4_AWQ)
        stored = form.store(int4(7, False), SHAPE)
        with pytest.raises(ConfigError, match="desc_act=false"):
            form.load(stored | {"g_idx": stored["g_idx"][::-1]}, SHAPE)

    def test_dequantises_with_zero_points(self) -> None:
        tensors = int4(8, True)
        spread = [np.repeat(tensors[name].astype(np.float32), 128, axis=1) for name in ("weight_zero_point", "weight_scale")]
        np.testing.assert_array_equal(INT4_AWQ.dequantize(tensors), (signed(tensors).astype(np.float32) - spread[0]) * spread[1])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


def converted(source: Path, out: Path, layout: str, name: str, **formats: Any) -> Path:
    out.mkdir(parents=True)
    return convert(source, out, recipe(name, **formats) | {"layout": layout})


def tables(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


class TestCheckpoints:
    @pytest.mark.parametrize("name", ["nvfp4", "w4a16_nvfp4", "fp8", "fp8_channel", "fp8_block", "mxfp8", "mxfp4"])
    def test_both_ways_between_modelopt_and_compressed_tensors(self, source: Path, tmp_path: Path, name: str) -> None:
        first = converted(source, tmp_path / "a", "modelopt", name, mtp="bf16")
        second = converted(first, tmp_path / "b", "compressed_tensors", name, mtp="bf16")
        third = converted(second, tmp_path / "c", "modelopt", name, mtp="bf16")
        direct = converted(source, tmp_path / "d", "compressed_tensors", name, mtp="bf16")
        assert [(f.name, f.read_bytes()) for f in sorted(second.glob("model*"))] == [
            (f.name, f.read_bytes()) for f in sorted(direct.glob("model*"))
        ]
        assert tables(second) == tables(direct) and not (second / "hf_quant_config.json").exists()
        one, two = Checkpoint.open(first).entries, Checkpoint.open(third).entries
        for key, entry in one.items():
            stored = {k: v.tobytes() for k, v in two[key].stored().items() if k not in ("weight_scale_2", "input_scale")}
            assert stored == {k: v.tobytes() for k, v in entry.stored().items() if k in stored} and stored, key

    @pytest.mark.parametrize("layout", ["compressed_tensors", "autoawq", "gptq"])
    def test_int4(self, source: Path, tmp_path: Path, layout: str) -> None:
        out = converted(source, tmp_path / "a", layout, "int4_awq", **ONLY_MLPS)
        again = converted(out, tmp_path / "b", layout, "int4_awq", **ONLY_MLPS)
        one, two = ({f.name: f.read_bytes() for f in folder.iterdir() if f.name != "conversion.json"} for folder in (out, again))
        assert one == two
        before = Checkpoint.open(source).entries
        for key, entry in Checkpoint.open(out).entries.items():
            assert entry.format.name == ("int4_awq" if ".mlp." in key and entry.place.linear else "bf16")
            wanted, got = before[key].dequantized(), entry.dequantized()
            error = np.abs(wanted - got)
            if entry.quantised:
                scales = np.repeat(entry.load()["weight_scale"], 128, axis=1)
                assert (error <= scales * 0.51 + 0.01 * np.abs(wanted)).all()
            else:
                assert not error.any()

    def test_layouts_agree_on_int4(self, source: Path, tmp_path: Path) -> None:
        folders = [converted(source, tmp_path / name, name, "int4_awq", **ONLY_MLPS) for name in NAMES[1:]]
        first, *others = (Checkpoint.open(folder).entries for folder in folders)
        for key, entry in first.items():
            assert all(np.array_equal(other[key].dequantized(), entry.dequantized()) for other in others), key

    def test_a_dry_run_says_what_is_laid_anew(self, source: Path, tmp_path: Path) -> None:
        out = converted(source, tmp_path / "a", "modelopt", "nvfp4", mtp="bf16")
        plan = dry_run(out, Recipe.from_table(recipe("nvfp4", mtp="bf16") | {"layout": "compressed_tensors"}), tmp_path)
        assert "re-lay as compressed_tensors" in "\n".join(plan.lines()) and not plan.problems
        plan = dry_run(out, Recipe.from_table(recipe("nvfp4", mtp="bf16") | {"layout": "gptq"}), tmp_path)
        assert "\n".join(plan.lines()).count("gptq has no form for nvfp4") == 1

    def test_engines_that_do_not_load_a_layout_refuse_it_with_a_way_out(self) -> None:
        words = ["+hw=b200", "model=deepseek_r1", "quant.layout=compressed_tensors"]
        config = load(words)
        with pytest.raises(ConfigError, match=r"not quant\.layout=compressed_tensors: set quant\.layout=modelopt, or convert"):
            make_plan(config, dict(config.model.hf))

    @pytest.mark.parametrize(
        ("layout", "name", "formats"),
        [
            ("compressed_tensors", "nvfp4", {"mtp": "bf16"}),
            ("compressed_tensors", "w4a8_awq", {"attention": "bf16", "o_proj": "bf16", "mtp": "bf16"}),
            ("compressed_tensors", "bf16", {"routed_experts": "nvfp4", "dense_mlp": "fp8_channel", "shared_experts": "fp8"}),
            ("autoawq", "int4_awq", ONLY_MLPS),
            ("gptq", "int4_awq", ONLY_MLPS),
        ],
    )
    def test_it_is_not_odd(self, source: Path, tmp_path: Path, layout: str, name: str, formats: dict[str, str]) -> None:
        found = inspect(converted(source, tmp_path / "out", layout, name, **formats))
        assert [problem.text for problem in found.oddities if not problem.note] == []


    def test_pairs_with_two_scales_are_mended(self, source: Path, tmp_path: Path) -> None:
        """llm-compressor's gate and up projections have different global scales: runtimes would read one of them wrongly."""
        foreign = Path(__file__).parents[1] / "data" / "foreign" / "llmcompressor_nvfp4a16"
        table = recipe("w4a16_nvfp4", mtp="bf16") | {"layout": "modelopt"}
        plan = dry_run(foreign, Recipe.from_table(table), tmp_path)
        actions = {step.entry.name: step.action for step in plan.plan.steps}
        before, after = Checkpoint.open(foreign).entries, Checkpoint.open(convert(foreign, tmp_path, table)).entries
        plain = Checkpoint.open(source).entries
        for name, entry in after.items():
            if not entry.quantised:
                continue
            partner = f"{entry.place.partner}.weight"
            equal = partner not in before or before[name].load()["weight_scale_2"] == before[partner].load()["weight_scale_2"]
            assert actions[name] == ("re-lay as modelopt" if equal else "requantise to w4a16_nvfp4")
            if equal:
                assert all(entry.load()[leaf].tobytes() == before[name].load()[leaf].tobytes() for leaf in entry.load())
            assert partner not in after or entry.load()["weight_scale_2"] == after[partner].load()["weight_scale_2"]
            error = np.square(entry.dequantized() - plain[name].dequantized()).sum() / np.square(plain[name].dequantized()).sum()
            assert error < 10**-1.85, name
        assert len(set(actions.values())) == 4


class TestTables:
    def scheme(self, table: dict[str, Any], module: str) -> str | None:
        """The packing that compressed-tensors finds for a module: names before expressions, `ignore` above all."""
        def means(target: str) -> bool:
            return bool(re.match(target[3:], module)) if target.startswith("re:") else target in (module, "Linear")

        if any(means(pattern) for pattern in table["ignore"]):
            return None
        groups = [(t, g) for g in table["config_groups"].values() for t in g["targets"] if means(t)]
        return min(groups, key=lambda pair: ("re:" in pair[0], pair[0]))[1]["format"] if groups else None

    @pytest.mark.parametrize(
        "formats", [{}, {"routed_experts": "nvfp4", "shared_experts": "mxfp8", "o_proj": "fp8", "mtp": "bf16"}]
    )
    def test_every_module_finds_its_scheme(self, tmp_path: Path, formats: dict[str, str]) -> None:
        config = CONFIG | {"num_nextn_predict_layers": 1, "num_hidden_layers": 12, "n_routed_experts": 2, "topk_group": 2}
        source = write_source(tmp_path / "source", config)
        out = converted(source, tmp_path / "out", "compressed_tensors", "fp8_block", **formats)
        packings = {
            "nvfp4": "nvfp4-pack-quantized", "mxfp8": "mxfp8-quantized", "fp8": "float-quantized", "fp8_block": "float-quantized",
        }  # fmt: skip
        table = tables(out)
        for entry in Checkpoint.open(out).entries.values():
            if len(entry.shape) == 2:
                assert self.scheme(table, entry.place.module) == packings.get(entry.format.name), entry.name
        assert table["format"] == ("mixed-precision" if formats else "float-quantized")
        if not formats:  # vLLM's name of the MTP layer's decoder block
            assert self.scheme(table, "model.layers.12.mtp_block.self_attn.kv_b_proj") == "float-quantized"

    def test_kv_cache(self, source: Path, tmp_path: Path) -> None:
        out = converted(source, tmp_path / "out", "compressed_tensors", "nvfp4", mtp="bf16")
        assert tables(out)["kv_cache_scheme"]["num_bits"] == 8 and tables(out)["kv_cache_scheme"]["strategy"] == "tensor"

    def test_awq_names_are_found_nowhere_else(self, source: Path, tmp_path: Path) -> None:
        """Its loaders look for them anywhere in a name, so `mlp.gate` alone would also mean `mlp.gate_proj`."""
        out = converted(source, tmp_path / "out", "autoawq", "int4_awq", **ONLY_MLPS)
        table = tables(out)
        assert {k: table[k] for k in ("quant_method", "bits", "group_size", "zero_point", "version")} == {
            "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        }  # fmt: skip
        for entry in Checkpoint.open(out).entries.values():
            if len(entry.shape) == 2:
                assert entry.quantised != any(name in entry.place.module for name in table["modules_to_not_convert"]), entry.name

    def test_gptq_rules_leave_out_what_is_plain(self, source: Path, tmp_path: Path) -> None:
        table = tables(out := converted(source, tmp_path / "out", "gptq", "int4_awq", **ONLY_MLPS))
        assert (table["sym"], table["desc_act"], table["checkpoint_format"]) == (True, False, "gptq")
        for entry in Checkpoint.open(out).entries.values():
            if len(entry.shape) == 2:
                left_out = any(re.match(rule[2:], entry.place.module) for rule in table["dynamic"] if rule.startswith("-:"))
                assert entry.quantised != left_out, entry.name

    def test_groups_that_the_tensors_contradict_are_odd(self, source: Path, tmp_path: Path) -> None:
        out = converted(source, tmp_path / "out", "compressed_tensors", "fp8_block", routed_experts="nvfp4")
        table = json.loads((out / "config.json").read_text())
        groups = table["quantization_config"]["config_groups"]
        groups["group_0"]["targets"], groups["group_1"]["targets"] = groups["group_1"]["targets"], groups["group_0"]["targets"]
        (out / "config.json").write_text(json.dumps(table))
        texts = [problem.text for problem in inspect(out).oddities]
        assert any("0.mlp.down_proj as compressed-tensors nvfp4, but it is compressed-tensors fp8_block" in text for text in texts)
        groups["group_0"]["targets"] = groups["group_0"]["targets"][:0]
        (out / "config.json").write_text(json.dumps(table))
        assert any("experts.0.down_proj as compressed-tensors no scheme" in problem.text for problem in inspect(out).oddities)

    def test_weight_only_layers_under_a_scheme_with_activations_are_odd(self, tmp_path: Path) -> None:
        """Loaders would fill in the scales that are not there, and multiply by whatever memory holds."""
        shutil.copytree(Path(__file__).parents[1] / "data" / "foreign" / "llmcompressor_nvfp4a16", tmp_path / "out")
        table = json.loads((tmp_path / "out" / "config.json").read_text())
        group = table["quantization_config"]["config_groups"]["NVFP4A16"]
        assert not any("declares" in problem.text for problem in inspect(tmp_path / "out").oddities)
        group["input_activations"] = group["weights"] | {"dynamic": "local"}
        (tmp_path / "out" / "config.json").write_text(json.dumps(table))
        texts = [problem.text for problem in inspect(tmp_path / "out").oddities]
        assert any("experts.0.down_proj as compressed-tensors nvfp4 with input_global_scale, but it is" in text for text in texts)
