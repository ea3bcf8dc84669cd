"""`verify DIR` on checkpoints that other tools wrote, and as a command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.reader import read_tensor
from pipeline.cli import main
from pipeline.config.schema import VerifyConfig
from pipeline.core.errors import ConfigError
from pipeline.inspect.contents import Contents
from pipeline.verify.foreign import Verdict, verify_folder
from scripts.make_foreign_checkpoints import CONFIG, write_source
from tests._utils.run_stage import Notes, convert, recipe

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "tests" / "data" / "foreign"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the other tools were given."""
    return write_source(tmp_path_factory.mktemp("foreign") / "source")


def verdict_of(name: str, source: Path | None) -> Verdict:
    return verify_folder(FOREIGN / name, source, VerifyConfig(), Notes())


def broken(verdict: Verdict) -> dict[str, int]:
    """Rule -> breaches, notes aside."""
    return {finding.rule.id: len(finding.faults) for finding in verdict.findings if finding.rule.level != "note"}


def decibels(verdict: Verdict, form: str) -> list[float]:
    assert verdict.weights is not None
    return [error.sqnr_db for error in verdict.weights.errors if error.format == form and error.sqnr_db is not None]


def test_modelopt_nvfp4(source: Path) -> None:
    """Sound, but for kv_b_proj, which NVIDIA's own recipe for DeepSeek leaves out."""
    verdict = verdict_of("modelopt_nvfp4", source)
    assert broken(verdict) == {"kv-b-format": 2} and verdict.exit_code == 0
    assert len(decibels(verdict, "nvfp4")) == 28 and all(20 < value < 21.5 for value in decibels(verdict, "nvfp4"))


def test_modelopt_fp8_blocks(source: Path) -> None:
    """Scales of four dimensions under an algorithm's name that loaders do not know."""
    verdict = verdict_of("modelopt_fp8_pb_wo", source)
    assert broken(verdict)["rank-of-a-scale"] == 11 and "declared-otherwise" in broken(verdict) and verdict.exit_code == 4
    assert all(31 < value < 32 for value in decibels(verdict, "fp8_block"))


def test_an_index_without_scales(source: Path) -> None:
    """As NVIDIA's script for DeepSeek writes it. The weights are there, and are compared all the same."""
    verdict = verdict_of("deepseek_script_index", source)
    assert broken(verdict) == {"tensor-without-index": 84, "kv-b-format": 2} and verdict.exit_code == 4
    assert len(decibels(verdict, "nvfp4")) == 28


def test_llm_compressor_pairs(source: Path) -> None:
    """Its model-free path gives q_a and kv_a, gate and up their own global scales: all but the dense layer's."""
    verdict = verdict_of("llmcompressor_nvfp4a16", source)
    assert broken(verdict) == {"scales-of-a-pair": 7, "kv-b-format": 2} and verdict.exit_code == 4
    facts = [fault.fact for finding in verdict.findings for fault in finding.faults if finding.rule.id == "scales-of-a-pair"]
    assert any("experts.3.gate_proj" in fact and "off by a factor of 2.79" in fact for fact in facts)
    assert "rounded-global-scale" in {finding.rule.id for finding in verdict.findings}
    assert all(20 < value < 21.5 for value in decibels(verdict, "w4a16_nvfp4"))


@pytest.mark.parametrize(
    ("layout", "form"),
    [("autoawq", "int4_awq"), ("gptq", "int4_awq"), ("compressed_tensors", "int4_awq"), ("compressed_tensors", "nvfp4")],
)
def test_the_layouts_of_other_tools(source: Path, tmp_path: Path, layout: str, form: str) -> None:
    """Packed in other orders, decoded and compared. Scales moved by one group are seen, though each is sound."""
    plain = dict.fromkeys(("attention", "o_proj", "mtp"), "bf16")
    folder = convert(source, tmp_path, recipe(form, **plain) | {"layout": layout})
    verdict = verify_folder(folder, source, VerifyConfig(), Notes())
    assert not broken(verdict) and verdict.exit_code == 0, verdict.lines()
    assert len(decibels(verdict, form)) == 18 and all(
        value > VerifyConfig().alarm_sqnr_db[form] for value in decibels(verdict, form)
    )
    scales = next(info for name, info in Contents.open(folder).tensors.items() if name.endswith((".scales", ".weight_scale")))
    raw = bytearray(scales.file.read_bytes())
    part = raw[scales.start : scales.stop]
    raw[scales.start : scales.stop] = part[len(part) // 2 :] + part[: len(part) // 2]
    scales.file.write_bytes(bytes(raw))
    assert broken(verify_folder(folder, source, VerifyConfig(), Notes())).keys() == {"low-sqnr"}


class TestCommand:
    def test_findings_and_exit_code(self, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "report"
        assert main(["verify", str(FOREIGN / "llmcompressor_nvfp4a16"), f"checkpoint={source}", f"out={out}"]) == 4
        text = capsys.readouterr().out
        assert "error scales-of-a-pair (7)" in text and "  fix: quantise the two again with the larger amax of both" in text
        assert "routed_experts  w4a16_nvfp4  12" in text and text.splitlines()[-1].endswith("1 error, 1 warning, 1 note")
        assert {file.name for file in out.iterdir()} == {"report.json", "report.md", "heatmap.svg"}
        assert "**error scales-of-a-pair (7)**" in (out / "report.md").read_text()

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", str(FOREIGN / "modelopt_nvfp4"), "--json"]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["command"] == "verify" and result["exit_code"] == 0 and result["weights"] is None
        [finding] = [item for item in result["findings"] if item["level"] == "warning"]
        assert finding["rule"] == "kv-b-format" and finding["count"] == 2 and finding["faults"][0]["tensor"].endswith("kv_b_proj")

    def test_limits_and_the_embedded_source(self, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = str(FOREIGN / "modelopt_nvfp4")
        assert main(["verify", folder, f"checkpoint={source}", "verify.min_sqnr_db.nvfp4=20.6"]) == 4
        assert "error low-sqnr" in capsys.readouterr().out
        assert main(["verify", str(ROOT / "pipeline" / "data" / "tiny_r1"), "checkpoint=embedded:tiny_r1", "verify.sample=1"]) == 0
        assert "up to 1 of each layer, projection and format" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["nowhere"], "nowhere is not a folder"),
            (["{}", "{}"], "verify takes one checkpoint folder, but got 2"),
            (["{}", "checkpoint=nowhere"], "nowhere is not a folder"),
            (["{}", "quant=nvfp4"], "verify DIR does not know quant"),
            (["{}", "verify.sampel=3"], "verify.sampel"),
            (["{}", "verify.sample=-3"], "verify.sample=-3"),
        ],
    )
    def test_refusals(self, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
        folder = str(FOREIGN / "modelopt_nvfp4")
        assert main(["verify", *(word.format(folder) for word in words)]) == 2
        assert sentence in capsys.readouterr().err

    def test_it_imports_no_torch(self) -> None:
        words = ["verify", str(FOREIGN / "modelopt_nvfp4")]
        code = f"import sys; from pipeline.cli import main; main({words!r}); assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_undersized_scales_of_the_last_rank(source: Path, tmp_path: Path) -> None:
    """The amax of one rank's half instead of the whole: blocks of the other half are clipped at 448."""
    folder = Path(shutil.copytree(FOREIGN / "modelopt_nvfp4", tmp_path / "copy"))
    name = "model.layers.0.mlp.down_proj.weight_scale_2"
    info = Contents.open(folder).tensors[name]
    raw = bytearray(info.file.read_bytes())
    raw[info.start : info.stop] = (read_tensor(info) * np.float32(0.7)).astype("<f4").tobytes()
    info.file.write_bytes(bytes(raw))
    found = verify_folder(folder, source, VerifyConfig(), Notes())
    assert "clipped-weights" in broken(found) and CONFIG["num_hidden_layers"] == 2


def test_rounded_int4_scales_clip_nothing(tmp_path: Path) -> None:
    """AutoAWQ's scales are rounded, after the weights were: the largest weight may lie two roundings above 7 scales."""
    source = ROOT / "pipeline" / "data" / "tiny_r1"
    plain = dict.fromkeys(("attention", "o_proj", "mtp"), "bf16")
    folder = convert(source, tmp_path, recipe("int4_awq", **plain) | {"layout": "autoawq"})
    found = verify_folder(folder, source, VerifyConfig(), Notes())
    assert "clipped-weights" not in broken(found) and found.exit_code == 0


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has neither"):
        verify_folder(FOREIGN / "modelopt_nvfp4", tmp_path, VerifyConfig(), Notes())


@pytest.mark.parametrize(
    ("config", "rule"), [("{}", "no-config"), ("[]", "unreadable-config"), ("{", "unreadable-config")]
)
def test_a_config_is_missing_or_unreadable_not_both(source: Path, tmp_path: Path, config: str, rule: str) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "copy"))
    (folder / "config.json").write_text(config)
    assert {"no-config", "unreadable-config"} & broken(verify_folder(folder, None, VerifyConfig(), Notes())).keys() == {rule}


def test_blocks_of_another_size_than_declared(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "pipeline" / "data" / "tiny_r1", tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(config))
    found = verify_folder(folder, None, VerifyConfig(), Notes())
    facts = [fault.fact for finding in found.findings for fault in finding.faults if finding.rule.id == "declared-otherwise"]
    assert facts == ["config.json says weight_block_size [64, 64], the tensors show [128, 128]"] and found.exit_code == 4


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["verify", str(FOREIGN / "modelopt_nvfp4"), f"out={tmp_path / 'file' / 'report'}"]) == 2
    said = capsys.readouterr()
    assert "cannot be written" in said.err and "[verify]" not in said.out + said.err
