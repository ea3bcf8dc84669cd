"""Names, types and values: what the engine refuses before it looks at anything else, and what it takes without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.engines.trtllm.arguments import notes
from pipeline.engines.trtllm.versions import known_lines, release_order
from pipeline.lint.args.subject import LLM_ARGS, Args
from pipeline.lint.base import ERROR, NOTE, Fault, Rule
from pipeline.planner.rules.base import ISSUE
from pipeline.planner.rules.engine import BROKEN_RELEASES

__all__ = ["RULES"]

FIXES = {"unknown": "remove it", "type": "correct the value", "value": "correct the value", "removed": "remove it"}
SUCCESSORS = {
    "torch_compile_config.enable_piecewise_cuda_graph": "prefill_cuda_graph_backend: piecewise",
    "torch_compile_config.capture_num_tokens": "prefill_capture_num_tokens",
    "pytorch_backend_config": "its keys at the top (migrate does it)",
}
"""Path -> what to write instead, where that is more than another name."""


def _refused(kind: str) -> Callable[[Args], Iterator[Fault]]:
    def check(args: Args) -> Iterator[Fault]:
        for problem in args.refused:
            if problem.kind == kind:
                new = SUCCESSORS.get(problem.path, problem.fix)
                fix = f"write {new}" if kind == "renamed" else problem.fix or FIXES[kind]
                yield Fault(args.document.at(problem.path), problem.message, fix)

    return check


def _without_effect(args: Args) -> Iterator[Fault]:
    for problem in notes(args.document.values, args.line):
        new = SUCCESSORS.get(problem.path) or (problem.fix if problem.kind == "renamed" else "")
        yield Fault(args.document.at(problem.path), problem.message, f"write {new}" if new else problem.fix)


def _twice(args: Args) -> Iterator[Fault]:
    for path in args.document.twice:
        yield Fault(args.document.at(path), f"{path} is given twice, and the last one wins")


def _old_release(args: Args) -> Iterator[Fault]:
    version, oldest = args.target.version, known_lines()[0]
    if version and args.target.line < release_order(oldest)[:2]:
        reason = (
            f"TensorRT-LLM {version} is before {oldest}: it has other names, garbled text on H20, spoilt answers with chunked "
            "prefill, and no FP4 on SM120"
        )
        yield Fault(args.document.at(""), reason, f"serve with {oldest} or later")


def _broken_release(args: Args) -> Iterator[Fault]:
    version = args.target.version
    if version in BROKEN_RELEASES and args.deepseek:
        reason = f"TensorRT-LLM {version} crashes with an illegal memory access, or hangs in the warm-up, with DeepSeek-V3"
        yield Fault(args.document.at(""), reason)


RULES: tuple[Rule[Args], ...] = (
    Rule("args/unknown", ERROR, _refused("unknown"), "remove it", f'{LLM_ARGS}: extra="forbid"'),
    Rule("args/renamed", ERROR, _refused("renamed"), "write its name on this line", f"{LLM_ARGS}; `migrate` does it"),
    Rule("args/removed", ERROR, _refused("removed"), "remove it", LLM_ARGS),
    Rule("args/type", ERROR, _refused("type"), "correct the value", LLM_ARGS),
    Rule("args/value", ERROR, _refused("value"), "correct the value", LLM_ARGS),
    Rule("args/without-effect", NOTE, _without_effect, "remove it", LLM_ARGS),
    Rule("args/twice", ERROR, _twice, "keep one", "YAML: keys are unique; PyYAML takes the last"),
    Rule("args/old-release", ERROR, _old_release, "serve with a later release", f"{ISSUE}s 2968, 4037, 5018"),
    Rule("args/broken-release", ERROR, _broken_release, "serve with another release",
         "NVIDIA/TensorRT-LLM releases v1.3.0rc20, known issues"),
)  # fmt: skip
