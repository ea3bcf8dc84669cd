"""What each command does, over the build graph. Every function returns the exit code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.load import load
from pipeline.core.errors import ConfigError, GateError, MissingToolError
from pipeline.core.events import Console, human_bytes
from pipeline.core.graph import Graph
from pipeline.core.jsonio import read_json
from pipeline.core.source import find_source
from pipeline.core.store import Result, Store
from pipeline.executors import make_executor
from pipeline.planner.policy import fallback
from pipeline.stages import STAGES

if TYPE_CHECKING:
    from pipeline.cli import Options
    from pipeline.config.schema import Config
    from pipeline.planner.compare import Comparison

__all__ = [
    "convert", "doctor", "engine", "explain", "gc", "inspect", "lint", "migrate", "onnx", "package", "plan", "serve", "smoke",
    "verify",
]  # fmt: skip


def plan(options: Options, console: Console) -> int:
    """Run the plan stage and show its report, or the part of it that was asked for."""
    from pipeline.planner.render import render, render_ablation

    config = load(options.overrides, options.config_dir)
    result = _build(options, console, "plan", config)["plan"]
    report = read_json(result.out / "report.json")
    compared = _compare(config, report, options.compare) if options.compare else None
    for line in compared.lines() if compared else render_ablation(report) if options.ablate else render(report):
        console.line(line)
    more = {"comparison": compared.plain()} if compared else {}
    console.result({"stage": "plan", "folder": str(result.out), "report": report, **more})
    return 0


def _compare(config: Config, report: dict[str, Any], file: Path) -> Comparison:
    from pipeline.planner.compare import compare_file
    from pipeline.stages.plan import model_config

    return compare_file(config, model_config(config, find_source(config, _root(config)).folder), report, file)


def convert(options: Options, console: Console) -> int:
    """Up to the converted checkpoint; with --dry-run only the plan of it, which neither builds nor keeps anything."""
    if options.dry_run:
        return _dry_run(options, console)
    return _up_to("convert", options, console)


def verify(options: Options, console: Console) -> int:
    """Up to the verdict; its table is shown also when it was reached earlier. With a folder: that checkpoint, anyone's."""
    from pipeline.verify.command import folders_of, verify_command

    if folders_of(options.overrides):
        return verify_command(options, console)
    try:
        result = _build(options, console, "verify")["verify"]
    except GateError as error:
        _show(error.report, console)
        raise
    _show(result.out / "report.md", console)
    console.result({"stage": "verify", "folder": str(result.out), "report": read_json(result.out / "report.json")})
    return 0


def lint(options: Options, console: Console) -> int:
    """Findings about files that somebody wrote."""
    from pipeline.lint.command import lint_command

    return lint_command(options, console)


def migrate(options: Options, console: Console) -> int:
    """A file of LLM arguments for another version line."""
    from pipeline.migrate import migrate_command

    return migrate_command(options, console)


def _show(file: Path | None, console: Console) -> None:
    for line in file.read_text(encoding="utf-8").splitlines() if file else ():
        console.line(line)


def engine(options: Options, console: Console) -> int:
    """Up to the engine."""
    return _up_to("engine", options, console)


def onnx(options: Options, console: Console) -> int:
    """Somebody's own module."""
    from pipeline.onnx.command import onnx_command

    return onnx_command(options, console)


def package(options: Options, console: Console) -> int:
    """The whole way to a model repository (`package` and `build`)."""
    results = _build(options, console, "package")
    result = results["package"]
    not_run = read_json(results["engine"].out / "engine.json").get("not_run")
    repository = result.out / "repository"
    console.line(f"model repository: {repository}" if repository.is_dir() else f"package: {result.out}")
    if not_run:
        console.line(f"not run here: {not_run}")
    console.result({"stage": "package", "folder": str(result.out), "digest": result.digest(), "not_run_here": not_run})
    return 0


def serve(options: Options, console: Console) -> int:
    """Build, then run tritonserver until interrupted; with serve.url only OpenAI's API in front of that server."""
    from pipeline.openai.companion import gateway_command, require
    from pipeline.triton.server import find_server, serve_command

    config = load(options.overrides, options.config_dir)
    if config.serve.url:
        return gateway_command(config.serve, find_source(config, _root(config)).folder, console.line)
    require(config.serve)
    find_server(config.serve)  # before hours of building for it
    repository = _build(options, console, "package", config)["package"].out / "repository"
    return serve_command(config, repository, console.line)


def smoke(options: Options, console: Console) -> int:
    """Build, then run the contract against a live server, or only that against the one at serve.url."""
    from pipeline.triton.server import find_server
    from pipeline.triton.smoke import smoke_command

    config = load(options.overrides, options.config_dir)
    repository, name = None, re.sub(r"\W+", "_", config.serve.url or "")
    if not config.serve.url:
        find_server(config.serve)
        result = _build(options, console, "package", config)["package"]
        repository, name = result.out / "repository", result.key[:12]
    out = _root(config) / "smoke" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    code = smoke_command(config, repository, out, console.line, None if options.as_json else sys.stdout)
    console.result({"command": "smoke", "exit_code": code, "report": read_json(out) if out.exists() else None})
    return code


def explain(options: Options, console: Console) -> int:
    """Where each stage stands and why."""
    graph = _graph(load(options.overrides, options.config_dir))
    stages = []
    for state in graph.states(["package"]):
        status = "refused" if state.refused else "up to date" if state.result else "would run"
        console.line(f"{state.stage.name:8} {status:10} {state.result.key[:12] if status == 'up to date' else state.reason}")
        stages.append({"stage": state.stage.name, "status": status, "reason": state.reason})
    console.result({"command": "explain", "stages": stages})
    return 0


def gc(options: Options, console: Console) -> int:
    """Remove what nobody needs any more; with --dry-run only list it."""
    from pipeline.core.gc import collect, remove, require_quiet

    if other := [word for word in options.overrides if not word.startswith(("store.", "store="))]:
        raise ConfigError(f"gc does not know {other[0]}: it takes store.root=DIR.")
    store = Store(_root(load(["+hw=cpu", *options.overrides], options.config_dir)))
    if not options.dry_run:
        require_quiet(store)
    removals = collect(store, options.keep)
    for removal in removals:
        if not options.dry_run:
            remove(store, removal)
        console.line(f"{human_bytes(removal.size):>10}  {removal.path.relative_to(store.root)}  ({removal.reason})")
    total = sum(removal.size for removal in removals)
    console.line(f"{human_bytes(total):>10}  {'would be' if options.dry_run else 'were'} removed from {store.root}")
    gone = [{"path": str(removal.path), "bytes": removal.size, "reason": removal.reason} for removal in removals]
    console.result({"command": "gc", "dry_run": options.dry_run, "removed": gone})
    return 0


def inspect(options: Options, console: Console) -> int:
    """What a checkpoint folder holds, and what is odd about it; oddities are no error of the command."""
    from pipeline.inspect import inspect as look
    from pipeline.inspect.ranks import RankOptions

    folders = [word for word in options.overrides if "=" not in word or Path(word).is_dir()]
    if len(folders) != 1:
        raise ConfigError(f"inspect takes one checkpoint folder, but got {len(folders)}: python -m pipeline inspect DIR.")
    if (Path(folders[0]) / "engine.json").is_file():
        return _inspect_engine(Path(folders[0]), options, console)
    if options.draw:
        raise ConfigError(f"--draw is for results of engine=tensorrt or of onnx: {folders[0]} has no engine.json.")
    found = look(Path(folders[0]), RankOptions.parse(word for word in options.overrides if word not in folders))
    for line in found.lines() if not options.as_json else ():
        console.line(line)
    console.result({"command": "inspect", **found.plain()} if options.as_json else {})
    return 0


def _inspect_engine(folder: Path, options: Options, console: Console) -> int:
    """What the engines of TensorRT are, native ones and those by ONNX; the other kinds have no engine to look into."""
    from pipeline.engines.tensorrt import show
    from pipeline.onnx import show as show_onnx

    kind = read_json(folder / "engine.json").get("kind")
    looks = {"tensorrt": show, "onnx": show_onnx}
    if kind not in looks:
        other = f"{folder} is a result of engine={kind or 'torch'}"
        raise ConfigError(f"{other}; inspect looks into checkpoints and results of engine=tensorrt or of onnx.")
    found = looks[kind].plain(folder)
    engines = show.engine_files(found)
    view = show.View.parse([word for word in options.overrides if not Path(word).is_dir()], list(engines))
    if view.opened and not options.draw:
        raise ConfigError("open= says what --draw FILE.svg draws in full: give both.")
    told = list(looks[kind].lines(found))
    if view.network:
        told += [f"{view.network}, every kernel:", *show.network_lines(folder / engines[view.network])]
    if options.draw:
        told.append(show.draw(folder, engines, view, options.draw))
    for line in told if not options.as_json else ():
        console.line(line)
    console.result({"command": "inspect", **found} if options.as_json else {})
    return 0


def doctor(options: Options, console: Console) -> int:
    """What this machine can build, serve and run; with --target whether this node can run what the settings plan."""
    from pipeline.doctor import examine

    if options.target:
        return _doctor_target(options, console)
    if options.overrides or options.config_dir:
        given = " ".join(options.overrides) or "--config-dir"
        raise ConfigError(f"doctor takes no settings, but got {given}: it looks at this machine.")
    findings = examine()
    for finding in findings:
        console.line(finding.text())
    console.result({"command": "doctor", "findings": [finding.plain() for finding in findings]})
    return 0


def _doctor_target(options: Options, console: Console) -> int:
    """Exits with 5 when something that the plan needs is missing."""
    from pipeline.doctor.probe import BAD
    from pipeline.doctor.target import examine_target, verdict, wanted_of
    from pipeline.stages.plan import model_config

    config = load(options.overrides, options.config_dir)
    out = _build(options, console, "plan", config)["plan"].out
    hf = model_config(config, find_source(config, _root(config)).folder)
    wanted = wanted_of(config, hf, read_json(out / "deploy.json"), read_json(out / "report.json"))
    checks = examine_target(wanted)
    for check in checks:
        console.line(check.text())
    console.line(verdict(checks, wanted))
    code = MissingToolError.exit_code if any(check.status == BAD for check in checks) else 0
    console.result({"command": "doctor", "checks": [check.plain() for check in checks], "exit_code": code})
    return code


def _dry_run(options: Options, console: Console) -> int:
    """Show what convert would do to each tensor. Problems make it exit with 2, as the conversion would."""
    from pipeline.checkpoint.dry_run import dry_run
    from pipeline.checkpoint.recipe import Recipe
    from pipeline.planner.plan import make_plan
    from pipeline.stages.plan import model_config

    config = load(options.overrides, options.config_dir)
    root = _root(config)
    folder = find_source(config, root).folder
    if folder is None:
        name = config.model.name
        raise ConfigError(f"convert needs a checkpoint and model={name} names none: give its folder as checkpoint=DIR.")
    recipe = Recipe.from_table(make_plan(config, model_config(config, folder)).precision)
    found = dry_run(folder, recipe, root)
    for line in found.lines():
        console.line(line)
    console.result({"command": "convert", "dry_run": True, **found.plain()} if options.as_json else {})
    return ConfigError.exit_code if found.problems else 0


def _up_to(stage: str, options: Options, console: Console) -> int:
    result = _build(options, console, stage)[stage]
    console.line(f"{stage}: {result.out}")
    console.result({"stage": stage, "folder": str(result.out), "digest": result.digest()})
    return 0


def _build(options: Options, console: Console, stage: str, config: Config | None = None) -> dict[str, Result]:
    """Make every result up to `stage`; where `verify` refuses the precision and the policy has another, with that one."""
    config = config or load(options.overrides, options.config_dir)
    executor = make_executor(config.executor.kind)
    try:
        return _graph(config).build([stage], executor, console)
    except GateError as error:
        if (other := fallback(config, error)) is None:
            raise
        console.line(f"verify refused {config.quant.name}: {error}")
        console.line("verify.on_failure=fallback: planned, converted and verified again with accuracy first")
        return _graph(other).build([stage], executor, console)


def _graph(config: Config) -> Graph:
    return Graph(STAGES, config, Store(_root(config)), find_source(config, _root(config)))


def _root(config: Config) -> Path:
    return Path(config.store.root).expanduser().absolute()
