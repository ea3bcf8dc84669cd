"""The build graph on small stages: keys, no-ops, minimal rebuilds, kills, races and damage."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError, MissingToolError, StageError
from pipeline.core.events import PlainConsole
from pipeline.core.gc import collect, remove, require_quiet
from pipeline.core.graph import Graph, upstream
from pipeline.core.key import key_of, key_parts
from pipeline.core.lock import held
from pipeline.core.source import Source, find_source
from pipeline.core.stage import Need, Progress, Stage, StageContext
from pipeline.core.store import SCHEMA, Store, describe_tree
from pipeline.executors import StageCall, StageOutcome
from pipeline.stages import STAGES as REAL_STAGES
from tests._utils import random_checkpoint


def first(ctx: StageContext) -> None:
    """Two files of which `second` reads one."""
    (ctx.out / "read.txt").write_text(str(ctx.config.workload.isl))
    (ctx.out / "other.txt").write_text(str(ctx.config.workload.osl))


def second(ctx: StageContext) -> None:
    (ctx.out / "text.txt").write_text((ctx.inputs["first"] / "read.txt").read_text() + ctx.config.model.name)


def third(ctx: StageContext) -> None:
    (ctx.out / "end.txt").write_text("end")


STAGES = {
    "first": Stage(name="first", version=1, config=("workload",)),
    "second": Stage(name="second", version=1, needs=(Need(stage="first", path="read.txt"),), config=("model.name",)),
    "third": Stage(name="third", version=1, needs=(Need(stage="second"),), after=("first",)),
}
FUNCTIONS = {"first": first, "second": second, "third": third}


class Recorder:
    """An executor that calls the functions above and remembers which."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    def run(self, call: StageCall, progress: Progress, log: Path) -> StageOutcome:
        self.runs.append(call.stage)
        inputs = {name: Path(path) for name, path in call.inputs.items()}
        FUNCTIONS[call.stage](
            StageContext(config=load_plain(call), inputs=inputs, checkpoint=None, out=Path(call.out), progress=progress)
        )
        return StageOutcome(seconds=0.0, peak_memory_bytes=0)


def load_plain(call: StageCall) -> Config:
    from pipeline.config.load import from_plain

    return from_plain(call.config)


@cache
def configured(*overrides: str) -> Config:
    """Kept for the next test that asks the same: do not change it."""
    return load(["+hw=cpu", *overrides])


def graph(tmp_path: Path, *overrides: str) -> Graph:
    return Graph(
        STAGES, configured(*overrides), Store(tmp_path / "store"), Source(None, "tiny_r1", tmp_path / "digests.json")
    )


def build(tmp_path: Path, *overrides: str) -> list[str]:
    recorder = Recorder()
    graph(tmp_path, *overrides).build(["third"], recorder, PlainConsole())
    return recorder.runs


def test_a_second_build_runs_nothing(tmp_path: Path) -> None:
    assert build(tmp_path) == ["first", "second", "third"]
    assert build(tmp_path) == []


def test_one_changed_leaf_rebuilds_only_what_depends_on_it(tmp_path: Path) -> None:
    build(tmp_path)
    assert build(tmp_path, "workload.osl=5") == ["first"], "second reads only read.txt, which is the same"
    assert build(tmp_path, "workload.isl=5") == ["first", "second", "third"]
    assert build(tmp_path, "serve.max_queue=3") == [], "no stage declares it"


def test_going_back_is_free(tmp_path: Path) -> None:
    build(tmp_path)
    build(tmp_path, "workload.isl=5")
    assert build(tmp_path) == []


def test_explain_names_the_leaf(tmp_path: Path) -> None:
    build(tmp_path)
    states = {state.stage.name: state for state in graph(tmp_path, "workload.isl=5").states(["third"])}
    assert "workload.isl was 1024, is 5" in states["first"].reason
    assert states["second"].parts is None and "waits for first" in states["second"].reason


def test_keys_hold_no_path_and_change_with_every_part() -> None:
    config = load(["+hw=cpu"])
    base = key_parts(STAGES["first"], config, {})
    assert str(Path.cwd()) not in str(base)
    changed = dataclasses.replace(STAGES["first"], toolchain=lambda config: {"gcc": "12"})
    versions = dataclasses.replace(STAGES["first"], version=2)
    coded = dataclasses.replace(STAGES["first"], code=("pipeline/share.py",))
    keys = {key_of(key_parts(stage, config, {})) for stage in (STAGES["first"], changed, versions, coded)}
    assert len(keys | {key_of(key_parts(STAGES["first"], config, {"x": "1"}))}) == 5


@pytest.mark.parametrize("error", [StageError("no"), KeyboardInterrupt()])
def test_a_failed_stage_publishes_nothing_and_keeps_what_came_before(tmp_path: Path, error: BaseException) -> None:
    class Failing(Recorder):
        def run(self, call: StageCall, progress: Progress, log: Path) -> StageOutcome:
            if call.stage == "second":
                (Path(call.out) / "half.txt").write_text("half")
                raise error
            return super().run(call, progress, log)

    with pytest.raises(type(error)):
        graph(tmp_path).build(["third"], Failing(), PlainConsole())
    assert not list((tmp_path / "store/results").glob("second/*"))
    assert not list((tmp_path / "store/work").glob("*/*")), "what it wrote takes no room"
    assert build(tmp_path) == ["second", "third"]
    assert "half.txt" not in describe_tree(tmp_path / "store/results")


def test_a_damaged_result_is_rebuilt(tmp_path: Path) -> None:
    build(tmp_path)
    next((tmp_path / "store/results/second").glob("*/out/text.txt")).unlink()
    assert build(tmp_path) == ["second"], "the rebuilt bytes are the same, so third stays"


def test_other_bytes_of_the_same_size_are_noticed(tmp_path: Path) -> None:
    build(tmp_path)
    path = next((tmp_path / "store/results/second").glob("*/out/text.txt"))
    path.write_text("X" * path.stat().st_size)
    assert build(tmp_path) == ["second"]


def test_a_changed_file_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    build(tmp_path)
    path = next((tmp_path / "store/results/second").glob("*/out/text.txt"))
    before = path.stat()
    path.write_text("X" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert build(tmp_path) == ["second"]


@pytest.mark.parametrize("content", ["{}", "[1]", '"text"', "{", '{"schema": 1, "key": "other", "stage": "second"}'])
def test_a_foreign_manifest_is_set_aside_and_named(content: str, tmp_path: Path) -> None:
    build(tmp_path)
    next((tmp_path / "store/results/second").glob("*/manifest.json")).write_text(content)
    states = {state.stage.name: state for state in graph(tmp_path).states(["third"])}
    assert "is no result of this pipeline and is set aside" in states["second"].reason
    assert build(tmp_path) == ["second"]
    assert list((tmp_path / "store/work/second").glob("*.damaged-*")), "nothing of it is lost"


@pytest.mark.parametrize("root", ["a_file", "a_file/below"])
def test_a_root_that_cannot_hold_results_is_a_sentence(root: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ConfigError, match=r"store\.root=.*a_file.* cannot hold results \(.*\): name another folder"):
        Store(tmp_path / root).prepare()


@pytest.mark.parametrize("root", ["checkpoint", "checkpoint/inside", "checkpoint/../checkpoint"])
def test_the_store_does_not_lie_in_the_checkpoint(root: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text("{}")
    config = load(["+hw=cpu", f"checkpoint={tmp_path}/checkpoint", f"store.root={tmp_path}/{root}"])
    with pytest.raises(ConfigError, match="lies in the checkpoint"):
        find_source(config, Path(config.store.root))


def test_who_waits_for_a_lock_says_for_whom(tmp_path: Path) -> None:
    said: list[str] = []

    def second() -> None:
        with held(tmp_path / "x.lock", "convert", said.append):
            said.append("mine")

    with held(tmp_path / "x.lock", "convert", said.append):
        thread = threading.Thread(target=second)
        thread.start()
        while not said:
            time.sleep(0.01)
    thread.join(timeout=60)
    assert f"waiting for process {os.getpid()}, since " in said[0] and said[0].endswith("which is building convert")
    assert said[1:] == ["mine"] and not (tmp_path / "x.holder.json").exists()


def test_a_result_that_another_process_made_meanwhile_is_taken_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path)
    other = graph(tmp_path)
    state = next(iter(other.states(["first"])))
    capsys.readouterr()
    found = other._run(dataclasses.replace(state, result=None), {}, Recorder(), PlainConsole())
    assert found.key == state.result.key and capsys.readouterr().out.startswith("[first] up to date")
    assert not list((tmp_path / "store/work/first").iterdir())


def test_what_a_later_stage_lacks_is_said_before_the_first_starts(tmp_path: Path) -> None:
    def lacks(config: Config, checkpoint: Path | None) -> None:
        raise MissingToolError("third needs a GPU")

    needy = STAGES | {"third": dataclasses.replace(STAGES["third"], requires=lacks)}
    recorder, made = Recorder(), graph(tmp_path)
    made.stages = needy
    with pytest.raises(MissingToolError, match="third needs a GPU"):
        made.build(["third"], recorder, PlainConsole())
    assert recorder.runs == []
    made.build(["second"], recorder, PlainConsole())
    assert recorder.runs == ["first", "second"], "a stage that is not asked for needs nothing"


def test_what_is_up_to_date_needs_no_tool(tmp_path: Path) -> None:
    build(tmp_path)
    made = graph(tmp_path)
    made.stages = {name: dataclasses.replace(stage, requires=_never) for name, stage in STAGES.items()}
    assert len(made.build(["third"], Recorder(), PlainConsole())) == 3


def _never(config: Config, checkpoint: Path | None) -> None:
    raise AssertionError


def test_explain_goes_on_where_a_checkpoint_is_missing(tmp_path: Path) -> None:
    made = graph(tmp_path)
    made.stages = STAGES | {"first": dataclasses.replace(STAGES["first"], reads_checkpoint="all")}
    reasons = {state.stage.name: state.reason for state in made.states(["third"])}
    assert "waits for a checkpoint: model=tiny_r1 names none: give the folder" in reasons["first"]
    assert "waits for first" in reasons["second"] and "waits for second" in reasons["third"]


def test_only_an_engine_on_a_gpu_is_not_the_same_bytes_each_time() -> None:
    engine = REAL_STAGES["engine"]
    cuda = ["engine=torch", "engine.torch.device=cuda", "engine.torch.dtype=bfloat16"]
    assert engine.determinism(load(["+hw=cpu"])) == "bitwise"
    assert engine.determinism(load(["+hw=b200"])) == "bitwise"
    assert engine.determinism(load(["+hw=h200", *cuda])) == "numeric"


@pytest.mark.parametrize(
    ("found", "torch", "refusal"),
    [
        ((), "2.13.0", "{0}=cuda needs a GPU, and this machine offers none: .*set {0}=cpu"),
        (((9, 0),), None, "{0}=cuda needs torch, which is not installed: pip install .*, or set {0}=cpu"),
        (((9, 0),), "2.13.0+cpu", r"torch 2\.13\.0\+cpu is built without CUDA: .* set {0}=cpu"),
        (((7, 0), (7, 5)), "2.13.0", "The GPU is sm_75, below sm_[89]0 of the kernels: set {0}=cpu"),
        (((7, 5), (9, 0)), "2.13.0", None),
    ],
)
@pytest.mark.parametrize(
    ("stage", "field", "config"),
    [("convert", "convert.device", ["+hw=cpu", "convert.device=cuda"]), ("engine", "engine.torch.device", ["+hw=rtx_pro_6000"])],
)
def test_a_gpu_that_is_not_usable_is_refused_before_anything_is_converted(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Any, ...], torch: str | None, refusal: str | None, stage: str, field: str,
    config: list[str],
) -> None:  # fmt: skip
    def version(name: str) -> str:
        if torch is None:
            raise metadata.PackageNotFoundError(name)
        return torch

    monkeypatch.setattr("pipeline.core.gpu.compute_capabilities", lambda: found)
    monkeypatch.setattr("pipeline.core.gpu.metadata.version", version)
    REAL_STAGES[stage].requires(load(["+hw=b200"]), None)
    expected = pytest.raises((MissingToolError, ConfigError), match=refusal.format(field)) if refusal else nullcontext()
    with expected:
        REAL_STAGES[stage].requires(load(config), None)


def test_where_the_conversion_is_computed_is_not_in_its_key() -> None:
    cpu, cuda = (key_parts(REAL_STAGES["convert"], load(["+hw=cpu", f"convert.device={name}"]), {}) for name in ("cpu", "cuda"))
    assert cpu == cuda and "plugins/nvfp4_convert/kernel.cu" in cpu["code"]


def test_a_text_or_torch_that_verify_lacks_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires = REAL_STAGES["verify"].requires
    (tmp_path / "heldout.txt").write_text("text")
    (tmp_path / "config.json").write_text(json.dumps(random_checkpoint.ARCH))
    with pytest.raises(ConfigError, match=r"verify\.text=/nowhere is not a file"):
        requires(load(["+hw=cpu", "verify.text=/nowhere"]), tmp_path)
    monkeypatch.setattr("pipeline.stages.verify._version", lambda name: "absent")
    with pytest.raises(MissingToolError, match="verify compares logits with torch, which is not installed"):
        requires(load(["+hw=cpu"]), tmp_path)
    (tmp_path / "heldout.txt").unlink()
    requires(load(["+hw=cpu"]), tmp_path)


def test_gc_keeps_what_is_used_and_the_newest(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for isl in (5, 6, 7):
        build(tmp_path, f"workload.isl={isl}")
    build(tmp_path, "workload.isl=5")  # used last, though oldest
    stopped = store.root / "work/second" / f"{'0' * 64}.12345678"
    stopped.mkdir(parents=True)
    (store.root / "logs").mkdir()
    for log in ("first-000000000000", "second-000000000000"):  # of nothing, and of the attempt that goes
        (store.root / "logs" / f"{log}.log").write_text("")
    removals = collect(store, keep=1)
    assert sorted(removal.path.parent.name for removal in removals) == ["first", "logs", "logs", "second", "second", "third"]
    assert all(removal.path.exists() for removal in removals), "listing removes nothing"
    for removal in removals:
        remove(store, removal)
    assert build(tmp_path, "workload.isl=7") == [] and build(tmp_path, "workload.isl=5") == []
    assert collect(store, keep=1) == [] and not stopped.exists()
    assert build(tmp_path, "workload.isl=6") == ["first", "second", "third"]


def test_gc_keeps_an_attempt_that_can_go_on_and_waits_for_builds(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.attempt("convert", "a" * 64, resumable=True) as attempt:
        (attempt.out / "part").write_text("1")
        with pytest.raises(ConfigError, match=f"process {os.getpid()}, since .*is building convert"):
            require_quiet(store)
        assert collect(store, keep=0) == [], "somebody works there"
    require_quiet(store)
    assert collect(store, keep=1) == []
    assert [removal.path for removal in collect(store, keep=0)] == [attempt.folder]


def test_the_loser_of_a_race_discards_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    manifest = {"schema": SCHEMA, "key": "k", "stage": "s", "parts": {}, "outputs": {}, "digest": ""}
    with store.attempt("s", "k", resumable=False) as mine:
        (mine.out / "a").write_text("mine")
        winner = tmp_path / "results/s/k"
        (winner / "out").mkdir(parents=True)
        (winner / "manifest.json").write_text(json.dumps(manifest))
        assert store.publish(mine, manifest).folder == winner
    assert not (winner / "out/a").exists() and not mine.folder.exists()


def test_a_resumable_stage_finds_what_it_left_and_others_start_afresh(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for resumable, expected in ((True, True), (False, False)):
        with store.attempt("s", f"k{resumable}", resumable=resumable) as attempt:
            (attempt.out / "part").write_text("1")
        with store.attempt("s", f"k{resumable}", resumable=resumable) as attempt:
            assert (attempt.out / "part").exists() is expected


def test_order_respects_gates_and_refuses_cycles() -> None:
    assert [stage.name for stage in upstream(STAGES, ["third"])] == ["first", "second", "third"]
    loop = STAGES | {"first": dataclasses.replace(STAGES["first"], after=("third",))}
    with pytest.raises(AssertionError, match="cycle"):
        upstream(loop, ["third"])


def test_a_stage_process_dies_with_its_parent(tmp_path: Path) -> None:
    """kill -9 of the build must not leave a child that goes on writing into the store."""
    child = textwrap.dedent(
        """
        import os, time
        from pipeline.executors.local import _die_with_parent
        _die_with_parent()
        print(os.getpid(), flush=True)
        time.sleep(600)
        """
    )
    parent = textwrap.dedent(
        f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {child!r}])
        time.sleep(600)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert process.stdout
    child_pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 50
    while _alive(child_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    alive = _alive(child_pid)
    if alive:
        os.kill(child_pid, signal.SIGKILL)
    assert not alive


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
