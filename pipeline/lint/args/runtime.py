"""Which backend runs the model, and switches that need another one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.engines.trtllm.versions import last_with_tensorrt
from pipeline.lint.args.subject import LLM_ARGS, Args
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Rule
from pipeline.planner.rules.base import ISSUE

__all__ = ["RULES"]

REMOVAL = "TensorRT-LLM docs/source/legacy/tensorrt-backend-removal.md; release notes of 1.3.0rc20"


def _tensorrt(args: Args) -> Iterator[Fault]:
    """Refused from 1.3.0rc21 on; before, there is no way from a DeepSeek checkpoint to an engine."""
    if str(args.document.get("backend", "")).lower() in ("tensorrt", "trt"):
        gone = args.target.without_tensorrt or (not args.target.version and args.line.tensorrt_backend == "never")
        if not gone and not args.deepseek:
            return
        reason = (
            f"backend tensorrt is gone: {last_with_tensorrt()} was the last release with it"
            if gone
            else "backend tensorrt has no way from a MoE checkpoint of DeepSeek's kind to an engine (no convert_checkpoint.py)"
        )
        yield Fault(args.document.at("backend"), reason)


def _autodeploy(args: Args) -> Iterator[Fault]:
    if args.document.get("backend") == "_autodeploy" and args.deepseek:
        yield Fault(args.document.at("backend"), "AutoDeploy ends in a CUDA error with DeepSeek-R1")


def _engine(args: Args) -> Iterator[Fault]:
    """Answers to what people look for in vain."""
    for key in ("build_config", "engine_dir"):
        if key in args.document.values:
            yield Fault(
                args.document.at(key),
                f"{key} is of the TensorRT backend: the PyTorch backend loads checkpoints, and builds no engine",
            )


def _ray(args: Args) -> Iterator[Fault]:
    for key in (key for key in args.values if key.startswith("ray_")):
        if args.get("orchestrator_type") != "ray" and args.get(key) is not None:
            yield Fault(args.at(key), f"{key} needs orchestrator_type: ray")


def _cute(args: Args) -> Iterator[Fault]:
    for key in ("use_cute_dsl_bf16_bmm", "use_cute_dsl_bf16_gemm"):
        if args.get(key) and args.target.sm is not None and args.target.sm < 100:
            yield Fault(args.at(key), f"{key} has kernels for SM100 and later, hw= is SM{args.target.sm}")


def _min_latency(args: Args) -> Iterator[Fault]:
    named = str(args.get("model") or "") + (args.target.config.model.name if args.target.config else "")
    if args.get("enable_min_latency") and re.search(r"deepseek|r1|kimi", named, re.IGNORECASE):
        yield Fault(args.at("enable_min_latency"), "enable_min_latency is for Llama 4 only")


def _remote_code(args: Args) -> Iterator[Fault]:
    named = str(args.get("model") or "")
    if args.get("trust_remote_code") and re.search(r"deepseek-(r1|v3)", named, re.IGNORECASE):
        yield Fault(args.at("trust_remote_code"), "trust_remote_code is not needed: TensorRT-LLM has this architecture itself")


RULES: tuple[Rule[Args], ...] = (
    Rule("args/tensorrt-backend", ERROR, _tensorrt, "set backend: pytorch, or leave it out", f"{REMOVAL}; {ISSUE} 9981"),
    Rule("args/autodeploy", WARNING, _autodeploy, "set backend: pytorch", f"{ISSUE}s 9565, 12949"),
    Rule("args/engine-of-tensorrt", ERROR, _engine, "remove it", REMOVAL),
    Rule("args/ray", ERROR, _ray, "set orchestrator_type: ray, or remove it", LLM_ARGS),
    Rule("args/cute-dsl", ERROR, _cute, "remove it", LLM_ARGS),
    Rule("args/min-latency", WARNING, _min_latency, "remove it", LLM_ARGS),
    Rule("args/remote-code", NOTE, _remote_code, "remove it", "TensorRT-LLM modeling_deepseekv3.py"),
)  # fmt: skip
