"""The file of `trtllm-serve disaggregated`: servers for prompts and for tokens, what both must agree on, and their arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeline.lint.args.subject import Args, args_of
from pipeline.lint.base import ERROR, WARNING, Fault, Rule
from pipeline.lint.document import Document
from pipeline.lint.target import Target

__all__ = ["PAIR_RULES", "RULES", "SECTIONS", "Servers", "Sides"]

SECTIONS = {"context_servers": "prefill", "generation_servers": "decode"}
OF_SERVERS = ("num_instances", "urls", "router")
"""Keys of a section that are no LLM arguments."""
OF_FILE = (
    "hostname", "port", "max_retries", "perf_metrics_max_requests", "return_perf_metrics", "perf_metrics_output_dir",
    "conditional_disagg_config", "otlp_config", "disagg_cluster", "node_id", "schedule_style", "allow_request_chat_template",
    "gen_strip_message_history", "gen_tokids_ctxbytes", "num_workers", "disagg_coordinator_url",
)  # fmt: skip
"""Keys of the file that are not passed on to the servers."""
UTILS = "TensorRT-LLM tensorrt_llm/llmapi/disagg_utils.py"
DOCS = "TensorRT-LLM docs features/disagg-serving"
TRANSFER = "cache_transceiver_config"
SHARED = ("kv_cache_config.dtype", "kv_cache_config.tokens_per_block", f"{TRANSFER}.backend")
"""What the cache of both sides must be alike in."""


Sides = Mapping[str, Args]
"""The arguments of context_servers and generation_servers, those that are at hand."""


@dataclass(frozen=True)
class Servers:
    """One file."""

    document: Document
    target: Target

    @cached_property
    def inherited(self) -> dict[str, Any]:
        """LLM arguments at the top, which hold for all servers."""
        return {key: value for key, value in self.document.values.items() if key not in (*SECTIONS, *OF_FILE)}

    @property
    def sections(self) -> list[str]:
        """Those that there are."""
        return [name for name in SECTIONS if isinstance(self.document.values.get(name), dict)]

    @cached_property
    def sides(self) -> dict[str, Args]:
        """Their arguments; a section of addresses alone has none, its servers are started elsewhere."""
        found = {}
        for name in self.sections:
            part = _without(self.document.part(name), OF_SERVERS)
            if part.values:
                lines = {key: line for key, line in self.document.lines.items() if key.partition(".")[0] in self.inherited}
                found[name] = args_of(replace(part, lines=lines | part.lines), self.target, SECTIONS[name], self.inherited)
        return found


def _without(document: Document, keys: tuple[str, ...]) -> Document:
    return replace(document, values={key: value for key, value in document.values.items() if key not in keys})


def _missing(servers: Servers) -> Iterator[Fault]:
    if servers.document.get("disagg_cluster"):
        return
    for name in SECTIONS:
        if name not in servers.sections:
            yield Fault(servers.document.at(name), f"there is no {name}: the file starts no server of that kind")


def _urls(servers: Servers) -> Iterator[Fault]:
    for name in servers.sections:
        urls, wanted = servers.document.get(f"{name}.urls"), servers.document.get(f"{name}.num_instances", 1)
        if isinstance(urls, list) and len(urls) != wanted:
            yield Fault(servers.document.at(f"{name}.urls"), f"{name} has {len(urls)} urls for num_instances {wanted}")


def _url(servers: Servers) -> Iterator[Fault]:
    for name in servers.sections:
        urls = servers.document.get(f"{name}.urls")
        for index, url in enumerate(urls if isinstance(urls, list) else []):
            if not re.fullmatch(r"[^:/\s]+:\d{1,5}", str(url)):
                yield Fault(
                    servers.document.at(f"{name}.urls[{index}]"), f"{url} is not host:port, and is taken apart at its colon"
                )


def _same_url(servers: Servers) -> Iterator[Fault]:
    seen: set[str] = set()
    for name in servers.sections:
        urls = servers.document.get(f"{name}.urls")
        for index, url in enumerate(urls if isinstance(urls, list) else []):
            if str(url) in seen:
                yield Fault(servers.document.at(f"{name}.urls[{index}]"), f"{url} is named twice")
            seen.add(str(url))


def _both_places(servers: Servers) -> Iterator[Fault]:
    for name, args in servers.sides.items():
        for key, value in servers.inherited.items():
            if key in args.document.values and args.document.values[key] != value:
                yield Fault(servers.document.at(f"{name}.{key}"), f"{key} is given at the top and in {name}, with different values")


def _transfer(sides: Sides) -> Iterator[Fault]:
    for name, args in sides.items():
        if not isinstance(args.get(TRANSFER), dict):
            yield Fault(args.at(TRANSFER), f"{name} has no {TRANSFER}: it cannot hand its cache over")


def _both(sides: Sides) -> list[tuple[Args, Args]]:
    """Of prompts and of tokens; nothing where one is missing."""
    return [(sides["context_servers"], sides["generation_servers"])] if len(sides) == len(SECTIONS) else []


def _alike(sides: Sides) -> Iterator[Fault]:
    for prompts, tokens in _both(sides):
        for path in SHARED:
            ours, theirs = prompts.get(path), tokens.get(path)
            if ours != theirs and None not in (ours, theirs):
                yield Fault(tokens.at(path), f"{path} is {ours} of context_servers, {theirs} of generation_servers")


def _drafts(sides: Sides) -> Iterator[Fault]:
    for prompts, tokens in _both(sides):
        if bool(prompts.draft) != bool(tokens.draft):
            name, args = ("context_servers", prompts) if tokens.draft else ("generation_servers", tokens)
            reason = f"{name} has no speculative_config, the other side has: the MTP layer's cache is missing"
            yield Fault(args.at("speculative_config"), reason)


def _overlap(sides: Sides) -> Iterator[Fault]:
    args = sides.get("context_servers")
    if args and not args.get("disable_overlap_scheduler"):
        reason = "context_servers runs the overlap scheduler, which does not support requests that only prefill"
        yield Fault(args.at("disable_overlap_scheduler"), reason)


def _stages(sides: Sides) -> Iterator[Fault]:
    for prompts, tokens in _both(sides):
        if prompts.pp > 1 and tokens.tp > 1 and prompts.numbers == (1, 2):
            reason = f"context_servers with pipeline_parallel_size {prompts.pp} hang before generation_servers with TP in 1.2"
            yield Fault(prompts.at("pipeline_parallel_size"), reason)


def _buffer(sides: Sides) -> Iterator[Fault]:
    path = f"{TRANSFER}.max_tokens_in_buffer"
    for prompts, tokens in _both(sides):
        ours, theirs = prompts.count(path, 0), tokens.count(path, 0)
        if 0 < theirs < ours:
            yield Fault(tokens.at(path), f"max_tokens_in_buffer is {ours} of context_servers, {theirs} of generation_servers")


def _length(sides: Sides) -> Iterator[Fault]:
    for prompts, tokens in _both(sides):
        ours, theirs = prompts.count("max_seq_len", 0), tokens.count("max_seq_len", 0)
        if 0 < theirs < ours:
            reason = f"max_seq_len is {ours} of context_servers, {theirs} of generation_servers: long prompts are refused late"
            yield Fault(tokens.at("max_seq_len"), reason)


def _schedule(servers: Servers) -> Iterator[Fault]:
    style = servers.document.get("schedule_style")
    if style not in (None, "context_first", "generation_first"):
        yield Fault(servers.document.at("schedule_style"), f"schedule_style {style} is neither context_first nor generation_first")


def _node_id(servers: Servers) -> Iterator[Fault]:
    value = servers.document.get("node_id")
    if value is not None and not (isinstance(value, int) and 0 <= value < 256):
        yield Fault(servers.document.at("node_id"), f"node_id {value} is not between 0 and 255")


RULES: tuple[Rule[Servers], ...] = (
    Rule("disagg/section", ERROR, _missing, "add context_servers and generation_servers", UTILS),
    Rule("disagg/urls", ERROR, _urls, "give each instance its url", UTILS),
    Rule("disagg/url", ERROR, _url, "write host:port, without http://", UTILS),
    Rule("disagg/url-twice", ERROR, _same_url, "give each server a port of its own", f"{UTILS}: Duplicated server config"),
    Rule("disagg/both-places", ERROR, _both_places, "give it once", UTILS),
    Rule("disagg/schedule-style", ERROR, _schedule, "write one of them", UTILS),
    Rule("disagg/node-id", ERROR, _node_id, "set 0 to 255", UTILS),
)  # fmt: skip
PAIR_RULES: tuple[Rule[Sides], ...] = (
    Rule("disagg/no-transfer", ERROR, _transfer, "add cache_transceiver_config: {backend: DEFAULT}", DOCS),
    Rule("disagg/alike", ERROR, _alike, "set both to the same value", DOCS),
    Rule("disagg/drafts", WARNING, _drafts, "give both sides the same speculative_config", DOCS),
    Rule("disagg/overlap", WARNING, _overlap, "set disable_overlap_scheduler: true there", DOCS),
    Rule("disagg/stages", ERROR, _stages, "set pipeline_parallel_size: 1", "TensorRT-LLM 1.2 release notes, known issues"),
    Rule("disagg/buffer", WARNING, _buffer, "set both to the longest prompt", DOCS),
    Rule("disagg/length", WARNING, _length, "raise it to that of context_servers", DOCS),
)  # fmt: skip
"""Over the arguments of both sides, wherever they stand."""
