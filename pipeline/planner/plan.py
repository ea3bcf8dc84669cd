"""From a configuration and a model's config.json to a plan: precision, deployment, and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.llm_args import render
from pipeline.engines.trtllm.roles import roles_of
from pipeline.engines.trtllm.versions import version_line
from pipeline.models.arch import Arch
from pipeline.planner.case import Case, case_of
from pipeline.planner.choose import Choice, Decision, choose
from pipeline.planner.costed import require_costed, uncosted
from pipeline.planner.deploy import deploy_of
from pipeline.planner.memory import RankMemory, memory_of
from pipeline.planner.nearest import nearest
from pipeline.planner.params import main_parts, num_params, stored_bytes
from pipeline.planner.picture import memory_svg, rank_bars
from pipeline.planner.placement import placement_notes, placement_report
from pipeline.planner.reuse import reuse_notes, reuse_of
from pipeline.planner.rules import REFUSE, WARN, Finding, check
from pipeline.planner.search import Found, search, searchable
from pipeline.planner.search.choice import choice_of, speed_report
from pipeline.planner.search.split import SplitChoice, split_of, split_report
from pipeline.planner.setup import Setup
from pipeline.planner.stored import read_headers
from pipeline.planner.tensorrt_limits import tensorrt_deploy, tensorrt_report, tensorrt_rules
from pipeline.planner.torch_limits import torch_decisions, torch_deploy, torch_memory, torch_rules, torch_warnings
from pipeline.planner.vllm_limits import RESERVE, VllmCase

__all__ = ["Plan", "make_plan"]

NO_MTP_LAYER = "config.json announces an MTP layer, and the checkpoint has none: nothing is drafted, and none is counted."


@dataclass(frozen=True, slots=True)
class Plan:
    """What the three files of the stage hold."""

    precision: dict[str, Any]
    deploy: dict[str, Any]
    report: dict[str, Any]
    picture: str | None = None
    """Memory of a rank, as SVG."""


def make_plan(config: Config, hf: dict[str, Any], folder: Path | None = None) -> Plan:
    """Plan the deployment of the model that `hf` (its config.json) describes, and whose weights are in `folder`, if anywhere yet.

    Raises:
        ConfigError: with every reason why it cannot work.
    """
    arch = Arch.from_hf(hf)
    headers = read_headers(folder, arch) if folder else None
    bare = bool(headers and not headers.drafts and arch.num_nextn_predict_layers)
    case = case_of(config, replace(arch, num_nextn_predict_layers=0) if bare else arch)
    planned = _PLANNERS[config.engine.kind](case)
    precision = {
        "formats": case.formats,
        "kv_cache": case.kv_format,
        "input_scale": config.quant.input_scale,
        "nvfp4_scale_search": config.quant.nvfp4_scale_search,
        "nvfp4_mode": config.quant.nvfp4_mode,
        "layout": config.quant.layout,
    }
    report = {**_subject(case), **planned.report, "checkpoint": headers and headers.plain(), "deploy": planned.deploy}
    report["warnings"] += [NO_MTP_LAYER] if bare else []
    return Plan(precision, planned.deploy, report, planned.picture)


@dataclass(frozen=True, slots=True)
class _Planned:
    deploy: dict[str, Any]
    report: dict[str, Any]
    picture: str | None = None


def _plan_torch(case: Case) -> _Planned:
    _refuse(torch_rules(case))
    memory, visible = torch_memory(case), int(case.hw.memory_bytes)
    rows = [_row(name, size) for name, size in memory.items() if size]
    report = {
        "layout": "no parallelism",
        "memory": {"rows": rows, "total": sum(memory.values()), "visible": visible},
        "limits": [],
        "decisions": _decisions(torch_decisions(case)),
        "warnings": torch_warnings(case),
        "not_checked": [],
    }
    return _Planned(torch_deploy(case), report)


def _plan_tensorrt(case: Case) -> _Planned:
    _refuse(tensorrt_rules(case))
    return _Planned(tensorrt_deploy(case), tensorrt_report(case))


def _plan_trtllm(case: Case) -> _Planned:
    choice, found = _chosen(case)
    split = split_of(case, found)
    choice = split.generation if split else choice
    setups = split.setups if split else (choice.setup,)
    findings = _checked(setups, case)
    deploy = deploy_of(case, choice, split)
    line, own = version_line(case.trtllm.version), case.trtllm.args
    emitted = [require_costed(render(role, line), setup, own) for role, setup in zip(roles_of(deploy), setups, strict=True)]
    findings += [item for item in _checked(emitted) if item not in findings]
    reuse, placement = reuse_of(case, choice), placement_report(choice.setup)
    report = {
        "layout": found.best.label if found else str(choice.layout),
        "memory": _memory(choice),
        "limits": _limits(case, choice),
        "decisions": _decisions(choice.decisions),
        "reuse": reuse,
        "topology": placement,
        "findings": [asdict(item) for item in findings],
        "warnings": [
            *_notes(case, found, split),
            *reuse_notes(reuse),
            *placement_notes(placement, choice.setup),
            *(item.text for item in findings if item.level == WARN),
            *uncosted(own),
        ],
        "not_checked": ["Nothing here ran on a GPU: limits come from arithmetic and from published measurements."],
    }
    if found:
        report |= speed_report(case, found)
    if split:
        report |= {"layout": split.split.label, "predicted": {**report["predicted"], **split_report(split)}}
    title = f"{case.config.model.title} on {case.hw.title}: memory of one rank"
    return _Planned(deploy, report, memory_svg(rank_bars(choice.setup), title))


def _plan_vllm(case: Case) -> _Planned:
    asked = VllmCase(case)
    _refuse(asked.problems())
    rows = [_row(name, size, case.formats.get(name, "bf16")) for name, size in asked.memory.weights.items() if size]
    rows += [_row("reserve (assumed)", RESERVE), _row("kv_cache", asked.cache, case.kv_format)]
    report = {
        "layout": str(asked.layout),
        "memory": {"rows": rows, "total": sum(row["bytes"] for row in rows), "visible": asked.memory.visible},
        "limits": [],
        "decisions": _decisions(asked.decisions()),
        "warnings": [*([f"{case.cut}."] if case.cut else []), *asked.notes()],
        "not_checked": ["Nothing here ran on a GPU or was judged by vLLM."],
    }
    return _Planned(asked.deploy(), report)


def _chosen(case: Case) -> tuple[Choice, Found | None]:
    """By predicted speed; by the published recipes where it cannot be predicted, or where nothing fits and rules say why."""
    found = search(case) if searchable(case) else None
    return (choice_of(case, found) if found else choose(case)), found


_PLANNERS = {"torch": _plan_torch, "tensorrt": _plan_tensorrt, "trtllm": _plan_trtllm, "vllm": _plan_vllm}
"""Engine -> its planner. A new engine is a new entry."""


def _checked(setups: Sequence[Setup], case: Case | None = None) -> list[Finding]:
    """What the rules say of them, once each; ConfigError where one refuses."""
    findings = list(dict.fromkeys(item for setup in setups for item in check(setup)))
    _refuse([f"{item.text} [{item.source}]" for item in findings if item.level == REFUSE], case)
    return findings


def _refuse(problems: list[str], case: Case | None = None) -> None:
    if problems:
        raise ConfigError("\n".join(problems + ([nearest(case)] if case else [])))


def _notes(case: Case, found: Found | None, split: SplitChoice | None) -> list[str]:
    """What the request itself should be told."""
    notes = [f"{case.cut}."] if case.cut else []
    if found and not split and found.best.candidate.replicas > 1:
        count, gpus = found.best.candidate.replicas, found.best.setup.layout.world_size
        notes.append(
            f"The speed is that of {count} servers, each with {gpus} GPU{'s' if gpus > 1 else ''} of its own: launch/ starts them; "
            f"on Kubernetes a Service spreads the requests, elsewhere put a balancer before them."
        )
    notes += [case.precision_note] if case.precision_note else []
    if any(value is not None for value in asdict(case.limits).values()):
        if found is None:
            notes.append("slo.* is not predicted for this hardware or pipeline parallelism: only published recipes decide.")
        elif split:
            notes += [] if split.meets_slo else [f"{case.asked} is within reach only at the favourable end of the prediction."]
        elif not found.meets_slo:
            low, high = found.best.prediction.interval
            more = f" hw.num_nodes={found.nodes_needed} is predicted to do." if found.nodes_needed else ""
            notes.append(
                f"{case.asked} is within reach only at the favourable end of the prediction: TPOT "
                f"{found.best.prediction.tpot_ms:.1f} ms, 80 % interval {low:.1f} to {high:.1f} ms, "
                f"{found.best.tokens_per_second:,.0f} tokens/s. Measure before you promise it.{more}"
            )
    return notes


def _subject(case: Case) -> dict[str, Any]:
    """What is planned for what."""
    config = case.config
    return {
        "model": {
            "name": config.model.name,
            "parameters": num_params(main_parts(case.arch)),
            "checkpoint_bytes": sum(stored_bytes(case.arch, case.formats).values()),
        },
        "hw": {"name": config.hw.name, "title": config.hw.title},
        "engine": config.engine.kind,
        "quant": case.recipe,
        "workload": {
            "name": config.workload.name,
            "isl": case.isl,
            "osl": case.osl,
            "concurrency": case.concurrency,
        },
    }


def _memory(choice: Choice) -> dict[str, Any]:
    memory, setup = choice.memory, choice.setup
    rows = [_row(name, size, setup.formats.get(name, "bf16")) for name, size in memory.weights.items() if size]
    rows += [_row(name, size) for name, size in (*memory.copies.items(), *memory.overhead.items()) if size]
    rows.append(_row("kv_cache", memory.kv_cache, setup.kv_format))
    total = sum(row["bytes"] for row in rows)
    rows.append(_row("unused (1 - fraction)", memory.visible - total))
    return {
        "rows": rows,
        "weights": memory.loaded,
        "total": total,
        "visible": memory.visible,
        "stages": [_stage(setup, stage, rank) for stage, rank in enumerate(memory_of(setup))],
    }


def _stage(setup: Setup, stage: int, rank: RankMemory) -> dict[str, Any]:
    """The ranks of one pipeline stage, which are alike."""
    first = stage * setup.layout.tp
    return {
        "ranks": [first, first + setup.layout.tp - 1],
        "weights": rank.loaded,
        "overhead": rank.engine,
        "kv_cache": rank.kv_cache,
        "kv_tokens": rank.kv_tokens,
    }


def _limits(case: Case, choice: Choice) -> list[dict[str, Any]]:
    """Per rank and for the whole instance."""
    ranks, memory = choice.layout.cache_ranks, choice.memory
    pairs = [
        ("KV bytes a token", memory.kv_bytes_per_token, None),
        ("KV tokens", memory.kv_tokens, memory.kv_tokens * ranks),
        (f"sequences of {case.isl} + {case.osl} tokens that fit", choice.sequences, choice.capacity),
        ("max_batch_size", choice.setup.max_batch_size, choice.setup.max_batch_size * ranks),
        ("max_num_tokens", choice.setup.max_num_tokens, choice.setup.max_num_tokens * ranks),
        ("max_seq_len", choice.setup.max_seq_len, None),
    ]
    return [{"name": name, "rank": rank, "instance": whole} for name, rank, whole in pairs]


def _row(name: str, size: int, fmt: str | None = None) -> dict[str, Any]:
    return {"component": name, "format": fmt, "bytes": int(size)}


def _decisions(decisions: tuple[Decision, ...]) -> list[dict[str, Any]]:
    return [asdict(decision) for decision in decisions]
