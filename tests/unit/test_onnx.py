"""Anyone's module to ONNX and TensorRT: checked by onnxruntime, refused in sentences, whole or absent."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.core.errors import ConfigError, PipelineError, StageError
from pipeline.core.events import EventWriter
from pipeline.engines.tensorrt import library
from pipeline.onnx.command import Wish
from tests._utils import random_checkpoint

FACTORIES = """
import torch
from torch.export import Dim

class Net(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.proj = kind, torch.nn.Linear(16, 16)

    def forward(self, x, past):
        print("what modules print is no event")
        if self.kind == "airy":
            return torch.special.airy_ai(self.proj(x))
        if self.kind == "in place":
            past.add_(x)
        if self.kind == "branch" and x.sum() > 0:
            return x
        if self.kind == "number":
            return x, 3
        return {"y": self.proj(x) + past.to(x.dtype), "where": x.argmax(-1), "nested": [past * 2], "same": past}

def make(kind="good", most="6"):
    open_rows = {0: Dim("B", min=1, max=int(most) if most else None)}
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    return Net(kind).to(dtype), (torch.ones(3, 16, dtype=dtype), torch.zeros(3, 16)), (open_rows, open_rows)

def odd():
    return Net("good")
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["out=x"], "onnx takes one MODULE:FACTORY, but got none"),
        (["mine.py", "out=x"], "but got mine.py"),
        (["a:b"], "name it with out=DIR"),
        (["a:b", "out=x", "targets=sm_120"], r"targets=sm_120 is not a list .*: write targets=\[120\]"),
        (["a:b", "out=x", "library=openvino"], "library=openvino is not known: auto, tensorrt"),
        (["a:b", "out=x", "tolerance=2"], "tolerance=2 is not a share"),
        (["a:b", "out=x", "opset=17"], "opset=17: 23 is the first opset"),
    ],
)
def test_words_are_refused_before_anything_is_loaded(words, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Wish.parse(words)


def test_words_of_ours_and_of_the_factory() -> None:
    wish = Wish.parse(["a.b:c", "out=d", "targets=[120,89]", "checkpoint=e", "max_seq_len=64"])
    assert (wish.targets, wish.arguments) == ((89, 120), {"checkpoint": "e", "max_seq_len": "64"})
    with pytest.raises(PipelineError, match="No TensorRT library builds for SM37"):
        Wish.parse(["a:b", "out=x", "targets=37"]).libraries()


def test_only_a_result_of_its_own_is_written_over(tmp_path, capsys) -> None:
    pytest.importorskip("onnxscript", reason="pip install 'r1-pipeline[onnx]'")
    (tmp_path / "precious").write_text("")
    assert main(["onnx", "a:b", f"out={tmp_path}"]) == 2
    assert "holds something that this command did not write" in capsys.readouterr().err


def exported(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "make", **arguments: str) -> dict[str, Any]:
    """The first step, in this process."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript", reason="pip install 'r1-pipeline[onnx]'")
    from pipeline.onnx.export import export

    (folder / "some_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(folder))
    request = {"factory": f"some_factories:{name}", "paths": [], "arguments": arguments, "opset": 23}
    return export(request, folder, EventWriter(io.StringIO()), [])


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("make", {"kind": "airy"}, r"ONNX has no form of aten.special_airy_ai.default \(special_airy_ai in the module itself\)"),
        ("make", {"kind": "in place"}, "The module writes past in place, which ONNX cannot say"),
        ("make", {"kind": "number"}, "returns output_1 beside tensors"),
        ("make", {"kind": "branch"}, r"torch.export does not record the module: \w+: .*data-dependent"),
        ("make", {"colour": "red"}, "some_factories:make failed: TypeError: .*colour"),
        ("odd", {}, "must return .module, args. .*; it returned Net"),
        ("none", {}, "some_factories:none cannot be imported"),
    ],
)
def test_what_cannot_be_exported_is_a_sentence(tmp_path, monkeypatch, name, arguments, sentence) -> None:
    with pytest.raises(PipelineError, match=sentence):
        exported(tmp_path, monkeypatch, name, **arguments)
    assert not (tmp_path / "model.onnx").exists()


def test_names_ranges_and_bytes_are_the_module_s_and_the_same_each_time(tmp_path, monkeypatch) -> None:
    import onnx

    (tmp_path / "again").mkdir()
    made = exported(tmp_path, monkeypatch)
    assert exported(tmp_path / "again", monkeypatch) == made
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "model.onnx").read_bytes()
    assert made["inputs"]["x"] == {"dtype": "float32", "range": [[1, 16], [3, 16], [6, 16]]}
    assert made["outputs"] == ["y", "where", "nested_0", "same"]
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert model.opset_import[0].version == 23 and [item.name for item in model.graph.input] == ["x", "past"]
    assert any(node.name.startswith("proj.") for node in model.graph.node)


def test_what_numpy_has_no_type_for_is_exported_and_not_compared(tmp_path, monkeypatch) -> None:
    made = exported(tmp_path, monkeypatch, kind="bfloat16")
    assert not made["comparable"] and "onnxruntime was not asked: " in made["notes"][0] and "BFloat16" in made["notes"][0]
    assert (tmp_path / "model.onnx").is_file() and made["inputs"]["x"]["dtype"] == "bfloat16"


def test_onnxruntime_is_held_against_torch_at_two_sizes(tmp_path, monkeypatch) -> None:
    """A weight that is changed in the file is seen."""
    pytest.importorskip("onnxruntime", reason="pip install 'r1-pipeline[onnx]'")
    assert exported(tmp_path, monkeypatch, most="")["inputs"]["x"]["range"][2] == [None, 16]  # what an engine would refuse
    from pipeline.onnx.check import check

    rows = check({}, tmp_path, EventWriter(io.StringIO()), [])["agreement"]
    assert [(row["case"], row["output"], row["shape"]) for row in rows[:5:4]] == [("case0", "y", [3, 16]), ("case1", "y", [2, 16])]
    assert max(row["relative"] for row in rows) < 1e-6
    data = tmp_path / "model.onnx.data"
    stored = bytearray(data.read_bytes())
    stored[2:4] = b"\x40\x41"  # the first weight becomes some 12
    data.write_bytes(stored)
    assert max(row["relative"] for row in check({}, tmp_path, EventWriter(io.StringIO()), [])["agreement"]) > 1


def test_infinities_are_met_by_infinities_only() -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'r1-pipeline[onnx]'")
    from pipeline.onnx.check import compare

    masked, other = np.array([-np.inf, np.nan, 2.0]), np.array([0.0, np.nan, 2.5])
    assert compare(masked, masked)["relative"] == 0 and compare(other, masked)["relative"] == np.inf
    assert compare(np.array([-np.inf, np.nan, 2.5]), masked)["relative"] == 0.25


def parsed(tmp_path: Path, node: Any) -> Any:
    from onnx import TensorProto, helper

    from pipeline.onnx.engine import Parsed

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 6]) for name in "xy")
    graph = helper.make_graph([node], "g", [x], [y])
    (tmp_path / "model.onnx").write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11).SerializeToString()
    )
    return Parsed(library.load("tensorrt_rtx"), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("kind", "attributes", "sentence"),
    [
        ("Softplus", {}, None),
        ("Unique", {}, r"does not have Unique \(experts.0.Unique_3\): compute it with other operators"),
        ("TopK", {}, r"refuses experts.0.TopK_3 \(TopK\): "),
    ],
)
def test_what_the_parser_refuses_has_the_name_of_its_node(tmp_path, kind, attributes, sentence) -> None:
    helper = pytest.importorskip("onnx").helper
    if library.installed_version("tensorrt_rtx") is None:
        pytest.skip("the parser is TensorRT-RTX's: pip install 'r1-pipeline[rtx]'")
    node = helper.make_node(kind, ["x"], ["y"], name=f"experts.0.{kind}_3", **attributes)
    if sentence is None:
        assert parsed(tmp_path, node).definition.num_layers >= 1
        return
    with pytest.raises(StageError, match=sentence):
        parsed(tmp_path, node)


def test_our_own_decoder_becomes_an_engine(tmp_path, monkeypatch, capsys) -> None:
    """MLA over a paged cache and experts by `grouped_mm` behind a stable sort: the whole command, as a user runs it."""
    for package in ("torch", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="pip install 'r1-pipeline[onnx,torch]'")
    if library.installed_version("tensorrt_rtx") is None:
        pytest.skip("the engine is TensorRT-RTX's: pip install 'r1-pipeline[rtx]'")
    checkpoint = random_checkpoint.write(tmp_path / "checkpoint", {"num_hidden_layers": 1, "first_k_dense_replace": 0})
    monkeypatch.chdir(tmp_path)
    code = main(
        ["onnx", "pipeline.onnx.decoder:absorbed", "out=made", "targets=[120]", f"checkpoint={checkpoint}", "max_seq_len=64"]
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "made" / "engine.json").read_text())
    assert {(row["case"], row["output"]) for row in report["agreement"]} == {
        (case, name) for case in ("case0", "case1") for name in ("logits", "present_0")
    }  # fmt: skip
    assert max(row["relative"] for row in report["agreement"]) < 1e-5
    assert report["engine"]["inputs"]["tokens"]["range"] == [[1, 1], [2, 5], [4, 32]]
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == [
        "engine.json", "model.engine", "model.layers.txt", "model.onnx", "model.onnx.data",
    ]  # fmt: skip
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".made")]
    text = (tmp_path / "made" / "model.layers.txt").read_text()
    assert "decoder.layers.0.mlp.router.TopK" in text
