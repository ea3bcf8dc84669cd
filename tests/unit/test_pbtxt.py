"""config.pbtxt and the static check of a repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, StageError
from pipeline.triton import pbtxt
from pipeline.triton.check import check_repository
from tests._utils import serving

CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        requests[0].get_response_sender()\n"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    engine = serving.write_fake_engine(folder / "engine")
    (engine / "weights").mkdir()
    (engine / "weights" / "a.bin").write_bytes(b"weights")
    return serving.package_engine(engine, folder / "out", serving.serve_config()).parent


def write_model(repository: Path, name: str = "m", text: str | None = None) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(CODE)
    config = pbtxt.build(name, inputs=[pbtxt.TensorSpec("a", "STRING")], outputs=[], parameters={"k": "v"})
    pbtxt.write(folder / "config.pbtxt", config)
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    return folder


def test_text_and_message_are_the_same_thing(tmp_path: Path) -> None:
    config = pbtxt.build(
        "m",
        inputs=[
            pbtxt.TensorSpec("text_input", "STRING"),
            pbtxt.TensorSpec("stop_words", "STRING", (-1,), optional=True),
        ],
        outputs=[pbtxt.TensorSpec("text_output", "STRING")],
        parameters={"b": 'quote " newline \n', "a": "你好"},
        max_batch_size=1,
    )
    pbtxt.write(tmp_path / "config.pbtxt", config)
    text = (tmp_path / "config.pbtxt").read_text(encoding="utf-8")
    assert "dims: [-1]" in text
    assert text.index('key: "a"') < text.index('key: "b"')
    assert pbtxt.read(tmp_path / "config.pbtxt") == config


def test_the_order_of_parameters_does_not_change_the_bytes(tmp_path: Path) -> None:
    names = [f"p{number}" for number in range(20)]
    for path, order in ((tmp_path / "a", names), (tmp_path / "b", names[::-1])):
        pbtxt.write(path, pbtxt.build("m", inputs=[], outputs=[], parameters={name: name for name in order}))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(("text", "says"), [
    ('name: "m"\nmax_batch_size: ${triton_max_batch_size}', r"2: \$\{triton_max_batch_size\} is a placeholder"),
    ('parameters { key: "a" value { string_value: "${batching_strategy}" } }', "placeholder"),
    ("max_batchsize: 1", "max_batchsize"),
    ("input { data_type: TYPE_INT33 }", "TYPE_INT33"),
    ("model_transaction_policy { decoupled: yes }", "yes"),
    ('parameters { key: "a" value {} }\nparameters { key: "a" value { string_value: "2" } }', "a is given twice"),
])  # fmt: skip
def test_the_reader_refuses_what_would_go_wrong_later(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError, match=says):
        pbtxt.read(tmp_path / "config.pbtxt")


def test_package_lays_the_model_out(packaged: Path) -> None:
    model = packaged / "repository" / "fake_r1"
    names = {path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()}
    assert names >= {
        "config.pbtxt",
        "1/model.py",
        "1/scheduler.py",
        "1/sampler.py",
        "1/text.py",
        "1/engine.json",
        "1/weights/a.bin",
    }
    assert [path.name for path in (packaged / "repository").iterdir()] == ["fake_r1"]
    config = pbtxt.read(model / "config.pbtxt")
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (1, True)
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
    manifest = json.loads((packaged / "package.json").read_text())
    assert manifest["models"]["fake_r1"]["inputs"]["stop_words"] == {"type": "STRING", "dims": [-1]}
    assert set(manifest["sources"]) >= {"fake_r1/1/model.py", "fake_r1/config.pbtxt"}
    assert "/tmp" not in json.dumps(manifest)


def test_package_links_the_engine_and_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    engine = serving.write_fake_engine(tmp_path / "engine")
    one, two = (serving.package_engine(engine, tmp_path / name, serving.serve_config()) for name in ("one", "two"))
    for path in (path for path in one.parent.rglob("*") if path.is_file()):
        assert path.read_bytes() == (two.parent / path.relative_to(one.parent)).read_bytes()
    assert (one / "fake_r1/1/engine.json").samefile(engine / "engine.json")


def test_every_option_of_the_model_is_declared(packaged: Path) -> None:
    code = (packaged / "repository/fake_r1/1/model.py").read_text()
    declared = {tensor.name for tensor in pbtxt.read(packaged / "repository/fake_r1/config.pbtxt").input}
    used = {name for name in declared if f'"{name}"' in code}
    assert used == declared


def test_check_accepts_a_good_repository(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert list(check_repository(tmp_path)) == ["m"]


def test_check_names_every_problem_at_once(tmp_path: Path) -> None:
    write_model(tmp_path, "renamed").rename(tmp_path / "other")
    (write_model(tmp_path, "no_code") / "1" / "model.py").unlink()
    folder = write_model(tmp_path, "no_version")
    (folder / "1").rename(folder / "v1")
    write_model(tmp_path, "no_policy", 'name: "no_policy" backend: "python" input { name: "stream" } input { name: "stream" }')
    write_model(
        tmp_path, "zero", 'name: "zero" backend: "python" model_transaction_policy {} instance_group { count: 0 }'
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(StageError) as caught:
        check_repository(tmp_path)
    for part in (
        "name 'renamed'", "model no_code: 1/model.py is missing", "model no_version: it has no version folder",
        "model no_policy: model_transaction_policy is missing", "tensor stream is declared twice", "count 0", "folder notes",
        "package.json is not a model",
    ):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("there", [True, False])
def test_an_empty_repository_is_refused(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "r").mkdir()
    with pytest.raises(StageError, match="no model in it"):
        check_repository(tmp_path / "r")


def test_nothing_here_imports_torch() -> None:
    modules = "pipeline.triton.smoke, pipeline.triton.layouts.torch, pipeline.stages.package"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=serving.MODEL_CODE.parents[2])
