"""Speculative decoding: MTP and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.lint.args.subject import LLM_ARGS, Args
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Rule

__all__ = ["RULES"]

README = "TensorRT-LLM examples/models/core/deepseek_v3/README.md"
SPEC = "speculative_config"
RELAXED = f"{SPEC}.use_relaxed_acceptance_for_thinking"
SCHEDULE = f"{SPEC}.draft_len_schedule"


def _relaxed_adp(args: Args) -> Iterator[Fault]:
    if args.get(RELAXED) and args.adp:
        yield Fault(args.at(RELAXED), "relaxed acceptance and attention DP cannot be enabled at the same time")


def _relaxed_quality(args: Args) -> Iterator[Fault]:
    if args.get(RELAXED):
        yield Fault(args.at(RELAXED), "relaxed acceptance costs accuracy (MMLU-Pro 84.0 to 81.2, GPQA 71 to 69.2) for 9 % speed")


def _relaxed_unused(args: Args) -> Iterator[Fault]:
    for key in ("relaxed_topk", "relaxed_delta"):
        if args.given(f"{SPEC}.{key}") and not args.get(RELAXED):
            yield Fault(args.at(f"{SPEC}.{key}"), f"{key} has no effect without use_relaxed_acceptance_for_thinking")


def _two_lengths(args: Args) -> Iterator[Fault]:
    table = args.document.get(SPEC)
    mtp = isinstance(table, dict) and str(table.get("decoding_type", "")).upper() == "MTP"
    if mtp and table.get("max_draft_len") is not None and table.get("num_nextn_predict_layers") is not None:
        wins = args.line.mtp_key
        yield Fault(
            args.document.at(f"{SPEC}.num_nextn_predict_layers"),
            f"both max_draft_len and num_nextn_predict_layers are given: {wins} wins",
        )


def _schedule(args: Args) -> Iterator[Fault]:
    schedule, most = args.get(SCHEDULE), args.draft
    if args.get(f"{SPEC}.max_concurrency") and schedule:
        yield Fault(args.at(SCHEDULE), "max_concurrency and draft_len_schedule are both given")
    if not isinstance(schedule, dict) or not schedule:
        return
    pairs = sorted((int(key), int(value)) for key, value in schedule.items())
    if pairs[0][0] < 1:
        yield Fault(args.at(SCHEDULE), f"draft_len_schedule has the batch {pairs[0][0]}, below 1")
    if most and max(value for _, value in pairs) > most:
        yield Fault(
            args.at(SCHEDULE), f"draft_len_schedule drafts {max(value for _, value in pairs)} tokens, max_draft_len is {most}"
        )
    elif most and pairs[0][1] != most:
        yield Fault(args.at(SCHEDULE), f"draft_len_schedule begins with {pairs[0][1]} tokens, and must with max_draft_len {most}")


def _schedule_padding(args: Args) -> Iterator[Fault]:
    if args.get(SCHEDULE) and args.given("cuda_graph_config.enable_padding") and not args.get("cuda_graph_config.enable_padding"):
        yield Fault(args.at("cuda_graph_config.enable_padding"), "draft_len_schedule turns enable_padding on")


def _rejection(args: Args) -> Iterator[Fault]:
    if not args.get(f"{SPEC}.use_rejection_sampling"):
        return
    beside = {
        "decoding_type SA": str(args.get(f"{SPEC}.decoding_type")) == "SA",
        "relaxed acceptance": bool(args.get(RELAXED)),
        "context parallelism": args.cp > 1,
        "guided decoding": bool(args.get("guided_decoding_backend")),
    }
    if clash := [name for name, there in beside.items() if there]:
        yield Fault(args.at(f"{SPEC}.use_rejection_sampling"), f"use_rejection_sampling does not go with {', '.join(clash)}")


def _guided(args: Args) -> Iterator[Fault]:
    if args.get("guided_decoding_backend") and args.draft > 1:
        reason = f"guided decoding with {args.draft} drafted tokens can accept tokens that the grammar forbids"
        yield Fault(args.at("guided_decoding_backend"), reason)


def _accuracy(args: Args) -> Iterator[Fault]:
    overlap = not args.get("disable_overlap_scheduler")
    if args.draft and args.adp and args.graphs and overlap and args.numbers <= (1, 0):
        reason = "MTP, attention DP, CUDA graphs and the overlap scheduler together had accuracy issues in this line"
        yield Fault(args.at(SPEC), reason)


def _crash(args: Args) -> Iterator[Fault]:
    if args.draft and args.adp and args.target.version == "1.3.0rc21":
        yield Fault(args.at(SPEC), "MTP with attention DP crashed on GB300 with 1.3.0rc21 (illegal address in a CUDA graph)")


def _many(args: Args) -> Iterator[Fault]:
    if args.draft > 3 and str(args.get(f"{SPEC}.decoding_type")) == "MTP":
        yield Fault(args.at(SPEC), f"{args.draft} drafted tokens: on B200 3 gave the most tokens/s (253; 4 gave 245, 5 gave 239)")


def _autodeploy(args: Args) -> Iterator[Fault]:
    if args.get("backend") == "_autodeploy" and args.values.get(SPEC) and not args.get("disable_overlap_scheduler"):
        yield Fault(args.at(SPEC), "AutoDeploy asserts that the overlap scheduler is off with speculative decoding")


RULES: tuple[Rule[Args], ...] = (
    Rule("args/relaxed-adp", ERROR, _relaxed_adp, "remove one of them", README),
    Rule("args/relaxed-quality", NOTE, _relaxed_quality, "leave it out where accuracy counts", "TensorRT-LLM tech_blog/blog1"),
    Rule("args/relaxed-unused", NOTE, _relaxed_unused, "remove it", f"{LLM_ARGS}: MTPDecodingConfig"),
    Rule("args/two-draft-lengths", WARNING, _two_lengths, "keep the one of this line", f"{LLM_ARGS}: MTPDecodingConfig"),
    Rule("args/draft-schedule", ERROR, _schedule, "let it begin with max_draft_len and fall, without max_concurrency",
         f"{LLM_ARGS}: DecodingBaseConfig"),
    Rule("args/schedule-padding", NOTE, _schedule_padding, "set enable_padding: true", f"{LLM_ARGS}: DecodingBaseConfig"),
    Rule("args/rejection-sampling", ERROR, _rejection, "remove one of them", LLM_ARGS),
    Rule("args/guided-drafts", WARNING, _guided, "draft 1 token, or leave guided decoding out", "NVIDIA/TensorRT-LLM issue 7878"),
    Rule("args/mtp-accuracy", WARNING, _accuracy, "serve with 1.2, or leave one out and check GSM8K", README),
    Rule("args/mtp-crash", WARNING, _crash, "leave one of them out, or use another release", "NVIDIA/TensorRT-LLM issue 17025"),
    Rule("args/many-drafts", NOTE, _many, "draft 3 tokens", "TensorRT-LLM tech_blog/blog1"),
    Rule("args/autodeploy-speculation", ERROR, _autodeploy, "set disable_overlap_scheduler: true, or backend: pytorch",
         "TensorRT-LLM _torch/auto_deploy/shim/ad_executor.py"),
)  # fmt: skip
