"""The presets' documents: what they render is what is committed, every key has its explanation, every file lints clean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config.load import choices, load
from pipeline.engines.trtllm.llm_args import render
from pipeline.engines.trtllm.roles import roles_of
from pipeline.engines.trtllm.versions import known_lines, version_line
from pipeline.planner.plan import make_plan
from scripts import render_examples
from scripts.lint_rendered import lint

NAMES = choices("deployment")
STALE = "run `python scripts/render_examples.py` and commit what it writes"
OPTIONS = (
    (), ("workload=latency",), ("workload.chunked_prefill=true",), ("engine.trtllm.block_reuse=false",),
    ("parallel=adp8_ep8", "engine.trtllm.expert_slots=288"), ("engine.trtllm.cuda_graphs=false",),
)  # fmt: skip
"""Settings that bring LLM arguments of their own."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    """Package of every preset."""
    folder = tmp_path_factory.mktemp("examples")
    return {name: render_examples.stage_outputs(load([f"+deployment={name}"]), folder / name) for name in NAMES}


@pytest.fixture(params=NAMES)
def rendered(request, packages) -> tuple[str, Path]:
    """Name of a preset, and its package."""
    return request.param, packages[request.param]


def test_the_committed_document_is_what_is_rendered(rendered):
    name, out = rendered
    committed = (render_examples.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert committed == render_examples.document(name, out), STALE


def test_every_file_lints_clean(rendered):
    _, out = rendered
    files = [file for file in out.rglob("*") if file.is_file() and file.suffix in (".sh", ".sbatch", ".yaml")]
    assert len(files) >= 6
    assert {file.name: said for file in files if (said := lint(file))} == {}


def test_every_step_of_a_script_says_why(rendered):
    """A blank line ends a step."""
    _, out = rendered
    for script in (file for file in out.rglob("launch/**/*") if file.suffix in (".sh", ".sbatch")):
        steps = re.split(r"\n\s*\n", script.read_text())
        silent = [step for step in steps if "#" not in step and not step.startswith(("package=", "launch=", "pids=", "names="))]
        assert silent == [], script.name


def test_the_index_names_every_preset_and_nothing_else_lies_there():
    folder = render_examples.FOLDER
    assert (folder / "README.md").read_text(encoding="utf-8") == render_examples._index(), STALE
    assert {file.stem for file in folder.glob("*.md")} == {*NAMES, "README"}


@pytest.mark.parametrize("more", OPTIONS)
def test_every_argument_that_is_emitted_has_an_explanation(more):
    config = load(["+hw=b200", "model=deepseek_r1", *more])
    deploy = make_plan(config, config.model.hf).deploy
    for line in known_lines():
        for role in roles_of(deploy):
            args = render(role, version_line(line))
            missing = set(_paths(args)) - render_examples.table("arguments").keys()
            assert missing == set(), "add them to pipeline/engines/trtllm/explained.yaml"


def test_every_explanation_of_a_launcher_is_of_a_key_that_is_emitted(packages, tmp_path):
    apart = render_examples.stage_outputs(load([*DISAGGREGATED_NODE, "model=deepseek_r1"]), tmp_path)
    files = [file for out in (*packages.values(), apart) for file in out.rglob("*") if file.name in render_examples.KINDS]
    said = {
        (where, path)
        for file in files
        for _, where, path in render_examples._keys(file.read_text(), render_examples.KINDS[file.name])
    }
    tables = ("kubernetes", "compose", "router", "pbtxt")
    assert [(kind, path) for kind in tables for path in render_examples.table(kind) if (kind, path) not in said] == []


DISAGGREGATED_NODE = ["+hw=b200", "engine.trtllm.serving=disaggregated", "workload.isl=8192"]
"""One context and one generation server on eight GPUs: what compose has of it."""


def test_a_key_without_an_explanation_is_an_error():
    with pytest.raises(KeyError, match="surprise"):
        render_examples.explained("name: a\nsurprise: 1\n", "compose")
    text = render_examples.explained("services:\n  a:\n    image: b\n  c:\n    image: d\n", "compose")
    assert text.splitlines()[2].startswith("    image: b  ") and "# holds the engine" in text and text.count("# holds") == 1


def _paths(args: dict, prefix: str = ""):
    for key, value in args.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
