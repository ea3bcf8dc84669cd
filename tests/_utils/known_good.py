"""Configurations that are known to run, as `lint` sees them: NVIDIA's published recipes, and layouts that InferenceX measured."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.engines.trtllm.versions import version_line
from pipeline.lint import planned
from pipeline.lint.args import args_of
from pipeline.lint.args import findings as args_findings
from pipeline.lint.base import NOTE, Finding
from pipeline.lint.document import Document
from pipeline.lint.report import lint
from pipeline.lint.target import Target, target_of

__all__ = ["MEASURED", "RECIPES", "TRUE_ALARMS", "alarms_of_measured", "alarms_of_recipe", "target"]

DATA = Path(__file__).parents[1] / "data"
RECIPES = sorted((DATA / "recipes").glob("*.yaml"))
_KNOWN = json.loads((DATA / "known_good.json").read_text(encoding="utf-8"))
MEASURED: list[list[Any]] = _KNOWN["measured"]
TRUE_ALARMS = {"curated__deepseek-r1-throughput": "args/renamed"}
"""The one recipe that its own engine refuses: it has a name of the command line."""


@cache
def _composed(hw: str, model: str, quant: str) -> Config:
    config = target_of([f"hw={hw}", f"model={model}", f"quant={quant}"]).config
    assert config is not None
    return config


def target(hw: str, model: str, quant: str, version: str | None = None, **workload: Any) -> Target:
    """As `target_of`, composed once for each machine, model and recipe."""
    config = copy.deepcopy(_composed(hw, model, quant))
    for name, value in workload.items():
        setattr(config.workload, name, value)
    return Target(version, None, config, bool(workload))


def alarms_of_recipe(file: Path, placed: bool) -> list[Finding]:
    """Errors and warnings about a recipe, by itself or on the machine and load that its name tells."""
    hw, quant = "h200" if "__H200__" in file.stem else "b200", "fp8_block" if "0528__" in file.stem else "nvfp4"
    lengths = re.search(r"(\d)k(\d)k_tp\d_conc(\d+)", file.stem)
    load = {name: int(text) * 1000 for name, text in zip(("isl", "osl"), lengths.groups(), strict=False)} if lengths else {}
    load |= {"concurrency": int(lengths[3])} if lengths else {}
    model = "kimi_k2" if "kimi" in file.stem else "deepseek_r1"
    return _serious(lint([file], target(hw, model, quant, **load) if placed else Target()).findings)


def alarms_of_measured(row: list[Any]) -> list[Finding]:
    """Errors and warnings about a measured layout, written as arguments."""
    asked = dict(zip(_KNOWN["columns"], row, strict=True))
    fp4, adp, line = asked["precision"] == "fp4", asked["attention_dp"], version_line(asked["version"])
    hopper = asked["hw"] in ("h100", "h200")
    backend = "CUTLASS" if hopper or (fp4 and adp) else "DEEPGEMM" if adp and asked["ep"] > 1 else "TRTLLM"
    drafts = {"speculative_config": {"decoding_type": "MTP", line.mtp_key: 1 if adp else 3}} if asked["mtp"] else {}
    side = {"cache_transceiver_config": {"backend": "DEFAULT"}} if asked["role"] != "both" else {}
    values = {
        "tensor_parallel_size": asked["tp"], "moe_expert_parallel_size": asked["ep"], "enable_attention_dp": adp,
        "moe_config": {"backend": backend}, "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.8},
        "max_num_tokens": asked["isl"] + 512, **drafts, **side,
    }  # fmt: skip
    load = {name: asked[name] for name in ("isl", "osl", "concurrency")}
    meant = target(asked["hw"], "deepseek_r1", "nvfp4" if fp4 else "fp8_block", asked["version"], **load)
    assert meant.config is not None
    meant.config.hw.num_nodes = max(1, asked["tp"] // meant.config.hw.num_devices)
    args = args_of(Document(Path("measured.yaml"), values), meant, asked["role"])
    return _serious((*args_findings(args), *planned.findings(args)))


def _serious(findings: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.level != NOTE]
