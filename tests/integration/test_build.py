"""The main job as a user runs it: build, build again, change a leaf, kill it, build for hardware that is not here.

Tests of the long build come last: another worker, whose file begins with it, makes it meanwhile.
"""

import json
import math
import random
import resource
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests._utils import serving
from tests.conftest import QUICK, Run, Workspace

STAGES = ("plan", "convert", "verify", "engine", "package")
TIGHT = ("+hw=cpu", "quant=nvfp4", "verify.max_kl=0.005", "verify.tokens=512")
"""The embedded model in NVFP4 diverges by more."""


def test_killed_at_random_moments_the_build_ends_with_the_same_bytes(quick_build: Workspace) -> None:
    """kill -9 early and midway in each stage, then one build: digests as undisturbed, nothing half-visible in between."""
    harried = Workspace(Path(tempfile.mkdtemp(dir=quick_build.folder.parent)))  # `QUICK` names the checkpoint from here
    rng = random.Random(20)
    for stage, least in [(stage, least) for stage in STAGES for least in (0.0, 0.4)]:
        seconds = json.loads((quick_build.latest(stage).parent / "manifest.json").read_text())["seconds"]
        _kill_in(harried, stage, rng.uniform(least, least + 0.25) * seconds)
        for manifest in harried.store.glob("results/*/*/manifest.json"):
            described = json.loads(manifest.read_text())["outputs"]
            assert all((manifest.parent / "out" / name).stat().st_size == entry["size"] for name, entry in described.items())
    done = harried.run("build", *QUICK)
    assert done.code == 0, done.out + done.err
    assert harried.digests() == quick_build.digests()
    assert not any((harried.store / "work").glob("*/*")), "nothing is left behind"


def _kill_in(workspace: Workspace, stage: str, seconds: float) -> None:
    """Build, and kill it so long after this stage began. Was that too late, the stage has to be done again, and dies sooner."""
    for _ in range(10):
        shutil.rmtree(workspace.store / "results" / stage, ignore_errors=True)
        process = subprocess.Popen(
            workspace.command("build", *QUICK), cwd=workspace.folder, env=workspace.env(), stdout=subprocess.DEVNULL
        )
        at, moment = "", math.inf
        while process.poll() is None and time.monotonic() < moment and at not in STAGES[STAGES.index(stage) + 1 :]:
            time.sleep(0.01)
            at = _held_by(workspace, process.pid)
            moment = min(moment, time.monotonic() + seconds) if at == stage else moment
        process.kill()
        assert process.wait() in (0, -9)
        serving.wait(lambda: not serving.processes_of(f"{workspace.folder}/"))  # its children die with it, when their turn comes
        if _held_by(workspace, process.pid) == stage:
            return
        seconds /= 2
    raise AssertionError(f"{stage} ended ten times before it was killed")


def _held_by(workspace: Workspace, pid: int) -> str:
    """The stage whose lock the process holds, or held when it was killed."""
    for card in (workspace.store / "locks").glob("*.holder.json"):
        with suppress(OSError):  # the stage has just ended
            if json.loads(card.read_text())["pid"] == pid:
                return card.name.partition("-")[0]
    return ""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Run, Path]:
    """Where the gate refused a precision, what it said, and its report."""
    workspace = Workspace(tmp_path_factory.mktemp("refused"))
    run = workspace.run("verify", *TIGHT)
    return workspace, run, workspace.latest("verify") / "report.json"


def test_the_gate_refuses_with_its_own_exit_code(refused: tuple[Workspace, Run, Path]) -> None:
    workspace, done, report = refused
    assert done.code == 4, done.out + done.err
    assert "verify.max_kl" in done.err and "verify.on_failure=fallback" in done.err and "Traceback" not in done.err
    assert json.loads(report.read_text())["verdict"] == "failed"
    again = workspace.run("verify", *TIGHT, "verify.max_kl=10", "verify.max_ppl_ratio=10", "verify.min_top1=0")
    assert again.code == 0, again.err
    assert "[convert] up to date" in again.out, "a failed gate costs no hours: the conversion is kept"


def test_a_refused_precision_falls_back_where_the_user_lets_it(refused: tuple[Workspace, Run, Path]) -> None:
    """One command ends in a passing checkpoint; what was refused stays readable, and a second run repeats nothing."""
    workspace, _, report = refused
    stopped = workspace.run("explain", *TIGHT)
    assert "verify   refused" in stopped.out and "engine" not in stopped.out
    done = workspace.run("verify", *TIGHT, "verify.on_failure=fallback", "--json")
    assert done.code == 0, done.out + done.err
    assert done.events()[-1]["report"]["verdict"] == "passed"
    assert json.loads(report.read_text())["verdict"] == "failed", "nothing of the first result is lost"
    plan = json.loads((workspace.latest("plan") / "report.json").read_text())
    assert plan["quant"] == "bf16" and any("verify refused quant=nvfp4 (Mean KL is 0.0" in text for text in plan["warnings"])
    manifest = json.loads((workspace.latest("plan").parent / "manifest.json").read_text())
    assert manifest["config"]["quant"]["refused"].startswith("Mean KL is 0.0")
    assert json.loads((workspace.latest("plan") / "precision.json").read_text())["kv_cache"] == "bf16"
    again = workspace.run("verify", *TIGHT, "verify.on_failure=fallback")
    assert again.code == 0 and again.out.count("up to date") == 6, again.out


@pytest.mark.parametrize(("hw", "algorithm"), [("b200", "NVFP4"), ("h200", None)])
def test_builds_for_gpus_that_are_not_here(workspace: Workspace, hw: str, algorithm: str | None) -> None:
    done = workspace.run("build", f"+hw={hw}", "verify.tokens=512")
    assert done.code == 0, done.out + done.err
    assert "not run here:" in done.out
    checkpoint = workspace.latest("convert")
    config = json.loads((checkpoint / "config.json").read_text())
    if algorithm:
        assert json.loads((checkpoint / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == algorithm
    else:
        assert config["quantization_config"]["quant_method"] == "fp8"
    args = yaml.safe_load((workspace.latest("engine") / "llm_args.yaml").read_text())
    assert args["backend"] == "pytorch" if "backend" in args else True
    assert args["tensor_parallel_size"] >= 1
    model = next((workspace.latest("package") / "repository").iterdir())
    assert (model / "config.pbtxt").is_file() and (model / "1/model.py").is_file()


def test_a_model_without_a_checkpoint_is_planned_but_not_built(workspace: Workspace) -> None:
    assert workspace.run("plan", "+hw=b200", "model=deepseek_r1").code == 0
    done = workspace.run("build", "+hw=b200", "model=deepseek_r1")
    assert done.code == 2 and "checkpoint=DIR" in done.err


def test_a_folder_that_is_no_checkpoint_is_refused(workspace: Workspace) -> None:
    done = workspace.run("build", "+hw=cpu", f"checkpoint={workspace.folder}")
    assert done.code == 2 and "config.json" in done.err and "Traceback" not in done.err


def test_the_build_leaves_a_repository_and_manifests(cpu_build: Workspace) -> None:
    repository = cpu_build.latest("package") / "repository"
    assert [path.name for path in repository.iterdir()] == ["tiny_r1"]
    assert (repository / "tiny_r1/config.pbtxt").is_file() and (repository / "tiny_r1/1/model.py").is_file()
    for stage in STAGES:
        manifest = json.loads((cpu_build.latest(stage).parent / "manifest.json").read_text())
        assert {"key", "parts", "outputs", "digest", "seconds", "peak_memory_bytes", "config", "finished"} <= manifest.keys()
        assert manifest["parts"]["stage"] == stage and manifest["outputs"] and manifest["seconds"] > 0


def test_a_second_build_is_a_no_op_in_about_a_second(cpu_build: Workspace) -> None:
    seconds = [60.0]
    while min(seconds) >= 2.0 and len(seconds) < 10:  # 0.6 on a core of 2.4 GHz that nobody disturbs
        started, cpu = time.monotonic(), _cpu_seconds()
        done = cpu_build.run("build", "+hw=cpu")
        seconds.append(min(time.monotonic() - started, _cpu_seconds() - cpu))  # whichever a busy machine disturbs less
        assert done.code == 0 and done.out.count("up to date") == 5, done.out
    assert min(seconds) < 2.0, seconds


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_explain_says_what_a_changed_leaf_does(cpu_build: Workspace) -> None:
    done = cpu_build.run("explain", "+hw=cpu", "engine.torch.page_size=16", "--json")
    result = done.events()[-1]
    status = {stage["stage"]: stage["status"] for stage in result["stages"]}
    assert status["convert"] == status["verify"] == "up to date"
    assert status["engine"] == status["package"] == "would run"
    reason = next(stage["reason"] for stage in result["stages"] if stage["stage"] == "engine")
    assert "engine.torch.page_size was 32, is 16" in reason


def test_verify_shows_its_table(cpu_build: Workspace) -> None:
    done = cpu_build.run("verify", "+hw=cpu", "--json")
    report = done.events()[-1]["report"]
    assert done.code == 0 and report["verdict"] == "passed"
    assert report["logits"]["top1"] == 1.0, "fp8_block is passed through byte for byte"
