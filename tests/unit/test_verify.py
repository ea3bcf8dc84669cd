"""The gate: its numbers on sound checkpoints, its sentences on damaged ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.core.errors import ConfigError, GateError
from pipeline.verify.text import heldout_file, memory_needed, windows_of
from pipeline.verify.weights import FLOOR_DB
from tests._utils import random_checkpoint
from tests._utils.run_stage import Notes, convert, recipe, verify
from tests.unit.test_checkpoint import replace_tensors

TINY_R1 = Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1"
# An untrained model's top token is a coin toss, so only trained weights are held to the default limits.
LOOSE = {"min_top1": 0.0, "max_kl": 0.2, "tokens": 128, "window": 64}
EXPERT = "model.layers.3.mlp.experts.7.down_proj"

pytest.importorskip("torch", reason="the reference model is torch's")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def nvfp4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("nvfp4"), recipe("nvfp4", mtp="bf16"))


@pytest.fixture(scope="module")
def silent(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source without held-out text: only weights are compared."""
    folder = Path(shutil.copytree(source, tmp_path_factory.mktemp("silent") / "source"))
    (folder / "heldout.txt").unlink()
    return folder


@pytest.fixture
def damaged(nvfp4: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nvfp4, tmp_path / "damaged"))


def test_a_pass_through_is_exact(source: Path, tmp_path: Path) -> None:
    report = verify(source, convert(source, tmp_path, recipe("fp8_block")), tmp_path / "v", tokens=512)
    assert report["verdict"] == "passed"
    assert all(
        row["sqnr_db"] is None and row["relative_l2"] == row["max_abs"] == 0 for row in report["tensors"].values()
    )
    logits = report["logits"]
    assert (logits["kl"], logits["top1"], logits["ppl_ratio"]) == (0, 1, 1) and logits["tokens"] == 511


def test_nvfp4_lies_where_it_should(source: Path, nvfp4: Path, tmp_path: Path) -> None:
    progress = Notes()
    report = verify(source, nvfp4, tmp_path, progress, **LOOSE)
    rows = [row for row in report["tensors"].values() if row["format"] == "nvfp4"]
    assert len(rows) == 227 and all(19 < row["sqnr_db"] < 23 and row["clipped"] == 0 for row in rows)
    assert all(row["relative_l2"] == pytest.approx(10 ** (-row["sqnr_db"] / 20), rel=2e-3) for row in rows)
    assert 0 < report["logits"]["kl"] < 0.2 and report["logits"]["ppl_ratio"] == pytest.approx(1, abs=0.1)
    assert any(line.startswith("routed_experts  nvfp4") for line in progress.notes)
    assert "mean KL" in progress.notes[-1] and progress.done == progress.total
    assert "| routed_experts | nvfp4 | 192 |" in (tmp_path / "report.md").read_text()


def test_sqnr_is_what_the_definition_says(silent: Path, source: Path, nvfp4: Path, tmp_path: Path) -> None:
    report = verify(silent, nvfp4, tmp_path, **LOOSE)
    name = EXPERT + ".weight"
    want = Checkpoint.open(source).entries[name].dequantized().astype(np.float64)
    got = Checkpoint.open(nvfp4).entries[name].dequantized().astype(np.float64)
    row = report["tensors"][name]
    assert row["sqnr_db"] == round(10 * np.log10((want**2).sum() / ((got - want) ** 2).sum()), 2)
    assert row["max_abs"] == pytest.approx(np.abs(got - want).max(), rel=1e-3)


@pytest.mark.parametrize(("name", "low", "high"), [("fp8", 26, 60), ("bf16", 50, 75)])
def test_the_other_formats(source: Path, tmp_path: Path, name: str, low: float, high: float) -> None:
    report = verify(source, convert(source, tmp_path, recipe(name)), tmp_path / "v", min_sqnr_db={name: low}, **LOOSE)
    linear = [row for key, row in report["tensors"].items() if row["format"] == name and row["sqnr_db"] is not None]
    assert len(linear) >= 282 and all(low < row["sqnr_db"] < high for row in linear)


def test_reports_are_the_same_bytes(source: Path, nvfp4: Path, tmp_path: Path) -> None:
    for run in ("a", "b"):
        verify(source, nvfp4, tmp_path / run, **LOOSE)
    for file in ("report.json", "report.md", "heatmap.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_sensitivity_ranks_what_was_converted(source: Path, nvfp4: Path, tmp_path: Path) -> None:
    """Each group alone; the groups with all of the loss are converted like the whole, so one class of one stands for it."""
    report = verify(source, nvfp4, tmp_path, sensitivity=True, sensitivity_tokens=64, **LOOSE)
    rows = {row["group"]: row for row in report["sensitivity"]}
    assert {"layer 0", "layer 4", "routed_experts", "o_proj"} <= rows.keys() and "mtp" not in rows and "norm" not in rows
    assert all(0 < row["kl"] <= 0.2 for row in rows.values())
    assert [row["kl"] for row in report["sensitivity"]] == sorted((row["kl"] for row in rows.values()), reverse=True)
    assert "One group converted" in (tmp_path / "report.md").read_text()


def test_sensitivity_of_everything_is_the_whole(source: Path, nvfp4: Path) -> None:
    """Lending all changed weights at once gives the logits of the converted model, and giving them back the source's."""
    from pipeline.verify.logits import compare_logits, sensitivity

    before, after = Checkpoint.open(source), Checkpoint.open(nvfp4)
    windows = windows_of(source / "heldout.txt", source / "tokenizer.json", before.arch, tokens=64, window=64)
    one, none = sensitivity(before, after, windows, {"all": list(after.entries), "none": []}, lambda amount: None)
    whole = compare_logits(before, after, windows, lambda amount: None)
    assert (one.group, one.kl, one.top1) == ("all", whole.kl, whole.top1) and (none.kl, none.top1) == (0.0, 1.0)


def test_a_sample_is_said_and_smaller(silent: Path, nvfp4: Path, tmp_path: Path) -> None:
    report = verify(silent, nvfp4, tmp_path, sample=2, **LOOSE)
    assert report["compared"].startswith("121 of 331 parameters were compared: up to 2 of each layer, projection and format")
    assert len(report["tensors"]) == 121 and len(report["layers"]) == 6 and report["sensitivity"] == []


def test_a_wrong_global_scale_fails_with_numbers(silent: Path, damaged: Path, tmp_path: Path) -> None:
    name = f"{EXPERT}.weight_scale_2"
    scale = Checkpoint.open(damaged).entries[f"{EXPERT}.weight"].load()["weight_scale_2"]
    replace_tensors(damaged, {name: ("F32", scale * np.float32(1.25))})
    with pytest.raises(GateError, match=r"1 of 227 nvfp4 tensors lie below verify\.min_sqnr_db\.nvfp4=18 dB") as error:
        verify(silent, damaged, tmp_path / "v", **LOOSE)
    assert f"the worst, {EXPERT}.weight, at 11." in str(error.value)
    assert "quant.routed_experts=bf16" in str(error.value) and not error.value.damage
    assert "Failed." in (tmp_path / "v" / "report.md").read_text()


def test_a_global_scale_that_is_too_small_counts_as_clipping(silent: Path, damaged: Path, tmp_path: Path) -> None:
    scale = Checkpoint.open(damaged).entries[f"{EXPERT}.weight"].load()["weight_scale_2"]
    replace_tensors(damaged, {f"{EXPERT}.weight_scale_2": ("F32", scale * np.float32(0.5))})
    report = verify(silent, damaged, tmp_path / "v", min_sqnr_db={"nvfp4": 0.0}, **LOOSE)
    assert report["tensors"][f"{EXPERT}.weight"]["clipped"] > 0


def test_a_nan_block_scale_fails_by_name(silent: Path, damaged: Path, tmp_path: Path) -> None:
    scales = Checkpoint.open(damaged).entries[f"{EXPERT}.weight"].load()["weight_scale"].copy()
    scales.view(np.uint8)[0, 0] = 0x7F
    replace_tensors(damaged, {f"{EXPERT}.weight_scale": ("F8_E4M3", scales)})
    with pytest.raises(
        GateError, match=rf"{EXPERT}\.weight_scale holds a value that is not finite.*at {FLOOR_DB:g} dB"
    ) as error:
        verify(silent, damaged, tmp_path / "v", **LOOSE)
    assert error.value.damage, "no other precision mends it"


@pytest.mark.parametrize("value", [0.0, np.inf, -1.0])
def test_an_input_scale_that_kernels_would_divide_by_fails(
    silent: Path, damaged: Path, tmp_path: Path, value: float
) -> None:
    replace_tensors(damaged, {f"{EXPERT}.input_scale": ("F32", np.array(value, np.float32))})
    with pytest.raises(GateError, match=rf"{EXPERT}\.input_scale holds a value that is not finite and above 0"):
        verify(silent, damaged, tmp_path / "v", **LOOSE)


def test_fused_layers_with_different_scales_fail(silent: Path, damaged: Path, tmp_path: Path) -> None:
    module = "model.layers.2.mlp.experts.0.up_proj"
    replace_tensors(damaged, {f"{module}.input_scale": ("F32", np.array(2.0, np.float32))})
    with pytest.raises(
        GateError, match=r"experts\.0\.gate_proj and .*experts\.0\.up_proj have input_scale 1 and 2, off by a factor"
    ):
        verify(silent, damaged, tmp_path / "v", **LOOSE)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"max_kl": 1e-6}, r"Mean KL is 0\.\d+ nats a token, above verify\.max_kl=1e-06"),
        ({"min_top1": 0.9999}, r"Top-1 agreement is 0\.\d+, below verify\.min_top1=0\.9999"),
        ({"max_ppl_ratio": 0.1}, r"Perplexity rises from .* above verify\.max_ppl_ratio=0\.1"),
    ],
)
def test_each_limit_on_logits_can_fail(
    source: Path, nvfp4: Path, tmp_path: Path, limits: dict[str, float], sentence: str
) -> None:
    with pytest.raises(GateError, match=sentence + r".*quant\.o_proj=bf16.*quant\.accuracy_sensitive=true"):
        verify(source, nvfp4, tmp_path, **(LOOSE | limits))
    assert (tmp_path / "report.json").is_file()


def test_logits_are_left_out_with_a_note_when_memory_is_short(
    source: Path, nvfp4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stages.verify.available_memory", lambda: 60_000_000)
    progress = Notes()
    report = verify(source, nvfp4, tmp_path, progress)
    assert report["logits"] is None and report["verdict"] == "passed"
    assert progress.notes[-1].startswith("Logits were not compared: the float32 model and its log-probabilities take 0.1 GB")
    assert "Logits were not compared" in (tmp_path / "report.md").read_text()


def test_logits_are_left_out_with_a_note_without_a_text(silent: Path, nvfp4: Path, tmp_path: Path) -> None:
    progress = Notes()
    assert verify(silent, nvfp4, tmp_path, progress)["logits"] is None
    assert "no heldout.txt; name a text as verify.text=FILE" in progress.notes[-1]


class TestText:
    def test_windows_begin_with_bos_and_stay_within_the_budget(self, source: Path) -> None:
        arch = Checkpoint.open(source).arch
        windows = windows_of(source / "heldout.txt", source / "tokenizer.json", arch, tokens=1000, window=300)
        assert [len(w) for w in windows] == [300, 300, 300] and all(w[0] == 0 and 0 not in w[1:] for w in windows)

    def test_windows_are_spread_over_the_text(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("a" * 99 + "b" * 99 + "c" * 99 + "d" * 99)
        windows = windows_of(
            tmp_path / "text", source / "tokenizer.json", Checkpoint.open(source).arch, tokens=200, window=100
        )
        assert [len(set(w[1:])) for w in windows] == [1, 1] and windows[0][1] + 2 == windows[1][1]

    def test_a_short_text_is_used_whole(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("abc")
        windows = windows_of(
            tmp_path / "text", source / "tokenizer.json", Checkpoint.open(source).arch, tokens=100, window=50
        )
        assert len(windows) == 1 and len(windows[0]) == 4

    def test_an_empty_text_is_refused(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("")
        with pytest.raises(ConfigError, match="holds 0 tokens, too few"):
            windows_of(
                tmp_path / "text", source / "tokenizer.json", Checkpoint.open(source).arch, tokens=100, window=50
            )

    def test_a_tokenizer_of_another_model_is_refused(self, source: Path) -> None:
        small = SimpleNamespace(bos_token_id=0, vocab_size=64)
        with pytest.raises(ConfigError, match="the model has 64: it is another's"):
            windows_of(source / "heldout.txt", source / "tokenizer.json", small, tokens=100, window=50)

    @pytest.mark.parametrize("content", ["{}", "[1]", "", "{"])
    def test_a_file_that_is_no_tokenizer_is_named(self, source: Path, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer \("):
            windows_of(source / "heldout.txt", tmp_path / "tokenizer.json", Checkpoint.open(source).arch, tokens=100, window=50)

    def test_a_text_that_is_not_utf8_is_named(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "text").write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="text cannot be read as UTF-8 text"):
            windows_of(tmp_path / "text", source / "tokenizer.json", Checkpoint.open(source).arch, tokens=100, window=50)

    def test_a_named_text_must_exist(self, source: Path) -> None:
        assert heldout_file(source, None) == source / "heldout.txt"
        with pytest.raises(ConfigError, match=r"verify\.text=/nowhere is not a file"):
            heldout_file(source, "/nowhere")

    def test_memory_is_counted_from_the_shapes(self, source: Path) -> None:
        checkpoint = Checkpoint.open(source)
        elements = sum(int(np.prod(entry.shape)) for entry in checkpoint.entries.values())
        assert memory_needed(checkpoint.arch, 10) == 4 * (elements + 10 * 1024)


@pytest.mark.skipif(not (TINY_R1 / "config.json").is_file(), reason="pipeline/data/tiny_r1 is not there")
@pytest.mark.parametrize("name", ["fp8_block", "fp8", "bf16", "nvfp4"])
def test_the_embedded_model_passes_the_default_gate(tmp_path: Path, name: str) -> None:
    classes = {"attention": "bf16", "o_proj": "bf16", "mtp": "bf16"} if name == "nvfp4" else {}
    report = verify(TINY_R1, convert(TINY_R1, tmp_path, recipe(name, **classes)), tmp_path / "v", tokens=1024)
    assert report["verdict"] == "passed" and report["logits"]["ppl_source"] < 100
