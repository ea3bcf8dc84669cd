"""`onnx MODULE:FACTORY out=DIR`: three steps, each in a process of its own, and the folder that comes out, whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError, MissingToolError, StageError
from pipeline.core.events import Console, human_bytes
from pipeline.core.jsonio import read_json, write_json
from pipeline.core.stage import Progress
from pipeline.engines.tensorrt.library import INSTALL, installed_version, library_for
from pipeline.engines.tensorrt.plan_file import check_header
from pipeline.engines.tensorrt.process import run_task, short_name
from pipeline.onnx import ENGINE, LAYERS, MODEL, REPORT, require

if TYPE_CHECKING:
    from pipeline.cli import Options

__all__ = ["Wish", "onnx_command"]

PUBLISHED = (MODEL, f"{MODEL}.data", ENGINE, LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The words of the command."""

    factory: str
    out: Path
    targets: tuple[int, ...] = ()
    """Compute capabilities x10; none: no engine."""
    library: str = "auto"
    tolerance: float = 1e-3
    opset: int = 23
    arguments: Mapping[str, str]
    """Of the factory."""

    @classmethod
    def parse(cls, words: list[str]) -> Wish:
        """Refuse what cannot be before torch is loaded."""
        factories = [word for word in words if "=" not in word]
        if len(factories) != 1 or not re.fullmatch(r"[\w.]+:\w+", factories[0]):
            raise ConfigError(f"onnx takes one MODULE:FACTORY, but got {' '.join(factories) or 'none'}: see onnx --help.")
        given = dict(word.split("=", 1) for word in words if "=" in word)
        if "out" not in given:
            raise ConfigError("onnx writes a folder: name it with out=DIR.")
        own = {field.name: given.pop(field.name) for field in fields(cls) if field.name in given and field.name in _READ}
        read = {name: _READ[name](name, text) for name, text in own.items()}
        return cls(factory=factories[0], arguments=given, **read)

    def libraries(self) -> str:
        """The library that builds for all targets."""
        library = self.library
        for sm in self.targets:
            library = library_for(sm, library)
        if self.targets and installed_version(library) is None:
            raise MissingToolError(f"targets={list(self.targets)} needs {library}, not installed here: {INSTALL[library]}.")
        return library


def _targets(name: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\[?\d+(,\d+)*\]?", text):
        raise ConfigError(f"{name}={text} is not a list of compute capabilities: write {name}=[120] or {name}=[89,120].")
    return tuple(sorted({int(number) for number in re.findall(r"\d+", text)}))


def _library(name: str, text: str) -> str:
    if text not in ("auto", *INSTALL):
        raise ConfigError(f"{name}={text} is not known: auto, {' or '.join(INSTALL)}.")
    return text


def _tolerance(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 < value < 1:
        raise ConfigError(f"{name}={text} is not a share between 0 and 1: 0.001 is usual for float32, 0.02 for float16.")
    return value


def _opset(name: str, text: str) -> int:
    if text not in ("23", "24"):
        raise ConfigError(f"{name}={text}: 23 is the first opset with attention and RMSNorm; 23 and 24 are written.")
    return int(text)


_READ: dict[str, Any] = {
    "out": lambda name, text: Path(text), "targets": _targets, "library": _library, "tolerance": _tolerance, "opset": _opset,
}  # fmt: skip
"""Word of ours -> how it is read; all others are the factory's."""


def onnx_command(options: Options, console: Console) -> int:
    """Exits with 3 when a step failed or the two results differ; then DIR is as it was."""
    wish = Wish.parse(options.overrides)
    require()
    library = wish.libraries()
    _require_replaceable(wish.out)
    progress = console.stage_started("onnx", wish.factory)
    parent = wish.out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{wish.out.name}.", dir=parent) as folder, short_name(Path(folder)) as scratch:
        report = _Work(wish, library, scratch, progress).report()
        _publish(scratch, report, Path(folder), wish.out)
    console.stage_ended("onnx", "built")
    console.line(f"onnx: {wish.out}")
    console.result({"command": "onnx", "folder": str(wish.out), **report})
    return 0


@dataclass(frozen=True, slots=True)
class _Work:
    wish: Wish
    library: str
    scratch: Path
    progress: Progress

    def run(self, module: str, **task: Any) -> dict[str, Any]:
        """One of the three steps."""
        return run_task(module, {"name": module, "task": module, **task}, self.scratch, self.progress, package="pipeline.onnx")

    def report(self) -> dict[str, Any]:
        """Everything that was found; the files lie in the scratch folder."""
        wish = self.wish
        made = self.run(
            "export", factory=wish.factory, paths=[str(Path.cwd())], arguments=dict(wish.arguments), opset=wish.opset
        )  # fmt: skip
        weights, nodes = human_bytes(made["weight_bytes"]), sum(made["operators"].values())
        self.progress.note(f"{nodes} nodes of {len(made['operators'])} kinds, opset {wish.opset}, {weights} of weights")
        for note in made["notes"]:
            self.progress.note(note)
        compared = self._checked() if made["comparable"] else {"agreement": [], "not_compared": made["notes"][0]}
        engine = self._engine(made["inputs"]) if wish.targets else None
        versions = {name: metadata.version(name) for name in ("torch", "onnx", "onnxscript", "onnxruntime")}
        facts = {key: made[key] for key in ("inputs", "outputs", "operators", "parameters", "weight_bytes", "notes")}
        return {
            "kind": "onnx", "factory": wish.factory, "arguments": dict(wish.arguments), "opset": wish.opset, "versions": versions,
            "agreement": compared["agreement"], "not_compared": compared["not_compared"], "engine": engine, **facts,
        }  # fmt: skip

    def _checked(self) -> dict[str, Any]:
        """onnxruntime beside torch."""
        found = self.run("check")
        if found["not_compared"]:
            self.progress.note(found["not_compared"])
        for row in found["agreement"]:
            if not row["relative"] <= self.wish.tolerance:
                raise StageError(
                    f"onnxruntime does not compute what torch computes: {row['output']} differs by {row['relative']:.2g} of its "
                    f"largest value, above tolerance={self.wish.tolerance:g}. Nothing is written."
                )
        if rows := found["agreement"]:
            worst = max(rows, key=lambda row: row["relative"])
            least = f"{worst['output']} least, within {worst['relative']:.1e}"
            self.progress.note(f"onnxruntime agrees on {len(rows)} outputs; {least}")
        return {"agreement": [_rounded(row) for row in rows], "not_compared": found["not_compared"]}

    def _engine(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """TensorRT's parser and builder."""
        for name, facts in inputs.items():
            if None in facts["range"][2]:
                raise ConfigError(
                    f"The input {name} has a dimension without a largest size, which an engine needs: write it as "
                    'torch.export.Dim("B", min=1, max=64) in dynamic_shapes.'
                )
        self.progress.start(100, "steps")
        targets, ranges = list(self.wish.targets), {name: facts["range"] for name, facts in inputs.items()}
        made = self.run("engine", library=self.library, targets=targets, ranges=ranges)
        if self.library == "tensorrt_rtx":
            check_header(self.scratch / ENGINE, targets)
        size, peak = f"{made['facts']['bytes'] / 1e6:,.1f} MB", f"peak {made['peak_bytes'] / 1e9:.2f} GB"
        self.progress.note(f"engine of {made['facts']['layers']} layers, {size}, {peak}; not run on a GPU")
        return {"library": self.library, "version": installed_version(self.library), "targets": targets, **made["facts"]}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Two digits are what rounding leaves."""
    return {key: float(f"{value:.1e}") if isinstance(value, float) else value for key, value in row.items()}


def _require_replaceable(out: Path) -> None:
    """Only a result of this command is written over."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not _is_ours(out)):
        raise ConfigError(f"out={out} holds something that this command did not write: name another folder.")


def _is_ours(out: Path) -> bool:
    report = out / REPORT
    return report.is_file() and read_json(report).get("kind") == "onnx"


def _publish(scratch: Path, report: dict[str, Any], folder: Path, out: Path) -> None:
    """Put the files into a folder of their own, and that in the place of the old one."""
    ready = folder / "ready"
    ready.mkdir()
    for name in PUBLISHED:
        if (scratch / name).is_file():
            os.replace(scratch / name, ready / name)
    write_json(ready / REPORT, report)
    if out.exists():
        shutil.rmtree(out)
    os.replace(ready, out)
