"""Runs one stage's function in a folder, without the graph around it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.config.schema import ConvertConfig, VerifyConfig
from pipeline.core.stage import StageContext

__all__ = ["LINEAR", "Notes", "convert", "peak_rss", "recipe", "verify"]

LINEAR = ("attention", "o_proj", "dense_mlp", "shared_experts", "routed_experts", "mtp")


@dataclass
class Notes:
    """A `Progress` that remembers; it raises `Interrupted` once it has seen `stop_after` bytes."""

    stop_after: float = float("inf")
    total: int = 0
    done: int = 0
    notes: list[str] = field(default_factory=list)

    def start(self, total: int, unit: str) -> None:
        self.total, self.done = total, 0

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        if self.done > self.stop_after:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)


def recipe(default: str, **formats: str) -> dict[str, Any]:
    """A precision.json: `default` for every class but those named."""
    return {"formats": dict.fromkeys(LINEAR, default) | formats, "kv_cache": "fp8", "input_scale": 1.0}


def convert(checkpoint: Path, work: Path, table: dict[str, Any], progress: Notes | None = None, **config: Any) -> Path:
    """Convert into `work`/out; what is there stays, as after an interruption."""
    from pipeline.stages.convert import run

    (work / "plan").mkdir(parents=True, exist_ok=True)
    (work / "plan" / "precision.json").write_text(json.dumps(table))
    out = work / "out"
    out.mkdir(exist_ok=True)
    settings: Any = SimpleNamespace(convert=ConvertConfig(**config))
    inputs = {"plan": work / "plan"}
    run(StageContext(config=settings, inputs=inputs, checkpoint=checkpoint, out=out, progress=progress or Notes()))
    return out


def verify(checkpoint: Path, converted: Path, out: Path, progress: Notes | None = None, **config: Any) -> dict[str, Any]:
    """Verify, and return report.json, if it passes the gate."""
    from pipeline.stages.verify import gate, run

    out.mkdir(parents=True, exist_ok=True)
    settings: Any = SimpleNamespace(verify=VerifyConfig(**config))
    inputs = {"convert": converted}
    run(StageContext(config=settings, inputs=inputs, checkpoint=checkpoint, out=out, progress=progress or Notes()))
    gate(out)
    return json.loads((out / "report.json").read_text())


def peak_rss() -> int:
    """Bytes of this program's peak resident set; ru_maxrss would start at that of the process that forked it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
