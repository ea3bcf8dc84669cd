"""The edges of the command line: odd words, and outputs that are closed, full or no longer read."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.config.load import load
from pipeline.executors import StageCall
from tests.conftest import Workspace


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["stage"], "`stage` runs one stage for an executor"),
        (["stage", "nofile"], "`stage` runs one stage for an executor"),
        (["doctor", "foo=bar"], "doctor takes no settings, but got foo=bar"),
        (["plan", "--nope"], "There is no option --nope: known are --json"),
        (["plan", "--config-dir"], "--config-dir needs a value"),
        (["plan", "+hw=cpu", "--config-dir", "nowhere"], "--config-dir nowhere is not a folder"),
        (["gc", "--keep", "x"], "--keep x is not a number"), (["gc", "--keep", "-1"], "--keep -1 is not a number of 0 or more"),
        (["gc", "quant=nvfp4"], "gc does not know quant=nvfp4"),
        (["plan", "--dry-run"], "plan has no --dry-run: only convert and gc have"),
        (["nope"], "There is no command nope"),
        (["plan", "+hw=cpu", "store.root=/proc/nope"], "store.root=/proc/nope cannot hold results"),
        (["smoke", "+hw=cpu", "serve.url=127.0.0.1:9"], "serve.url=127.0.0.1:9 does not answer as a Triton server"),
        (["serve", "+hw=cpu", "serve.openai_port=0", "serve.tokenizer=nowhere"], "serve.tokenizer=nowhere has no tokenizer.json"),
        (["smoke", "+hw=cpu", "serve.url=nonsense"], "serve.url=nonsense must be HOST:PORT"),
    ],
)
def test_refused_words_are_sentences(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert not (tmp_path / ".pipeline" / "results").exists()


def test_a_server_that_cannot_be_run_is_named_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server").write_text("not a program")
    assert main(["serve", "+hw=cpu", "serve.server=server"]) == 5
    assert "serve.server=server is not a file that can be run" in capsys.readouterr().err
    assert not (tmp_path / ".pipeline").exists()


def test_explain_without_a_checkpoint_shows_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "+hw=b200", "model=deepseek_r1"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "waits for a checkpoint: model=deepseek_r1 names none: give the folder" in lines["convert"]
    assert list(lines) == ["plan", "convert", "verify", "engine", "package"]


def test_an_error_of_the_system_in_a_stage_is_a_sentence(tmp_path: Path) -> None:
    """The folder of the attempt is not there, as on a lost disk."""
    config = dataclasses.asdict(load(["+hw=b200", "model=deepseek_r1"]))
    call = StageCall(stage="plan", config=config, inputs={}, checkpoint=None, out=str(tmp_path / "gone"), tmp=str(tmp_path))
    (tmp_path / "call.json").write_text(json.dumps(dataclasses.asdict(call)))
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "stage", "call.json"],
        cwd=tmp_path,
        env=Workspace(tmp_path).env(),
        capture_output=True,
        text=True,
    )
    event = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 3 and (event["event"], event["kind"]) == ("error", "StageError")
    assert "gone" in event["text"] and "No such file or directory. What was finished is kept." in event["text"]
    assert "Traceback" in done.stderr, "the log says where"


def test_gc_lists_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "+hw=cpu"]) == main(["convert", "+hw=cpu", "quant=nvfp4_experts"]) == 0
    capsys.readouterr()
    for dry in (["--dry-run"], []):
        assert main(["gc", "--json", *dry]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [Path(gone["path"]).parent.name for gone in result["removed"]] == ["convert", "plan", "logs"]
    assert len(list((tmp_path / ".pipeline/results/plan").iterdir())) == 1


def shell(workspace: Workspace, line: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    environment = workspace.env() | {"PIPELINE": f"{sys.executable} -m pipeline"}
    return subprocess.run(command, cwd=workspace.folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_output_is_a_sentence(workspace: Workspace) -> None:
    done = shell(workspace, "$PIPELINE --help > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "error: standard output or the store: No space left on device. What was finished before is kept.\n"


def test_a_closed_output_is_no_error(workspace: Workspace) -> None:
    done = shell(workspace, "$PIPELINE plan +hw=cpu >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (workspace.store / "latest" / "plan").is_dir()


def test_a_reader_that_leaves_ends_the_command_as_it_ends_others(workspace: Workspace) -> None:
    done = shell(workspace, "$PIPELINE plan +hw=cpu | true")
    assert (done.returncode, done.stderr) == (141, "")
