"""Somebody's LLM arguments beside the plan's, line by line, both predicted: `plan --compare FILE`.

The file is read as TensorRT-LLM would read it (absent is its default, old spellings are understood and named), judged by the
same rules, and predicted at the same load on the same hardware.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.llm_args import render
from pipeline.engines.trtllm.versions import version_line
from pipeline.lint.document import read_document
from pipeline.models.arch import Arch
from pipeline.planner.case import Case, case_of
from pipeline.planner.llm_args_file import read_llm_args
from pipeline.planner.memory import memory_of, tokens_per_block
from pipeline.planner.rules import Finding, check
from pipeline.planner.search import predictable
from pipeline.planner.search.score import Point, score
from pipeline.planner.search.space import Candidate
from pipeline.planner.setup import Layout, Setup

__all__ = ["Comparison", "Line", "compare", "compare_file"]

REASONS = {
    "tensor_parallel_size": "layout", "moe_expert_parallel_size": "ep", "enable_attention_dp": "attention_dp",
    "pipeline_parallel_size": "layout", "attention_dp_config": "attention_dp", "max_batch_size": "max_batch_size",
    "max_num_tokens": "max_num_tokens", "moe_config.backend": "moe_backend", "speculative_config": "mtp",
    "kv_cache_config.free_gpu_memory_fraction": "free_gpu_memory_fraction",
    "cuda_graph_config": "cuda_graph_max_batch_size", "stream_interval": "stream_interval",
}  # fmt: skip
"""Argument, or the first part of its name -> the decision that set ours."""
DEFAULTS = {
    "enable_attention_dp": False, "pipeline_parallel_size": 1, "trust_remote_code": False, "enable_chunked_prefill": False,
    "stream_interval": 1, "backend": "pytorch",
}  # fmt: skip
"""What TensorRT-LLM takes for an argument that is absent."""
ALIASES = {"speculative_config.num_nextn_predict_layers": "speculative_config.max_draft_len"}
"""Two spellings of one argument, by version line."""
NOTES = {
    "trust_remote_code": "not needed: the engine has this architecture itself",
    "print_iter_log": "a log, no speed",
    "max_seq_len": "prompt + output of the workload, and 256 for the chat template and drafts",
    "kv_cache_config.dtype": "quant.kv_dtype",
    "kv_cache_config.enable_block_reuse": "the engine's default is left: reuse on",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One argument; None is absent."""

    name: str
    ours: Any
    theirs: Any
    why: str
    """Why ours is what it is, where they differ."""

    @property
    def differs(self) -> bool:
        """Whether the engine would see two values."""
        default = DEFAULTS.get(self.name)
        ours, theirs = (default if value is None else value for value in (self.ours, self.theirs))
        return bool(ours != theirs)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sets of arguments."""

    arguments: list[Line]
    renamed: tuple[str, ...]
    """Sentences about keys that newer engines spell otherwise, or do not know."""
    findings: list[Finding]
    ours: Point | None
    theirs: Point | None
    """Predictions; None where not one request fits, or the hardware's speed cannot be predicted."""

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        rows = [(line.name, _shown(line.ours), _shown(line.theirs), line.why) for line in self.arguments]
        table = [("argument", "ours", "theirs", "why ours"), *rows]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        for row in table:
            yield "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for name, point in (("ours", self.ours), ("theirs", self.theirs)):
            yield f"{name}: {_speed(point)}"
        yield from (f"! {text}" for text in self.renamed)
        yield from (f"! {item.level}: {item.text} [{item.source}]" for item in self.findings)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "arguments": [asdict(line) for line in self.arguments],
            "renamed": list(self.renamed),
            "findings": [asdict(item) for item in self.findings],
            "ours": _speed(self.ours),
            "theirs": _speed(self.theirs),
        }


def compare_file(config: Config, hf: Mapping[str, Any], plan: Mapping[str, Any], file: Path) -> Comparison:
    """The plan of `config` for the model that `hf` describes, beside `file`; `plan` is the plan's report.

    Raises:
        ConfigError: if the plan is not one for TensorRT-LLM, or the file cannot be read.
    """
    theirs = read_document(file).values
    if config.engine.kind != "trtllm":
        raise ConfigError(f"--compare reads TensorRT-LLM's arguments, but engine={config.engine.kind}: choose engine=trtllm.")
    case = case_of(config, Arch.from_hf(dict(hf)))
    ours = render(plan["deploy"], version_line(case.trtllm.version))
    paid = plan["predicted"]["gpus"] if "predicted" in plan else plan["deploy"]["num_devices"]
    return compare(ours, theirs, _asked(case, plan), {item["name"]: item["reason"] for item in plan["decisions"]}, paid)


def _asked(case: Case, plan: Mapping[str, Any]) -> Setup:
    """What both are asked: model, machine, formats and the load of one instance of the plan."""
    load = plan["predicted"]["concurrency"] if "predicted" in plan else case.concurrency
    return Setup(
        arch=case.arch, hw=case.hw, formats=case.formats, stored_as=case.config.quant.layout, layout=Layout(1, 1, False),
        model=case.config.model.name, version=case.trtllm.version, kv_format=case.kv_format, isl=case.isl, osl=case.osl,
        concurrency=math.ceil(load / plan["deploy"]["instances"]) if load else None,
    )  # fmt: skip


def compare(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], asked: Setup, decisions: Mapping[str, str], total: int
) -> Comparison:
    """`ours` are the plan's arguments, read like `theirs` for the question that `asked` holds; `decisions` says why, by name;
    `total` counts the GPUs that are paid for."""
    read = read_llm_args(theirs, asked)
    return Comparison(
        arguments=list(_lines(_flat(ours), _flat(theirs), decisions)),
        renamed=(*read.renamed, *read.unknown),
        findings=check(read.setup),
        ours=_predicted(read_llm_args(ours, asked).setup, total),
        theirs=_predicted(read.setup, total),
    )


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def _speed(point: Point | None) -> str:
    if point is None:
        return "not predicted"
    low, high = point.prediction.interval
    return (
        f"{point.label}, {point.candidate.concurrency:,} requests at once: {point.tokens_per_gpu:,.0f} tokens/s/GPU, "
        f"TPOT {point.prediction.tpot_ms:.1f} ms (80 %: {low:.1f} to {high:.1f}), TTFT {point.prediction.ttft_ms:,.0f} ms"
    )


def _predicted(setup: Setup, total: int) -> Point | None:
    """At the load of the workload, or as many requests as its limits and cache take."""
    rank = min(memory_of(setup), key=lambda memory: memory.kv_tokens)
    block = tokens_per_block(setup.arch, setup.hw.sm or 0)
    held = rank.sequences(setup.isl + setup.osl + setup.mtp, block)
    if rank.free <= 0 or held < 1 or not predictable(setup.hw) or setup.layout.pp > 1:
        return None
    replicas = max(1, total // setup.layout.world_size)
    batch = min(held, setup.max_batch_size)
    load = setup.concurrency * replicas if setup.concurrency else batch * setup.layout.cache_ranks * replicas
    nodes = math.ceil(total / setup.hw.num_devices)
    item = Candidate("", replace(setup, max_batch_size=batch), nodes, total, replicas, load, rank.kv_tokens, held)
    return score([item]).point(0)


def _lines(ours: Mapping[str, Any], theirs: Mapping[str, Any], decisions: Mapping[str, str]) -> Iterator[Line]:
    for name in sorted(ours.keys() | theirs.keys()):
        line = Line(name, ours.get(name), theirs.get(name), "")
        yield replace(line, why=_why(name, line.ours, decisions)) if line.differs else line


def _why(name: str, ours: Any, decisions: Mapping[str, str]) -> str:
    known = NOTES.get(name) or decisions.get(REASONS.get(name) or REASONS.get(name.partition(".")[0], ""), "")
    return known or ("left to the engine's default" if ours is None else "see the plan's decisions")


def _flat(args: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """kv_cache_config: {dtype: fp8} -> kv_cache_config.dtype: fp8"""
    flat: dict[str, Any] = {}
    for key, value in args.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {ALIASES.get(name, name): value}
    return flat
