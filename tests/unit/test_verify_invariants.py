"""Each invariant of a checkpoint: silent on a sound one, and told, with the tensor, on one that breaks it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.checkpoint.problems import Problem
from pipeline.checkpoint.source import INDEX
from pipeline.config.schema import VerifyConfig
from pipeline.formats import FORMATS
from pipeline.formats.numerics import E4M3
from pipeline.inspect.contents import Contents
from pipeline.lint.checkpoint import INVARIANTS
from pipeline.lint.report import lint
from pipeline.lint.target import Target
from pipeline.verify.foreign import Verdict, verify_folder
from pipeline.verify.invariants import ERROR, RULES, Subject, check
from scripts.make_foreign_checkpoints import CONFIG
from tests._utils import random_checkpoint
from tests._utils.broken_checkpoints import CASES, LAYER, UP, codes, in_modelopt, put, scalar
from tests._utils.run_stage import Notes, convert, recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound checkpoints: the source in FP8 blocks, all NVFP4, and NVFP4 experts beside FP8 blocks."""
    root = tmp_path_factory.mktemp("bases")
    blocks = random_checkpoint.write(root / "blocks", CONFIG | {"num_nextn_predict_layers": 1})
    (blocks / "heldout.txt").unlink()
    plain = {"attention": "bf16", "o_proj": "bf16", "mtp": "bf16"}
    fours = convert(blocks, root / "fours", recipe("nvfp4", **plain))
    mixed = convert(blocks, root / "mixed", recipe("fp8_block", routed_experts="nvfp4"))
    return {"blocks": blocks, "fours": fours, "mixed": mixed}


def examine(folder: Path, source: Path | None = None) -> Verdict:
    return verify_folder(folder, source, VerifyConfig(), Notes())


def told(verdict: Verdict) -> dict[str, Any]:
    return {finding.rule.id: finding for finding in verdict.findings}


def test_every_rule_is_tested() -> None:
    assert CASES.keys() | {"file-fault", "damaged-source"} == RULES.keys()
    assert all(rule.why and rule.fix and not rule.why.endswith(".") and rule.id == rule.id.lower() for rule in RULES.values())


@pytest.mark.parametrize("base", ["blocks", "fours", "mixed"])
def test_our_own_checkpoints_break_no_rule(bases: dict[str, Path], base: str) -> None:
    verdict = examine(bases[base], bases["blocks"])
    assert told(verdict).keys() <= {"partial-block", "kv-declared-without-scale", "kv-b-in-mixed"} and verdict.exit_code == 0
    assert verdict.weights is not None and verdict.weights.verdict == "passed"


@pytest.mark.parametrize("rule", CASES)
def test_a_breach_is_told_with_its_tensor(bases: dict[str, Path], tmp_path: Path, rule: str) -> None:
    base, damage, tensor, words = CASES[rule]
    folder = Path(shutil.copytree(bases[base], tmp_path / "copy"))
    if damage is not None:
        damage(folder)
    verdict = examine(folder, bases["blocks"] if base != "blocks" else None)
    finding = told(verdict)[rule]
    by_headers = {found.rule.removeprefix("checkpoint/") for found in lint([folder], Target()).findings}
    assert (rule in by_headers) == (finding.rule in INVARIANTS), "lint tells what headers show"
    assert any(fault.tensor.startswith(tensor) and words in fault.fact for fault in finding.faults), finding
    assert verdict.exit_code == (4 if finding.rule.level == ERROR else verdict.exit_code)
    lines = verdict.lines()
    assert any(line.startswith(f"{finding.rule.level} {rule}") for line in lines)
    assert {f"  why: {finding.rule.why}", f"  fix: {finding.rule.fix}"} <= set(lines)
    assert json.loads(json.dumps(verdict.plain()))["exit_code"] == verdict.exit_code


def test_a_source_that_was_cut_off_is_told_with_what_was_not_compared(bases: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(bases["blocks"], tmp_path / "source"))
    file = max(source.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 100)
    verdict = examine(bases["fours"], source)
    finding = told(verdict)["damaged-source"]
    assert len(finding.faults) == 1 and "the source's file ends before it does" in finding.faults[0].fact
    assert verdict.weights is not None and verdict.exit_code == 4


@pytest.mark.parametrize("search", ["mse", "mse_full"])
def test_searched_scales_may_end_at_the_largest(bases: dict[str, Path], tmp_path: Path, search: str) -> None:
    _, many_at_448, _, _ = CASES["saturated-block-scale"]
    plain = {"attention": "bf16", "o_proj": "bf16", "mtp": "bf16"}
    searched = convert(bases["blocks"], tmp_path / "w", recipe("nvfp4", **plain) | {"nvfp4_scale_search": search})
    assert many_at_448 is not None
    many_at_448(searched)
    assert "saturated-block-scale" not in told(examine(searched))
    (searched / "conversion.json").write_text("[1]")
    assert "saturated-block-scale" in told(examine(searched)), "without that record nobody knows that they were searched"


def test_a_fault_that_no_rule_knows_is_told_all_the_same(bases: dict[str, Path]) -> None:
    contents = replace(Contents.open(bases["blocks"]), problems=(Problem("new kind", "x.weight", "x.weight is odd: so odd."),))
    assert [fault.fact for fault in check(Subject(contents))[0].faults] == ["x.weight is odd: so odd"]


def test_a_rule_that_fails_keeps_no_other_from_being_told(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(subject: Subject) -> list[Any]:
        raise KeyError("num_hidden_layers")

    monkeypatch.setitem(RULES, "unusable-scale", replace(RULES["unusable-scale"], check=stumble))
    found = told(examine(bases["fours"]))
    assert found["not-checked"].faults[0].fact == "unusable-scale could not be applied (KeyError: 'num_hidden_layers')"
    assert "kv-declared-without-scale" in found


def test_all_problems_at_once(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bases["fours"], tmp_path / "copy"))
    broken = ("nan-block-scale", "scales-of-a-pair", "pickle", "configs-disagree-on-excludes", "index-without-tensor")
    for rule in broken:
        CASES[rule][1](folder)
    put({f"{LAYER}mlp.experts.0.down_proj.input_scale": None})(folder)
    verdict = examine(folder, bases["blocks"])
    assert {*broken, "missing-input-scale"} <= told(verdict).keys() and verdict.exit_code == 4
    levels = [finding.rule.level for finding in verdict.findings]
    assert levels == sorted(levels, key=("error", "warning", "note").index)


def test_scales_in_another_shard_are_no_fault(bases: dict[str, Path]) -> None:
    """The random checkpoint has such pairs; both the rules and the comparison must join them."""
    files = {name: info.file for name, info in Checkpoint.open(bases["blocks"]).tensors.items()}
    name = random_checkpoint.STRADDLING_SCALE
    assert files[name] != files[f"{name}_scale_inv"]
    assert not {"missing-scale", "orphan-scale", "raw-codes"} & told(examine(bases["blocks"], bases["blocks"])).keys()


def test_zero_tensors_as_modelopt_writes_them(bases: dict[str, Path], tmp_path: Path) -> None:
    """weight_scale_2 = 0 and NaN in every block: two rules, and the comparison says the same."""
    folder = Path(shutil.copytree(bases["fours"], tmp_path / "copy"))
    put({f"{UP}.weight_scale_2": scalar(0), f"{UP}.weight_scale": ("F8_E4M3", np.full((128, 8), np.nan, E4M3))})(folder)
    found = told(examine(folder, bases["blocks"]))
    assert {"unusable-scale", "nan-block-scale", "not-finite"} <= found.keys()
    assert "1,024 of 1,024" in found["nan-block-scale"].faults[0].fact


class TestBrokenFolders:
    """Nothing ends in a traceback: whatever stands in the files, it is told."""

    @pytest.mark.parametrize("value", [None, "text", -1, 1.5, [], {}, True, [1], {"a": 1}, "9" * 30, 10**9, 10**40])
    def test_any_value_in_a_config(self, bases: dict[str, Path], tmp_path: Path, value: Any) -> None:
        folder = Path(shutil.copytree(bases["mixed"], tmp_path / "copy"))
        config = json.loads((folder / "config.json").read_text())
        for key in ("num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts", "quantization_config", "model_type"):
            (folder / "config.json").write_text(json.dumps(config | {key: value}))
            assert examine(folder, bases["blocks"]).findings
        own = json.loads((folder / "hf_quant_config.json").read_text())
        for key in ("exclude_modules", "quantized_layers", "quant_algo", "kv_cache_quant_algo"):
            inline = config["quantization_config"] | {key: value}
            (folder / "config.json").write_text(json.dumps(config | {"quantization_config": inline}))
            (folder / "hf_quant_config.json").write_text(json.dumps(own | {"quantization": own["quantization"] | {key: value}}))
            examine(folder)
        (folder / "hf_quant_config.json").write_text(json.dumps(value))
        (folder / INDEX).write_text(json.dumps({"metadata": value, "weight_map": value}))
        assert "unreadable-index" in told(examine(folder)) or value == {}

    @pytest.mark.parametrize(
        "value", [None, "text", -1, [], {}, {"a": None}, {"group_0": {"targets": 3, "weights": [], "format": {}}}, 10**40]
    )
    def test_any_value_in_a_config_of_compressed_tensors(self, tmp_path: Path, value: Any) -> None:
        folder = Path(shutil.copytree(ROOT / "tests" / "data" / "foreign" / "llmcompressor_nvfp4a16", tmp_path / "copy"))
        config = json.loads((folder / "config.json").read_text())
        for key in ("config_groups", "ignore", "format", "kv_cache_scheme", "quant_method"):
            inline = config["quantization_config"] | {key: value}
            (folder / "config.json").write_text(json.dumps(config | {"quantization_config": inline}))
            found = told(examine(folder))
            assert "scales-of-a-pair" in found and "not-checked" not in found, found.get("not-checked")

    def test_random_bytes_in_a_shard(self, bases: dict[str, Path], tmp_path: Path) -> None:
        """Header and data alike; what is read depends on chance, that something is said does not."""
        rng = np.random.default_rng(0)
        original = min(bases["fours"].glob("*.safetensors")).read_bytes()
        folder = Path(shutil.copytree(bases["fours"], tmp_path / "copy"))
        file = min(folder.glob("*.safetensors"))
        for trial in range(25):
            raw = bytearray(original)
            at = rng.integers(0, 3000 if trial % 2 else len(raw), 8)
            for place in at:
                raw[place] = rng.integers(0, 256)
            file.write_bytes(bytes(raw[: rng.integers(1, len(raw))]) if trial % 3 == 0 else bytes(raw))
            examine(folder, bases["blocks"])

    def test_an_expression_that_is_none(self, bases: dict[str, Path], tmp_path: Path) -> None:
        folder = Path(shutil.copytree(bases["fours"], tmp_path / "copy"))
        in_modelopt(lambda table: table["exclude_modules"].append("re:(["))(folder)
        assert "re:([" in {fault.tensor for fault in told(examine(folder))["pattern-without-a-module"].faults}

    def test_only_pickles(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
        assert told(examine(tmp_path)).keys() == {"no-weights", "pickle"}


class TestSampleAndReport:
    def test_a_sample_reads_the_scales_of_what_it_compares(self, bases: dict[str, Path], tmp_path: Path) -> None:
        folder = Path(shutil.copytree(bases["fours"], tmp_path / "copy"))
        codes(0x7F)(folder)
        one = verify_folder(folder, bases["blocks"], VerifyConfig(sample=1), Notes())
        assert "nan-block-scale" not in told(one) and one.weights is not None
        assert "up to 1 of each layer, projection and format" in one.weights.compared
        assert "nan-block-scale" in told(examine(folder, bases["blocks"]))

    def test_files_are_the_same_bytes(self, bases: dict[str, Path], tmp_path: Path) -> None:
        for run in ("a", "b"):
            examine(bases["mixed"], bases["blocks"]).write(tmp_path / run, VerifyConfig())
        names = {file.name for file in (tmp_path / "a").iterdir()}
        assert names == {"report.json", "report.md", "heatmap.svg"}
        assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)

    def test_formats_know_their_limits(self) -> None:
        assert VerifyConfig().min_sqnr_db.keys() - {"kept"} == FORMATS.keys()
