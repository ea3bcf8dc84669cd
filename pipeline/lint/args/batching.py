"""Requests and tokens of a step, and the CUDA graphs that are captured for them. All limits are those of one rank."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.lint.args.subject import LLM_ARGS, Args
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Rule
from pipeline.planner.rules.base import ISSUE, PULL

__all__ = ["RULES"]

SIZES, LARGEST = "cuda_graph_config.batch_sizes", "cuda_graph_config.max_batch_size"
PIECEWISE = "torch_compile_config.enable_piecewise_cuda_graph"
MANY_GRAPHS = 64


def _sizes(args: Args) -> list[int]:
    found = args.get(SIZES)
    return [size for size in found if isinstance(size, int)] if isinstance(found, list) else []


def _mismatch(args: Args) -> Iterator[Fault]:
    sizes, largest = _sizes(args), args.count(LARGEST, 0)
    if sizes and largest and largest != max(sizes):
        yield Fault(args.at(LARGEST), f"cuda_graph_config.max_batch_size {largest} is not the largest of batch_sizes, {max(sizes)}")


def _listed_above(args: Args) -> Iterator[Fault]:
    most = args.batch
    above = [size for size in _sizes(args) if size > most]
    if above and args.get("backend") != "_autodeploy":
        listed = ", ".join(map(str, above[:5]))
        reason = f"graphs for {listed} requests cannot run with max_batch_size {most}; some releases pad into them"
        yield Fault(args.at(SIZES), reason, f"remove sizes above {most}")


def _autodeploy_above(args: Args) -> Iterator[Fault]:
    most, largest = args.batch, max(_sizes(args), default=args.count(LARGEST, 0))
    if args.get("backend") == "_autodeploy" and largest > most:
        reason = (
            f"graphs for {largest} requests with max_batch_size {most}: AutoDeploy fails with 'Data too large for buffer cu_seqlen'"
        )
        yield Fault(args.at(SIZES if _sizes(args) else LARGEST), reason)


def _above(args: Args) -> Iterator[Fault]:
    most, largest = args.batch, args.count(LARGEST, 0)
    if not _sizes(args) and largest > most and args.get("backend") != "_autodeploy":
        yield Fault(
            args.at(LARGEST), f"graphs up to {largest} requests, but max_batch_size is {most} a rank: larger ones are dropped"
        )


def _many(args: Args) -> Iterator[Fault]:
    if len(_sizes(args)) > MANY_GRAPHS:
        yield Fault(
            args.at(SIZES), f"{len(_sizes(args))} CUDA graphs: each takes memory and start-up time; 128 ran out of it on H200"
        )


def _batch_tokens(args: Args) -> Iterator[Fault]:
    batch, tokens = args.batch, args.tokens
    if args.given("max_batch_size") and batch > tokens:
        yield Fault(args.at("max_batch_size"), f"max_batch_size {batch} exceeds max_num_tokens {tokens}: a full batch never runs")


def _draft_tokens(args: Args) -> Iterator[Fault]:
    batch, tokens = args.batch, args.tokens
    wanted = batch * (1 + args.draft)
    if args.given("max_batch_size") and args.draft and batch <= tokens < wanted:
        reason = f"max_num_tokens {tokens} is below max_batch_size x (1 + drafts) = {wanted}: a full batch never runs"
        yield Fault(args.at("max_num_tokens"), reason)


def _prefill_graph(args: Args) -> Iterator[Fault]:
    backend = args.get("prefill_cuda_graph_backend")
    if backend == "breakable":
        for key in ("torch_compile_config", "enable_lora", "lora_config"):
            if args.get(key):
                yield Fault(args.at("prefill_cuda_graph_backend"), f"breakable graphs of the prefill do not go with {key}")
    if backend in ("piecewise", "breakable") and args.document.get(PIECEWISE):
        place = args.document.at(PIECEWISE)
        yield Fault(place, f"both {PIECEWISE} and prefill_cuda_graph_backend {backend} are set")


def _capture(args: Args) -> Iterator[Fault]:
    if args.get("prefill_capture_num_tokens") and args.get("prefill_cuda_graph_backend") in (None, "disabled"):
        yield Fault(
            args.at("prefill_capture_num_tokens"), "prefill_capture_num_tokens has no effect without prefill_cuda_graph_backend"
        )


def _specialised(args: Args) -> Iterator[Fault]:
    if args.get("lora_config.cuda_graph_specialize_lora") and args.adp:
        place = args.at("lora_config.cuda_graph_specialize_lora")
        yield Fault(place, "graphs that are specialised for LoRA do not go with attention DP")


RULES: tuple[Rule[Args], ...] = (
    Rule("args/graph-sizes", ERROR, _mismatch, "leave max_batch_size out", f"{LLM_ARGS}: CudaGraphConfig"),
    Rule("args/graphs-listed-above", WARNING, _listed_above, "remove them", "SemiAnalysisAI/InferenceX pull request 2596"),
    Rule("args/graphs-above-autodeploy", ERROR, _autodeploy_above, "list sizes up to max_batch_size",
         f"{ISSUE} 10688; {PULL} 10687"),
    Rule("args/graphs-above", NOTE, _above, "set it to max_batch_size", "TensorRT-LLM model_engine.py"),
    Rule("args/many-graphs", WARNING, _many, "list fewer, and set enable_padding: true", f"{ISSUE} 3486"),
    Rule("args/batch-tokens", WARNING, _batch_tokens, "raise max_num_tokens", LLM_ARGS),
    Rule("args/draft-tokens", WARNING, _draft_tokens, "raise it, or lower max_batch_size", LLM_ARGS),
    Rule("args/prefill-graph", ERROR, _prefill_graph, "choose one of them", LLM_ARGS),
    Rule("args/prefill-capture", NOTE, _capture, "set prefill_cuda_graph_backend: piecewise", LLM_ARGS),
    Rule("args/lora-graphs-adp", ERROR, _specialised, "set cuda_graph_specialize_lora: false", LLM_ARGS),
)  # fmt: skip
