"""Workloads as numbers, as conversations and as trace files; reuse of the cache against arithmetic done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.planner.workload import Request, demand_of, hit_rate, read_trace, session_requests
from pipeline.stages.plan import toolchain
from tests.unit.test_plan import plan

R1_B200 = ("+hw=b200", "model=deepseek_r1")
CHAT = load([*R1_B200, "workload=multi_turn_chat"]).workload
ENDLESS = 2**62


def trace(folder: Path, *rows: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_conversations_average_the_prompt_that_is_asked_for():
    requests = session_requests(CHAT, 64)
    assert sum(item.isl for item in requests) / len(requests) == pytest.approx(CHAT.isl, rel=1e-3)
    prompts = [item.isl for item in requests if item.session == "1-0"]
    words = (4096 - 1024 - 3.5 * 512) / 4.5
    assert prompts == [round(1024 + turn * words + (turn - 1) * 512) for turn in range(1, 9)]


def test_an_endless_cache_finds_every_earlier_turn():
    """Turn k brings back the system prompt and k - 1 turns; the floor to blocks of 32 loses half a block a request."""
    words = (4096 - 1024 - 3.5 * 512) / 4.5
    by_hand = sum(1024 + k * (words + 512) for k in range(8)) / (8 * 4096)
    demand = demand_of(CHAT)
    found = hit_rate(demand.requests, ENDLESS, 32, warm=demand.warm)
    assert by_hand - 16 / 4096 - 0.005 < found < by_hand


def test_a_cache_that_is_too_small_keeps_only_the_system_prompt():
    demand = demand_of(CHAT)
    assert hit_rate(demand.requests, 20_000, 32, warm=demand.warm) == pytest.approx(1024 / 4096, abs=0.02)
    rates = [hit_rate(demand.requests, tokens, 32, warm=demand.warm) for tokens in (10**6, 3 * 10**6, 5 * 10**6)]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_requests_that_go_round_the_ranks_lose_their_cache():
    demand = demand_of(CHAT)
    kept, lost = (
        hit_rate(demand.requests, ENDLESS, 32, ranks=8, by_session=way, warm=demand.warm) for way in (True, False)
    )
    assert kept > 0.9 and 0.25 < lost < 0.6


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([(0, 64, 32, "a"), (1, 128, 32, "a")], 96 / 192),  # prompt and answer of the first turn: 96 tokens
        ([(0, 64, 32, "a"), (1, 128, 32, "b")], 0.0),
        ([(0, 100, 10, "a"), (1, 200, 10, "a")], 96 / 300),  # 110 tokens are three whole blocks
        ([(0, 64, 32, "a"), (1, 64, 32, "a")], 32 / 128),  # the last token of a prompt is always computed
    ],
)
def test_hits_are_whole_blocks_of_the_same_conversation(rows, found):
    assert hit_rate([Request(*row) for row in rows], ENDLESS, 32) == pytest.approx(found)


def test_the_least_recently_used_conversation_goes_first():
    rows = [Request(0, 64, 0, "a"), Request(1, 64, 0, "b"), Request(2, 64, 0, "a"), Request(3, 64, 0, "c"), Request(4, 96, 0, "a")]
    assert hit_rate(rows, 128, 32) == pytest.approx((32 + 64) / (4 * 64 + 96))
    assert hit_rate([*rows, Request(5, 96, 0, "b")], 128, 32) == pytest.approx((32 + 64) / (4 * 64 + 2 * 96))


def test_a_trace_gives_lengths_peak_and_conversations(tmp_path):
    file = trace(
        tmp_path, {"arrival": 2.0, "isl": 300, "osl": 100, "session": 1}, {"arrival": 0, "isl": 100, "osl": 50, "session": 1}, "\n",
        {"arrival": 1, "isl": 200, "osl": 20},
    )  # fmt: skip
    assert [item.arrival for item in read_trace(file)] == [0, 1, 2]
    demand = demand_of(load([*R1_B200, "workload=custom_trace", f"workload.trace={file}"]).workload, tpot_ms=50)
    assert (demand.isl, demand.osl, demand.longest_prompt, demand.longest) == (200, 57, 300, 400)
    assert demand.concurrency == 2  # 0 to 2.5 s, 1 to 2 s, from 2 s on
    assert hit_rate(demand.requests, ENDLESS, 32) == pytest.approx(128 / 600)


def test_a_request_whose_end_is_lost_in_rounding_is_still_one(tmp_path):
    file = trace(tmp_path, {"arrival": 1e300, "isl": 300, "osl": 100})
    assert demand_of(load([*R1_B200, "workload=custom_trace", f"workload.trace={file}"]).workload).concurrency == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("not json\n", "line 2 is no JSON"),
        ("[" * 5000, "line 2 is no JSON"),
        ('{"isl": ' + "1" * 5000, "line 2 is no JSON"),
        ([1, 2], "line 2 is no JSON object"),
        ({"arrival": 0, "isl": 0, "osl": 1}, "isl=0 must be a whole number"),
        ({"arrival": 0, "isl": 1.5, "osl": 1}, "isl=1.5"),
        ({"arrival": -1, "isl": 1, "osl": 1}, "arrival=-1"),
        ({"arrival": 0, "isl": 1}, "osl=None"),
        ({"arrival": 0, "isl": 1, "osl": 1, "sesion": "a"}, "sesion, which is not known"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, words):
    with pytest.raises(ConfigError, match=words):
        read_trace(trace(tmp_path, {"arrival": 0, "isl": 1, "osl": 1}, row))


def test_an_empty_or_missing_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(trace(tmp_path, "\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        plan(*R1_B200, "workload=custom_trace", f"workload.trace={tmp_path / 'none.jsonl'}")


def test_turns_that_do_not_fit_the_mean_prompt_are_refused():
    with pytest.raises(ConfigError, match=r"raise workload\.isl"):
        plan(*R1_B200, "workload=multi_turn_chat", "workload.isl=2000")


def test_the_plan_holds_the_longest_request_and_says_what_reuse_saves():
    found = plan(*R1_B200, "workload=multi_turn_chat")
    reuse = found.report["reuse"]
    assert found.deploy["max_num_tokens"] > CHAT.isl and found.deploy["max_seq_len"] >= reuse["conversation_tokens"]
    assert 0 < reuse["prefill_ms"]["with"] < reuse["prefill_ms"]["without"] / 2
    per_token = reuse["conversation_bytes"] // reuse["conversation_tokens"]
    assert reuse["shared_prefix_bytes"] == (found.deploy["max_batch_size"] - 1) * 1024 * per_token
    assert reuse["computed_tokens"] < CHAT.isl / 5 and reuse["this_cache"] <= reuse["endless_cache"]
    assert any("route by conversation" in text for text in found.report["warnings"])
    assert plan(*R1_B200).report["reuse"] is None


def test_a_small_cache_is_said_to_forget():
    warnings = plan("+hw=h20", "model=deepseek_r1", "workload=multi_turn_chat", "workload.concurrency=8").report["warnings"]
    assert any("The cache forgets" in text for text in warnings)


def test_chunks_are_searched_where_the_workload_leaves_them_open():
    asked = (*R1_B200, "workload.isl=130000", "workload.osl=2000", "engine.trtllm.mtp=1", "parallel.attention_dp=true")
    opened, whole = plan(*asked), plan(*asked, "workload.chunked_prefill=false")
    assert opened.deploy["chunked_prefill"] and not whole.deploy["chunked_prefill"]
    assert opened.deploy["max_num_tokens"] <= 8192 < 130_000 < whole.deploy["max_num_tokens"]
    speeds = [found.report["predicted"]["tokens_per_gpu"] for found in (opened, whole)]
    assert speeds[0] > speeds[1], "a step for the whole prompt takes memory that the cache then lacks"
    why = next(row["reason"] for row in opened.report["decisions"] if row["name"] == "chunked_prefill")
    assert "over False" in why


def test_chunked_prefill_bounds_the_step_not_the_prompt():
    deploy = plan(*R1_B200, "workload=long_document_32k").deploy
    assert deploy["chunked_prefill"] and deploy["max_num_tokens"] < 10_000 < deploy["max_seq_len"]
    whole = plan(*R1_B200, "workload=long_document_32k", "workload.chunked_prefill=false").deploy
    assert whole["max_num_tokens"] > 32_768 and not whole["chunked_prefill"]


def test_another_trace_is_another_key(tmp_path):
    file = trace(tmp_path, {"arrival": 0, "isl": 1, "osl": 1})
    config = load([*R1_B200, "workload=custom_trace", f"workload.trace={file}"])
    first = toolchain(config)
    trace(tmp_path, {"arrival": 0, "isl": 2, "osl": 1})
    assert first and toolchain(config) != first
    assert "workload.trace" in first and "workload.trace" not in toolchain(load(list(R1_B200)))
