"""Weights in row ranges: the same numbers as whole tensors, whatever the pieces, threads and format; samples; the picture."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.config.schema import ALARM_SQNR_DB, MIN_SQNR_DB, VerifyConfig
from pipeline.formats import FORMATS
from pipeline.verify import rows as rows_module
from pipeline.verify.damage import by_layer, by_projection, groups
from pipeline.verify.gate import alarms, below, scale_faults
from pipeline.verify.heatmap import AMBER, RED, heatmap
from pipeline.verify.rows import Scales, read_rows, row_pieces
from pipeline.verify.sample import choose, projection, sentence
from pipeline.verify.weights import TensorError, compare_weights
from tests._utils import random_checkpoint
from tests._utils.run_stage import convert, recipe
from tests.unit.test_checkpoint import replace_tensors

ROOT = Path(__file__).parents[2]
SMALL = {"num_hidden_layers": 3, "n_routed_experts": 4, "n_group": 2}
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"), SMALL)


@pytest.fixture(scope="module")
def nvfp4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("nvfp4"), recipe("nvfp4", attention="fp8_block", mtp="bf16"))


def errors_of(source: Path, folder: Path, threads: int = 1) -> dict[str, TensorError]:
    before, after = Checkpoint.open(source), Checkpoint.open(folder)
    return {error.name: error for error, _ in compare_weights(before, after.entries.values(), threads)}


def error(name: str, sqnr: float | None, layer: int | None = 1, *, relative: float | None = 0.1) -> TensorError:
    return TensorError(name, "routed_experts", layer, "fp8_block", "nvfp4", 100, relative, sqnr, 0.1, 0.0)


class TestRows:
    @pytest.mark.parametrize("shape", [(), (7,), (576, 7168), (1, 3), (129280, 7168), (5, 4, 3), (0, 4)])
    def test_pieces_cover_every_row_once(self, shape: tuple[int, ...], nvfp4: Path) -> None:
        norm = Checkpoint.open(nvfp4).entries["model.norm.weight"]
        pieces = row_pieces(replace(norm, shape=shape, tensors={"weight": replace(norm.main, shape=shape)}))
        covered = [row for piece in pieces for row in range(piece.start, piece.stop)]
        assert covered == list(range(shape[0] if shape else 1))
        assert all(piece.start % 128 == 0 for piece in pieces)
        width = int(np.prod(shape[1:]))
        assert all((piece.stop - piece.start) * width <= max(rows_module.PIECE_ELEMENTS, 128 * width) for piece in pieces)

    @pytest.mark.parametrize("name", FORMATS)
    def test_ranges_dequantise_to_the_rows_of_the_whole(self, source: Path, tmp_path: Path, name: str) -> None:
        folder = convert(source, tmp_path, recipe(name))
        for key in (UP, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.1.mlp.gate.e_score_correction_bias"):
            entry = Checkpoint.open(folder).entries[key]
            whole = entry.dequantized()
            for rows in (slice(0, 128), slice(128, entry.shape[0])) if entry.shape[0] > 128 else (slice(0, entry.shape[0]),):
                np.testing.assert_array_equal(entry.format.dequantize(read_rows(entry, rows)), whole[rows])
            if entry.quantised:
                assert entry.format.limit(Scales(entry)) == entry.format.limit(entry.load())

    def test_a_file_that_shrank_is_told(self, nvfp4: Path, tmp_path: Path) -> None:
        entry = Checkpoint.open(nvfp4).entries[UP]
        short = tmp_path / "short.safetensors"
        short.write_bytes(entry.main.file.read_bytes()[: entry.main.start + 5])
        tensors = {suffix: replace(info, file=short) for suffix, info in entry.tensors.items()}
        with pytest.raises(rows_module.ConfigError, match=r"cannot be read at .*up_proj\.weight: the file ends here"):
            read_rows(replace(entry, tensors=tensors), slice(0, 128))


class TestSums:
    def test_pieces_and_threads_change_nothing(self, source: Path, nvfp4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = errors_of(source, nvfp4)
        monkeypatch.setattr(rows_module, "PIECE_ELEMENTS", 1)
        assert errors_of(source, nvfp4, threads=3) == whole and list(errors_of(source, nvfp4, threads=2)) == list(whole)

    @pytest.mark.parametrize("layout", ["compressed_tensors", "gptq"])
    def test_pieces_of_other_layouts(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
        form = "int4_awq" if layout == "gptq" else "nvfp4"
        plain = dict.fromkeys(("attention", "o_proj", "mtp"), "bf16")
        folder = convert(source, tmp_path, recipe(form, **plain) | {"layout": layout})
        whole = errors_of(source, folder)
        monkeypatch.setattr(rows_module, "PIECE_ELEMENTS", 1)
        assert errors_of(source, folder) == whole and 13 < whole[UP].sqnr_db < 22

    def test_one_changed_byte_of_a_kept_tensor_is_seen(
        self, source: Path, nvfp4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only one range differs: the others, which are not decoded at first, must count for the signal."""
        folder = Path(shutil.copytree(nvfp4, tmp_path / "copy"))
        name = "model.layers.0.self_attn.q_b_proj.weight"
        entry = Checkpoint.open(folder).entries[name]
        codes = entry.load()["weight"].copy()
        codes.view(np.uint8)[0, 0] ^= 0x80
        replace_tensors(folder, {name: ("F8_E4M3", codes)})
        monkeypatch.setattr(rows_module, "PIECE_ELEMENTS", 1)
        found = errors_of(source, folder)[name]
        want, got = (Checkpoint.open(side).entries[name].dequantized().astype(np.float64) for side in (source, folder))
        assert found.sqnr_db == round(10 * np.log10((want**2).sum() / ((got - want) ** 2).sum()), 2)
        assert found.limit_key == "kept" and next(below(MIN_SQNR_DB, [found]))[0] == "kept"

    def test_memory_does_not_grow_with_the_tensor(self, source: Path, tmp_path: Path) -> None:
        """Two weights of 400 MB, sparse on disk, compared in a process whose peak is measured."""
        code = f"""
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from pipeline.checkpoint import Checkpoint
from pipeline.verify.weights import compare_weights
from tests._utils.run_stage import peak_rss
shape, name = (25_600, 8192), "lm_head.weight"
head = Checkpoint.open(Path({str(source)!r})).entries[name]
def entry(file):
    path = Path({str(tmp_path)!r}) / file
    with path.open("wb") as stream:
        stream.truncate(2 * shape[0] * shape[1])
    info = replace(head.main, shape=shape, file=path, start=0, stop=2 * shape[0] * shape[1])
    return replace(head, shape=shape, tensors={{"weight": info}})
before = peak_rss()
[(error, _)] = compare_weights(SimpleNamespace(entries={{name: entry("a")}}), [entry("b")], threads=2)
assert error.sqnr_db is None and error.elements == shape[0] * shape[1]
print(peak_rss() - before)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert int(done.stdout) < 150e6

    def test_bad_scales_are_named(self, source: Path, nvfp4: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(nvfp4, tmp_path / "copy"))
        scales = Checkpoint.open(folder).entries[UP].load()["weight_scale"].copy()
        scales.view(np.uint8)[3, 1] = 0xFF
        replace_tensors(folder, {UP + "_scale": ("F8_E4M3", scales), UP + "_scale_2": ("F32", np.array(0, np.float32))})
        found = errors_of(source, folder)[UP]
        assert found.bad_scales == ("weight_scale", "weight_scale_2") and found.relative_l2 is None
        assert scale_faults([found])[0] == f"{UP}_scale holds a value that is not finite and above 0"


class TestSample:
    def test_it_leaves_no_layer_projection_or_format_out(self, nvfp4: Path) -> None:
        entries = list(Checkpoint.open(nvfp4).entries.values())
        chosen = choose(entries, 2)
        strata = {(e.place.layer, projection(e.name), e.format.name) for e in entries}
        assert {(e.place.layer, projection(e.name), e.format.name) for e in chosen} == strata
        experts = [e.name for e in chosen if e.place.layer == 1 and e.name.endswith("up_proj.weight") and ".experts." in e.name]
        assert {name.split(".")[5] for name in experts} == {"0", "3"}
        assert choose(entries, 0) == entries and len(choose(entries, 1)) == len(strata)

    def test_it_is_said(self) -> None:
        assert sentence(5, 5, 3) == "All 5 parameters were compared."
        assert sentence(5, 90, 3).startswith("5 of 90 parameters were compared: up to 3 of each layer, projection and format")


class TestGate:
    def test_alarms_pass_and_failures_are_not_alarms(self) -> None:
        config = VerifyConfig()
        low, mid, high = error("a.weight", 12.0), error("b.weight", 19.2), error("c.weight", 20.5)
        [text] = alarms(config, [low, mid, high])
        assert text.startswith("1 of 3 nvfp4 tensors lie below verify.alarm_sqnr_db.nvfp4=20 dB, the worst, b.weight, at 19.2")
        assert [item.name for item in next(below(config.min_sqnr_db, [high, mid, low]))[2]] == ["a.weight"]

    def test_each_format_has_both_limits_in_order(self) -> None:
        assert MIN_SQNR_DB.keys() - {"kept"} == ALARM_SQNR_DB.keys() == FORMATS.keys()
        assert all(MIN_SQNR_DB[name] < limit for name, limit in ALARM_SQNR_DB.items())


class TestDamage:
    def test_layers_are_ranked_by_mean_relative_error(self) -> None:
        found = [
            error("model.layers.1.mlp.up_proj.weight", 20.0, relative=0.1), error("model.layers.1.x.weight", None, relative=0.0),
            error("model.layers.2.mlp.up_proj.weight", 14.0, 2, relative=0.2), error("lm_head.weight", 10.0, None),
            error("model.layers.3.mlp.up_proj.weight", -300.0, 3, relative=None),
        ]  # fmt: skip
        layers = by_layer(found)
        assert [item.name for item in layers] == [f"model.layers.{n}" for n in (3, 2, 1)]
        assert layers[2].relative == pytest.approx(0.1**2 / 2) and layers[2].sqnr_db == 23.01
        assert by_projection(found)[-1].name == "x" and layers[0].sqnr_db == -300.0

    def test_groups_hold_what_changed(self) -> None:
        found = [error("model.layers.2.a.weight", 20.0, 2), error("model.layers.0.a.weight", 20.0, 0), error("x.weight", None)]
        assert groups(found) == {
            "layer 0": ["model.layers.0.a.weight"], "layer 2": ["model.layers.2.a.weight"],
            "routed_experts": ["model.layers.0.a.weight", "model.layers.2.a.weight"],
        }  # fmt: skip


class TestHeatmap:
    def test_cells_hold_the_worst_and_their_colour(self) -> None:
        name = "model.layers.{}.mlp.experts.{}.up_proj.weight"
        found = [
            error(name.format(4, 0), 21.0, 4), error(name.format(4, 1), 17.0, 4), error(name.format(11, 0), 19.5, 11),
            error(name.format(12, 0), None, 12), error(name.format(13, 0), -300.0, 13, relative=None),
            error("model.layers.4.input_layernorm.weight", None, 4), error("lm_head.weight", 1.0, None),
        ]  # fmt: skip
        text = heatmap(found, MIN_SQNR_DB, ALARM_SQNR_DB)
        root = ElementTree.fromstring(text)
        space = "{http://www.w3.org/2000/svg}"
        titles = [node.text for node in root.iter(f"{space}title")]
        assert titles[0] == f"{name.format(4, 1)}: nvfp4, 17.00 dB" and len(titles) == 4
        fills = [node.get("fill") for node in root.iter(f"{space}rect") if node.find(f"{space}title") is not None]
        assert fills[:2] == [RED, AMBER] and fills[3] == RED
        labels = [node.text for node in root.iter(f"{space}text")]
        assert {"4", "11", "17.0", "19.5", "exact", "broken", "experts up"} <= set(labels) and "lm_head" not in text
        assert heatmap(found, MIN_SQNR_DB, ALARM_SQNR_DB) == text == heatmap(found[::-1], MIN_SQNR_DB, ALARM_SQNR_DB)

    def test_it_is_drawn_where_nothing_was_compared(self) -> None:
        assert ElementTree.fromstring(heatmap([], {}, {})).tag.endswith("svg")


def test_a_shape_of_another_model_is_not_compared(source: Path, nvfp4: Path) -> None:
    before, after = Checkpoint.open(source), Checkpoint.open(nvfp4)
    entry = after.entries[UP]
    odd = replace(entry, name="ghost.weight")
    assert list(compare_weights(before, [odd, replace(entry, shape=(1, 2))])) == []
