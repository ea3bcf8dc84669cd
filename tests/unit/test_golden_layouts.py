"""What each layout writes for each release of Triton, as golden text; `UPDATE_GOLDEN=1 pytest tests/unit/test_golden_layouts.py`
writes it anew.

`tests/golden/layouts/table.yaml` says which releases have the same text: {layout: {file: {golden file: [releases]}}}. The
arguments of an engine come from a fixed plan (`plan_*.json` there), so that another plan changes nothing here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.core.stage import StageContext
from pipeline.triton import pbtxt, releases
from pipeline.triton.check import check_repository
from tests._utils import serving

GOLDEN = Path(__file__).parents[1] / "golden" / "layouts"
TABLE = GOLDEN / "table.yaml"
UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))
ENGINES = {"torch": "torch", "llmapi": "trtllm", "bls": "trtllm", "vllm": "vllm"}
OLDEST = "25.09"
"""The first release whose containers hold an engine that is written for; the embedded engine is in all."""


def cases() -> Iterator[tuple[str, str]]:
    for layout, engine in ENGINES.items():
        for release in releases.releases():
            if engine == "torch" or (engine in release.images and release.tag >= OLDEST):
                yield layout, release.tag


@cache
def base(engine: str) -> Config:
    return load(["+hw=b200", "model=deepseek_r1", f"engine={engine}"])


def config_of(layout: str, release: releases.Release) -> Config:
    engine = ENGINES[layout]
    config = serving.serve_config() if engine == "torch" else deepcopy(base(engine))
    config.serve.layout, config.serve.triton = layout, release.tag
    if engine != "torch":
        getattr(config.engine, engine).version = release.images[engine].version
    return config


def written(layout: str, release: releases.Release, folder: Path) -> dict[str, str]:
    """The text files of the repository that are not the model's code or its checkpoint, by name."""
    config = config_of(layout, release)
    for name in ("plan", "convert", "engine", "package/repository"):
        (folder / name).mkdir(parents=True)
    common: dict[str, Any] = {"config": config, "checkpoint": None, "progress": serving.Quiet()}
    if layout == "torch":
        shutil.rmtree(folder / "engine")
        serving.write_fake_engine(folder / "engine")
    else:
        (folder / "convert" / "config.json").write_text("{}")
        shutil.copyfile(GOLDEN / f"plan_{ENGINES[layout]}.json", folder / "plan" / "deploy.json")
        inputs = {name: folder / name for name in ("plan", "convert")}
        build = import_module(f"pipeline.engines.{ENGINES[layout]}.build").build
        build(StageContext(inputs=inputs, out=folder / "engine", **common))
    ctx = StageContext(inputs={"engine": folder / "engine"}, out=folder / "package", **common)
    import_module(f"pipeline.triton.layouts.{layout}").layout(ctx, releases.target(config))
    repository = folder / "package" / "repository"
    assert check_repository(repository, release.tag)
    texts = [file for name in ("config.pbtxt", "1/model.yaml", "1/model.json") for file in repository.glob(f"*/{name}")]
    return {file.relative_to(repository).as_posix(): file.read_text(encoding="utf-8") for file in texts}


def golden_table() -> dict[str, dict[str, dict[str, list[str]]]]:
    table: dict[str, dict[str, dict[str, list[str]]]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


@pytest.fixture(scope="module", autouse=True)
def update(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write everything anew, if that is asked for."""
    if not UPDATE:
        return
    table: dict[str, dict[str, dict[str, list[str]]]] = {}
    for layout in ENGINES:
        shutil.rmtree(GOLDEN / layout, ignore_errors=True)
    for layout, tag in cases():
        for name, text in written(layout, releases.release(tag), tmp_path_factory.mktemp(layout) / tag).items():
            groups = table.setdefault(layout, {}).setdefault(name, {})
            same = next((file for file in groups if (GOLDEN / file).read_text(encoding="utf-8") == text), None)
            file = same or f"{layout}/{name.replace('/', '.')}@{tag}"
            (GOLDEN / file).parent.mkdir(exist_ok=True)
            (GOLDEN / file).write_text(text, encoding="utf-8")
            groups.setdefault(file, []).append(tag)
    TABLE.write_text(yaml.safe_dump(table, sort_keys=True, default_flow_style=None, width=130), encoding="utf-8")


@pytest.mark.parametrize(("layout", "tag"), list(cases()))
def test_a_layout_is_as_the_golden_text_of_its_release(layout: str, tag: str, tmp_path: Path) -> None:
    found = written(layout, releases.release(tag), tmp_path / "run")
    table = golden_table()[layout]
    assert found.keys() == table.keys()
    for name, text in found.items():
        [golden] = [file for file, tags in table[name].items() if tag in tags]
        assert text == (GOLDEN / golden).read_text(encoding="utf-8"), f"{golden}: regenerate with UPDATE_GOLDEN=1 if this is meant"
    for name in found:
        if name.endswith("config.pbtxt"):
            config = pbtxt.read(tmp_path / "run" / "package" / "repository" / name)
            assert releases.refused_fields(config, tag) == []


def test_no_golden_file_is_left_over() -> None:
    named = {file for files in golden_table().values() for groups in files.values() for file in groups}
    there = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("*/*")}
    assert there == named


def test_each_layout_says_the_same_in_config_and_settings() -> None:
    """What streams break on: `decoupled` and `max_batch_size` in both places, in every golden file."""
    for layout in ("llmapi", "bls"):
        for name, groups in golden_table()[layout].items():
            for file in groups if name.endswith("model.yaml") else ():
                policy = yaml.safe_load((GOLDEN / file).read_text(encoding="utf-8"))["triton_config"]
                assert policy == {"decoupled": True, "max_batch_size": int(layout == "bls")}
            for file in groups if name.endswith("config.pbtxt") else ():
                config = pbtxt.read(GOLDEN / file)
                assert config.model_transaction_policy.decoupled
                assert config.max_batch_size == int(layout == "bls")
