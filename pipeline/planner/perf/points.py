"""Rows of a file of measured points -> cases, with the reason for every row that is not one.

Traps of the public dumps are undone here and in `recipes`: MTP is not a column, `tp_size` is tp x ep in some rows, rows
of disaggregated serving carry no worker counts, and rows of November 2025 do not say the parallelism that ran.
InferenceX and the direct runs draw lengths uniformly from 0.8 to 1.0 of the nominal ones: means are 0.9 of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.schema import HwConfig
from pipeline.core.errors import ConfigError
from pipeline.models.arch import Arch
from pipeline.planner.perf.case import Machine, PerfCase, checkpoint_formats
from pipeline.planner.perf.predict import check
from pipeline.planner.perf.recipes import NOVEMBER, Recipe, piecewise, recipe
from pipeline.planner.perf.work import KV_BYTES

__all__ = ["Point", "digest", "fingerprint", "read_aiconfigurator", "read_point", "read_points"]

DRAWN = 0.9
LAYOUT = re.compile(r"^(ADP|TP|DEP)(\d+)(?:\+EP(\d+))?")
DEVELOPMENT = re.compile(r"TopK|Fuse_A|relaxed")
PAIR = re.compile(r"EP(\d+)TP(\d+)")
FORMATS = {name: checkpoint_formats(name) for name in ("bf16", "fp8", "fp4", "fp4_v1")}
VERSION = re.compile(r"(\d+\.\d+\.\d+(?:rc\d+)?)")


@dataclass(frozen=True, slots=True)
class Point:
    """A measured row and its case; `case` is None with a `reason` where it cannot be predicted."""

    row: Mapping[str, Any]
    case: PerfCase | None
    reason: str = ""
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    derived: bool = False
    """tpot_ms is 1000 / tokens/s/user of a published summary: it calibrates, and is not scored."""

    @property
    def asked(self) -> tuple[str, int]:
        """The key of `read_aiconfigurator`."""
        return fingerprint(self.row), self.case.mtp if self.case else 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Configuration, without concurrency: a fold of cross-validation holds all of it or nothing."""
        case = self.case
        assert case is not None
        lengths = self.row.get("isl"), self.row.get("osl")
        return (case.machine.name, case.precision, case.layout, *lengths, case.mtp > 0, case.engine)


def fingerprint(row: Mapping[str, Any]) -> str:
    """What makes two rows the same measurement, whatever else a file adds to them."""
    names = ("hw", "precision", "isl", "osl", "parallelism", "concurrency", "engine", "tpot_ms", "tok_s_user")
    return "|".join(str(row.get(name)) for name in names)


def digest(row: Mapping[str, Any]) -> str:
    """Short and stable: how a calibration remembers its points without shipping them."""
    return hashlib.sha256(fingerprint(row).encode()).hexdigest()[:10]


def read_points(path: Path, conf: Path) -> list[Point]:
    """Every row of a JSON file of points, with the machines and DeepSeek-R1 of a `conf` folder."""
    machines = {}
    for file in sorted((conf / "hw").glob("*.yaml")):
        hw = HwConfig(**yaml.safe_load(file.read_text(encoding="utf-8"))["hw"])
        with contextlib.suppress(ConfigError):  # a CPU, or a GPU without NVLink
            machines[hw.name] = Machine.of(hw)
    model = yaml.safe_load((conf / "model" / "deepseek_r1.yaml").read_text(encoding="utf-8"))
    arch = Arch.from_hf(model["hf"])
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [read_point(row, arch, machines) for row in rows]


def read_aiconfigurator(path: Path, quantity: str = "tpot") -> dict[tuple[str, int], float]:
    """Stored predictions of aiconfigurator: TPOT or TTFT in ms by fingerprint and the draft tokens that it was run with; empty
    without the file."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    answered = [row for row in rows if row.get("p_tpot") and not row.get("err")]
    return {(fingerprint(row), int(row["args"].get("nextn") or 0)): row[f"p_{quantity}"] for row in answered}


def read_point(row: Mapping[str, Any], arch: Arch, machines: Mapping[str, Machine]) -> Point:
    """One row; every reason to decline is a sentence."""
    try:
        point = _read(row, arch, machines)
        assert point.case
        check(point.case)
    except (ValueError, ConfigError) as error:
        return Point(row, None, str(error))
    return point


def _read(row: Mapping[str, Any], arch: Arch, machines: Mapping[str, Machine]) -> Point:
    tpot, user = row.get("tpot_ms"), row.get("tok_s_user")
    if row.get("mode") == "disagg":
        raise ValueError("disaggregated: the row carries no worker counts, so its load per instance is unknown")
    if "trt" not in _engine_name(row) and "tensorrt" not in _engine_name(row):
        raise ValueError(f"engine {row.get('engine')!r}: the model is calibrated for TensorRT-LLM only")
    missing = [name for name in ("hw", "precision", "source_class", "parallelism") if not row.get(name)]
    if missing:
        raise ValueError(f"the row lacks {', '.join(missing)}")
    quality = str(row.get("quality") or "")
    if quality.startswith(("suspicious", "unusable")):
        raise ValueError(f"row marked {quality!r}")
    if not (tpot or user):
        raise ValueError("no TPOT and no tokens/s/user in the row")
    machine = machines.get(str(row["hw"]).lower())
    if machine is None:
        raise ValueError(f"hardware {row['hw']!r} has no file in conf/hw")
    if not isinstance(row.get("concurrency"), (int, float)):
        raise ValueError(f"concurrency is {row.get('concurrency')!r}, not a number")
    if not all(isinstance(row.get(name), (int, float)) and row[name] >= 1 for name in ("isl", "osl")):
        raise ValueError("no input and output lengths in the row")
    case = _case(row, arch, machine)
    return Point(row, case, "", tpot or 1000 / user, row.get("ttft_ms"), derived=not tpot)


def _engine_name(row: Mapping[str, Any]) -> str:
    return str(row.get("engine") or "").lower()


def _case(row: Mapping[str, Any], arch: Arch, machine: Machine) -> PerfCase:
    tp, ep, adp = _layout(row)
    engine = _engine(row)
    run = recipe(row, engine, tp, ep, adp) if row["source_class"] == "inferencex" else _direct(row, ep, adp)
    drawn = DRAWN if row["source_class"] in ("inferencex", "zufayu_raw") else 1.0
    return PerfCase(
        machine=machine, arch=arch, formats=_formats(str(row["precision"])), kv_format=_kv_format(row),
        tp=tp, ep=run.ep, attention_dp=run.attention_dp, mtp=run.mtp, acceptance=row.get("acceptance_len"),
        concurrency=row["concurrency"], isl=row["isl"] * drawn, osl=row["osl"] * drawn,
        engine=engine, moe_backend=run.moe_backend, max_num_tokens=run.max_num_tokens, piecewise_graphs=run.piecewise_graphs,
        max_batch_size=row.get("max_batch_size"), kv_tokens=(row.get("memory") or {}).get("kv_max_tokens"),
        runner="inferencex" if row["source_class"] == "inferencex" else "direct",
    )  # fmt: skip


def _formats(precision: str) -> Mapping[str, str]:
    """`fp4 (attn bf16)` is the first NVFP4 checkpoint, `fp4` the second."""
    name = "fp4_v1" if precision.startswith("fp4 (") else precision.split()[0]
    if name not in FORMATS:
        raise ValueError(f"precision {precision!r} is none of a published checkpoint")
    return FORMATS[name]


def _kv_format(row: Mapping[str, Any]) -> str:
    """FP8 where the row says nothing: every recipe sets it."""
    fmt = str(row.get("kv_dtype") or "fp8")
    if fmt not in KV_BYTES:
        raise ValueError(f"kv_dtype {fmt!r} is none of {', '.join(KV_BYTES)}")
    return fmt


def _direct(row: Mapping[str, Any], ep: int, adp: bool) -> Recipe:
    """A run whose row says what it set; those of zufayu/ClaudeSkillsE2EPerf follow the InferenceX scripts of 2026."""
    graphs = row["source_class"] == "zufayu_raw" and piecewise(row["precision"], adp, (row["isl"], row["osl"]), row["concurrency"])
    tokens = row.get("max_num_tokens") or 8192
    return Recipe(ep, adp, int(row.get("mtp") or 0), row.get("moe_backend") or "TRTLLM", tokens, graphs)


def _layout(row: Mapping[str, Any]) -> tuple[int, int, bool]:
    """GPUs, expert ranks, attention DP."""
    text = str(row.get("parallelism") or "")
    match = LAYOUT.match(text)
    if not match:
        raise ValueError(f"parallelism {text!r} is not understood")
    if DEVELOPMENT.search(text):
        raise ValueError(f"{text!r} is a step of TensorRT-LLM's development or changes the sampling, not a configuration")
    tp = int(match[2])
    pair = PAIR.search(text)
    ep = int(match[3] or (pair[1] if pair else (tp if match[1] == "DEP" else 1)))
    if tp % ep:
        raise ValueError(f"parallelism {text!r}: {ep} expert ranks do not divide {tp} GPUs")
    return tp, ep, match[1] != "TP"


def _engine(row: Mapping[str, Any]) -> str:
    """The version as the row has it, or what stands in for one."""
    match = VERSION.search(str(row.get("engine") or ""))
    return match[1] if match else "docker" if "docker" in _engine_name(row) else NOVEMBER if "nan" in _engine_name(row) else "blog"
