"""The build graph: stages in order, each looked up by key and run only when its result is not there yet."""

from __future__ import annotations

import io
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError, GateError
from pipeline.core.events import Console, PlainConsole
from pipeline.core.explain import explain_miss
from pipeline.core.key import key_of, key_parts
from pipeline.core.process import undisturbed
from pipeline.core.source import Source
from pipeline.core.stage import Stage
from pipeline.core.store import SCHEMA, Attempt, Result, Store, tree_digest
from pipeline.executors import Executor, StageCall, StageOutcome, make_executor

__all__ = ["Graph", "State", "upstream"]


@dataclass(frozen=True, slots=True)
class State:
    """Where one stage stands: its result, or why there is none."""

    stage: Stage
    result: Result | None
    parts: dict[str, Any] | None
    """None while an upstream result is missing: the key is not known yet."""
    reason: str
    refused: bool = False
    """Whether the result itself says that the build stops here (`Stage.gate`)."""


class Graph:
    """The stages of one configuration over one store."""

    def __init__(self, stages: dict[str, Stage], config: Config, store: Store, source: Source) -> None:
        self.stages, self.config, self.store, self.source = stages, config, store, source

    def build(self, targets: list[str], executor: Executor, console: Console) -> dict[str, Result]:
        """Make every result that `targets` need, in order; what is there already is left alone."""
        self.store.prepare()
        results: dict[str, Result] = {}
        order, checked = upstream(self.stages, targets), False
        for place, stage in enumerate(order):
            state = self._state(stage, results)
            if not (state.result or stage.light or checked):
                checked = self._preflight(order[place:])
            results[stage.name] = _told(state.result, console) if state.result else self._run(state, results, executor, console)
            self.store.point(results[stage.name])
            stage.gate(results[stage.name].out)
        return results

    def _preflight(self, stages: list[Stage]) -> bool:
        """What the last stage lacks is said before the first one has worked for hours."""
        for stage in stages:
            stage.toolchain(self.config)
            stage.requires(self.config, self.source.folder)
        return True

    def states(self, targets: list[str]) -> Iterator[State]:
        """Where each stage stands. Nothing is written to the store; only light stages run, in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="pipeline-explain-") as scratch:
            yield from self._states(targets, Store(Path(scratch)))

    def _states(self, targets: list[str], scratch: Store) -> Iterator[State]:
        results: dict[str, Result] = {}
        for stage in upstream(self.stages, targets):
            if waiting := [need.stage for need in stage.needs if need.stage not in results]:
                yield State(
                    stage, None, None, f"waits for {', '.join(dict.fromkeys(waiting))}; runs unless their outputs stay the same"
                )
                continue
            if stage.reads_checkpoint == "all" and self.source.folder is None:
                yield State(stage, None, None, f"waits for a checkpoint: {self.source.way_out}")
                continue
            state = self._state(stage, results)
            if refusal := _refusal(stage, state.result):
                yield State(stage, state.result, state.parts, refusal, refused=True)
                return
            if state.result:
                results[stage.name] = state.result
            elif stage.light:
                results[stage.name] = self._rehearse(state, results, scratch)
            yield state

    def _rehearse(self, state: State, results: dict[str, Result], scratch: Store) -> Result:
        """The result that a light stage would have."""
        with scratch.attempt(state.stage.name, "rehearsal", resumable=False) as attempt:
            call = self._call(state.stage, results, attempt)
            outcome = make_executor("inline").run(call, PlainConsole(io.StringIO()).stage_started("", ""), scratch.root)
            return scratch.publish(attempt, self._manifest(state, "rehearsal", attempt, outcome))

    def _state(self, stage: Stage, results: dict[str, Result]) -> State:
        parts = key_parts(stage, self.config, self._inputs(stage, results))
        found = self.store.find(stage.name, key_of(parts))
        return State(stage, found, parts, "up to date" if found else self._reason(stage, parts))

    def _reason(self, stage: Stage, parts: dict[str, Any]) -> str:
        if self.store.foreign(stage.name, key_of(parts)):
            return "what lies in its place in results/ is no result of this pipeline and is set aside"
        return explain_miss(parts, [result.manifest["parts"] for result in self.store.all(stage.name)])

    def _inputs(self, stage: Stage, results: dict[str, Result]) -> dict[str, str]:
        named = {f"{need.stage}/{need.path}".rstrip("/"): results[need.stage].digest(need.path) for need in stage.needs}
        if stage.reads_checkpoint:
            named["checkpoint"] = self.source.digest(stage.reads_checkpoint, stage.name)
        return named

    def _run(self, state: State, results: dict[str, Result], executor: Executor, console: Console) -> Result:
        stage, key = state.stage, key_of(state.parts)
        assert state.parts
        with self.store.attempt(stage.name, key, resumable=stage.resumable, say=console.line) as attempt:
            if found := self.store.find(stage.name, key):  # another process finished it while we waited for the lock
                attempt.discard()
                return _told(found, console)
            progress = console.stage_started(stage.name, state.reason)
            log = self.store.root / "logs" / f"{stage.name}-{key[:12]}.log"
            try:
                runner = make_executor("inline") if stage.light else executor  # a process would take longer to start than it to run
                outcome = runner.run(self._call(stage, results, attempt), progress, log)
            except BaseException as error:
                console.stage_ended(stage.name, "failed")
                if not stage.resumable and not isinstance(error, GateError):  # its report lies there
                    with undisturbed():
                        attempt.discard()
                raise
            result = self.store.publish(attempt, self._manifest(state, key, attempt, outcome))
        size = sum(entry["size"] for entry in result.manifest["outputs"].values())
        console.stage_ended(stage.name, "built", key=key, digest=result.digest(), size=size, **asdict(outcome))
        return result

    def _call(self, stage: Stage, results: dict[str, Result], attempt: Attempt) -> StageCall:
        return StageCall(
            stage=stage.name,
            config=asdict(self.config),
            inputs={need.stage: str(results[need.stage].out) for need in stage.needs},
            checkpoint=str(self.source.folder) if self.source.folder else None,
            out=str(attempt.out),
            tmp=str(attempt.tmp),
            earlier=[str(result.out) for result in self.store.all(stage.name)] if stage.reuses else [],
        )

    def _manifest(self, state: State, key: str, attempt: Attempt, outcome: StageOutcome) -> dict[str, Any]:
        """What a result says of itself. Times and hosts stand here, never in the outputs."""
        outputs = attempt.outputs()
        return {
            "schema": SCHEMA,
            "stage": state.stage.name,
            "key": key,
            "parts": state.parts,
            "determinism": state.stage.determinism(self.config),
            "outputs": outputs,
            "digest": tree_digest(outputs),
            "config": asdict(self.config),
            "pipeline": __version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **asdict(outcome),
        }


def _refusal(stage: Stage, result: Result | None) -> str:
    """Why the build stops at a result that is there; empty where it goes on."""
    try:
        if result:
            stage.gate(result.out)
    except GateError as error:
        return str(error)
    return ""


def _told(found: Result, console: Console) -> Result:
    console.stage_ended(found.manifest["stage"], "cached", key=found.key, digest=found.digest())
    return found


def upstream(stages: dict[str, Stage], targets: list[str]) -> list[Stage]:
    """`targets` and all that must come before them, in an order that respects every edge."""
    order: dict[str, Stage] = {}
    open_names: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        if name in open_names:
            raise AssertionError(f"the stages form a cycle: {' -> '.join([*open_names, name])}")
        if name not in stages:
            raise ConfigError(f"There is no stage {name}: choose one of {', '.join(stages)}.")
        open_names.append(name)
        for before in _before(stages[name]):
            visit(before)
        order[open_names.pop()] = stages[name]

    for target in targets:
        visit(target)
    return list(order.values())


def _before(stage: Stage) -> list[str]:
    return list(dict.fromkeys([*(need.stage for need in stage.needs), *stage.after]))
