"""The search: what it may propose, what it recommends and why, what it draws, and a user's own arguments beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.llm_args import render as render_args
from pipeline.engines.trtllm.versions import version_line
from pipeline.models.arch import Arch
from pipeline.planner.case import Case, case_of
from pipeline.planner.choose import choose
from pipeline.planner.compare import compare_file
from pipeline.planner.costed import require_costed
from pipeline.planner.page import page
from pipeline.planner.plan import make_plan
from pipeline.planner.render import render, render_ablation
from pipeline.planner.rules import REFUSE, check
from pipeline.planner.search import Found, search
from pipeline.planner.search.chart import Mark, Series, front_svg
from pipeline.planner.search.choice import pictured
from pipeline.planner.search.front import front
from pipeline.planner.search.score import score
from pipeline.planner.search.space import candidates

ROOT = Path(__file__).resolve().parents[2]
TINY = json.loads((ROOT / "pipeline/data/tiny_r1/config.json").read_text())
R1 = ("+hw=b200", "model=deepseek_r1")
NARROW = ("parallel.ep=8", "parallel.attention_dp=true", "engine.trtllm.mtp=1", "quant=nvfp4_v2")
"""So that a test need not search everything."""


def case(*overrides: str) -> Case:
    config = load([*R1, *overrides])
    return case_of(config, Arch.from_hf(dict(config.model.hf)))


@cache
def found(*overrides: str) -> Found:
    result = search(case(*overrides))
    assert result is not None
    return result


@cache
def report(*overrides: str) -> dict:
    config = load([*R1, *overrides])
    return make_plan(config, dict(config.model.hf)).report


def outcome(*overrides: str) -> str:
    """The warnings of a plan, or the refusal."""
    try:
        return " ".join(report(*overrides)["warnings"])
    except ConfigError as error:
        return str(error)


def test_no_candidate_breaks_a_rule_or_holds_less_than_it_is_asked():
    for item in candidates(case(), 1)[::97]:
        assert item.sequences >= item.setup.max_batch_size
        assert item.gpus <= 8
        assert not [finding for finding in check(item.setup) if finding.level == REFUSE], item


def test_what_the_user_fixes_is_fixed():
    asked = case("parallel=tp8_ep2", "engine.trtllm.mtp=1", "workload.concurrency=32")
    for item in candidates(asked, 1):
        assert str(item.setup.layout) == "TP8+EP2"
        assert (item.setup.mtp, item.concurrency, item.replicas) == (1, 32, 1)


def test_a_pinned_width_means_one_instance_whose_gpus_alone_count():
    best = found("parallel=adp4_ep4", "workload.concurrency=256").best
    assert best.candidate.replicas == 1
    assert best.setup.max_batch_size == 64
    assert best.tokens_per_gpu == pytest.approx(best.prediction.tokens_per_gpu)


def test_nothing_on_the_front_is_beaten_by_anything():
    scored = score(candidates(case(), 1))
    chosen = front(scored)
    times, tokens = scored.predictions.tpot_ms, scored.tokens_per_gpu
    for index in chosen:
        better = (times <= times[index]) & (tokens >= tokens[index]) & ((times < times[index]) | (tokens > tokens[index]))
        assert not better.any()
    assert all(times[a] < times[b] for a, b in pairwise(chosen))


def test_the_recommended_point_keeps_the_limits_and_little_is_lost_by_its_simplicity():
    asked = case("slo.tpot_ms=30", "slo.ttft_ms=20000")
    best = search(asked).best
    assert best.prediction.tpot_ms <= 30
    scored = score(candidates(asked, 1))
    allowed = scored.tokens_per_gpu[scored.meets(asked.config.slo)]
    assert best.tokens_per_gpu >= allowed.max() * 0.94


def test_tighter_limits_cost_throughput():
    speeds = [found(f"slo.tpot_ms={limit}").best.tokens_per_gpu for limit in (8, 15, 30, 60)]
    assert speeds == sorted(speeds)
    assert speeds[0] < speeds[-1] / 4


def test_few_requests_take_attention_tp_and_many_attention_dp():
    assert not found("workload=latency").best.setup.layout.attention_dp
    assert found().best.setup.layout.attention_dp


def test_a_limit_out_of_reach_is_refused_with_the_nearest_point():
    with pytest.raises(ConfigError, match=r"slo\.tpot_ms=1\. Nearest: TP8.*80 %: .*Relax the limits"):
        search(case("slo.tpot_ms=1"))
    with pytest.raises(ConfigError, match=r"slo\.tokens_per_gpu=1e\+06"):
        search(case("slo.tokens_per_gpu=1e6"))
    with pytest.raises(ConfigError, match=r"leave workload\.concurrency open"):
        search(case(*NARROW, "slo.tokens_per_second=1e5", "workload.concurrency=64"))


def test_a_limit_that_only_the_favourable_end_keeps_is_a_warning():
    best = found("workload=latency").best
    limit = (best.prediction.interval[0] + best.prediction.tpot_ms) / 2
    text = " ".join(report("workload=latency", f"slo.tpot_ms={limit:.3f}")["warnings"])
    assert "favourable end" in text


def test_every_choice_says_why():
    result = found("slo.tpot_ms=20")
    assert {reason.name for reason in result.reasons} >= {"attention_dp", "ep", "mtp", "gpus_per_instance", "concurrency"}
    for reason in result.reasons:
        text = reason.text(result.best)
        assert text.endswith(".") and len(text) > 20
    dp = next(reason for reason in result.reasons if reason.name == "attention_dp")
    assert dp.value is True and dp.other is False and "requests at once" in dp.changes


def test_other_precisions_are_those_that_run_here():
    assert set(found().others) == {"nvfp4_v2", "fp8_block"}
    config = load(["+hw=h200", "model=deepseek_r1"])
    on_hopper = search(case_of(config, Arch.from_hf(dict(config.model.hf))))
    assert set(on_hopper.others) == set()


def test_prefill_and_decode_apart_use_no_more_than_the_hardware_has():
    splits = found("hw.num_nodes=2").splits
    assert splits
    for split in splits:
        used = split.counts[0] * split.prefill.world_size + split.counts[1] * split.decode.world_size
        assert used <= 16 and min(split.counts) >= 1


def test_several_instances_are_said_to_be_several_servers():
    warnings = " ".join(report("workload=long_document_32k", "hw.num_nodes=4")["warnings"])
    assert "2 servers" in warnings, warnings


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (("slo.tpot_ms=50", "slo.tokens_per_second=100000"), 100000),
        (("slo.tpot_ms=20", "workload.requests_per_second=40"), 40 * 2048),
        (("slo.tpot_ms=20", "workload.concurrency=1500"), 0),
    ],
)
def test_the_fewest_nodes_that_reach_a_total_are_planned_for(asked, wanted):
    limit, asked = (20 if "slo.tpot_ms=20" in asked else 50), (*NARROW, *asked)
    result = found("hw.num_nodes=null", *asked)
    nodes, best = result.counts.chosen, result.best
    assert nodes > 1 and best.candidate.nodes == nodes and best.candidate.paid == 8 * nodes
    assert best.prediction.tpot_ms <= limit and best.tokens_per_second >= wanted
    for fewer in range(1, nodes):
        said = outcome(f"hw.num_nodes={fewer}", *asked)
        assert f"hw.num_nodes={nodes}" in said and "is predicted to do" in said and asked[-1] in said, said
    assert found(f"hw.num_nodes={nodes + 3}", *asked).counts.chosen == nodes


def test_the_report_counts_the_nodes_and_what_is_deployed_has_the_instances():
    settings = (*NARROW, "hw.num_nodes=4", "slo.tpot_ms=50", "slo.tokens_per_second=130000")
    shown = report(*settings)
    rows = {row["nodes"]: row for row in shown["search"]["nodes"]}
    assert [rows[n]["enough"] for n in (2, 3, 4)] == [False, True, True]
    deploy = shown["deploy"]
    assert deploy["instances"] * deploy["num_devices"] == len(deploy["placement"]) == 24
    assert deploy["nodes"] == shown["predicted"]["nodes"] == 3
    why = next(row["reason"] for row in shown["decisions"] if row["name"] == "nodes")
    assert "the fewest for slo.tpot_ms=50, slo.tokens_per_second=130000: 2 nodes come to" in why and "1 of 4 left free" in why
    text = "\n".join(render(shown))
    assert "not enough" in text and "How many nodes" in page(shown, front=pictured(shown), memory=None)


def test_more_nodes_are_on_the_front_where_they_make_each_user_faster():
    points = found("hw.num_nodes=4", "workload.concurrency=1500", "slo.tpot_ms=40").front
    assert len({point.candidate.nodes for point in points}) > 1
    assert all(point.candidate.concurrency == 1500 for point in points)


def test_an_open_number_of_nodes_needs_a_total_and_engines_of_one_device_take_one():
    with pytest.raises(ConfigError, match=r"hw\.num_nodes=null asks how many.*workload\.requests_per_second"):
        search(case("hw.num_nodes=null"))
    config = load(["+hw=cpu", "model=tiny_r1", "hw.num_nodes=null"])
    assert make_plan(config, TINY).deploy["nodes"] == 1


def test_prefill_and_decode_apart_count_their_own_nodes():
    settings = (*NARROW, "hw.num_nodes=null", "slo.tpot_ms=50", "slo.tokens_per_second=150000")
    shown = report(*settings, "engine.trtllm.serving=disaggregated")
    predicted, deploy = shown["predicted"], shown["deploy"]
    assert predicted["tokens_per_second"] >= 150000 and predicted["tpot_ms"] <= 50
    used = sum(row["count"] * row["num_devices"] for row in deploy["roles"])
    assert deploy["nodes"] == predicted["nodes"] > 1 and used <= 8 * deploy["nodes"]
    fewer = (*NARROW, f"hw.num_nodes={deploy['nodes'] - 1}", *settings[-2:], "engine.trtllm.serving=disaggregated")
    assert "slo.tokens_per_second=150000" in outcome(*fewer)


def test_a_pinned_width_is_repeated_for_a_total_rate():
    best = found("parallel=adp8_ep8", "hw.num_nodes=8", "slo.tpot_ms=50", "slo.tokens_per_second=100000").best
    assert (best.candidate.replicas, best.candidate.nodes, str(best.setup.layout)) == (3, 3, "ADP8+EP8")


def test_where_nothing_fits_the_rules_speak():
    config = load(["+hw=h100", "model=deepseek_r1"])
    with pytest.raises(ConfigError, match=r"does not fit hw=h100.*\n.*num_nodes=2"):
        make_plan(config, dict(config.model.hf))


def test_what_is_emitted_is_what_was_simulated():
    for overrides in ((), ("workload=latency",), ("workload=long_document_32k",), ("quant=fp8_block", "slo.tpot_ms=40")):
        setup = found(*overrides).best.setup
        args = render_args(report(*overrides)["deploy"], version_line(setup.version))
        require_costed(args, setup)
        with pytest.raises(AssertionError, match="max_num_tokens"):
            require_costed(args | {"max_num_tokens": 64}, setup)


def test_the_report_is_the_same_twice_and_the_terms_sum_to_the_token():
    config = load([*R1])
    first, second = (make_plan(config, dict(config.model.hf)) for _ in range(2))
    assert first.report == second.report
    point = first.report["predicted"]
    assert sum(point["terms_us"].values()) / point["tokens_per_step"] == pytest.approx(point["tpot_ms"] * 1e3, rel=1e-2)


def test_the_text_names_the_prediction_and_the_alternatives():
    text = "\n".join(render(report()))
    assert "tokens/s/GPU at" in text and "(80 %:" in text and "fp8_block: ADP8+EP8" in text
    ablation = "\n".join(render_ablation(report()))
    assert "attention data parallelism" in ablation and "multi-token prediction" in ablation


class Tags(HTMLParser):
    """Checks that what is opened is closed, and collects addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network():
    html = page(report(), front=pictured(report()), memory="<svg></svg>")
    tags = Tags()
    tags.feed(html)
    assert tags.open == [] and tags.addresses == []
    assert "<script" not in html
    for text in ("ADP8+EP8", "What each optimisation is worth", "Memory of one rank", "Decisions", "Rules"):
        assert text in html


def test_the_chart_is_xml_with_every_point_and_escapes_names():
    marks = [Mark(10.0, 100.0, "A & B"), Mark(20.0, 50.0, "<C>")]
    root = ElementTree.fromstring(front_svg([Series("x<y", marks)], marks[0], (9.0, 11.0), "a & b"))
    circles = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(circles) == 2 + 1 + 2  # points, the recommended one, the legend
    titles = [node.text for node in root.iter() if node.tag.endswith("title")]
    assert "<C>: 20.0 tokens/s/user, 50 tokens/s/GPU" in titles


RECIPE = """
tp_size: 8
moe_expert_parallel_size: 8
enable_attention_dp: true
kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8}
moe_config: {backend: TRTLLM}
cuda_graph_config: {enable_padding: true, max_batch_size: 256}
speculative_config: {decoding_type: MTP, max_draft_len: 1}
max_batch_size: 128
print_iter_log: true
"""


def test_a_users_file_is_set_beside_the_plan_and_predicted(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    config = load([*R1, "workload.concurrency=1024"])
    found = compare_file(config, config.model.hf, report("workload.concurrency=1024"), file)
    lines = {line.name: line for line in found.arguments}
    assert (lines["moe_config.backend"].ours, lines["moe_config.backend"].theirs) == ("CUTLASS", "TRTLLM")
    assert lines["cuda_graph_config.max_batch_size"].why and not lines["enable_attention_dp"].why
    assert found.theirs.prediction.tpot_ms > 0 and found.theirs.label.startswith("ADP8+EP8")
    assert any("tp_size is now tensor_parallel_size" in text for text in found.renamed)
    assert any("256" in item.text for item in found.findings)
    text = "\n".join(found.lines())
    assert "ours: ADP8+EP8" in text and "theirs: ADP8+EP8" in text
    assert yaml.safe_load(yaml.safe_dump(found.plain()))["renamed"]


BOMB = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
NO_ARGUMENTS = [
    ("[1]", "holds a list"),
    ("a: [", "cannot be read as YAML"),
    ("a: " + "[" * 3000 + "]" * 3000, "more than 40 levels|nesting depth"),
    ("a: &a\n  b: *a\n", "or itself"),
    (BOMB, "more than 50,000 values"),
    ("5: 2", "numbers for keys"),
    ("tensor_parallel_size: eight", "tensor_parallel_size=eight must be a whole number"),
    ("tensor_parallel_size: 8\nmoe_tensor_parallel_size: -3", "moe_tensor_parallel_size=-3"),
    ("max_seq_len: [1]", r"max_seq_len=\[1\] must be a whole number"),
    ("max_batch_size: .inf", "max_batch_size=inf must be a whole number"),
    ("kv_cache_config: {free_gpu_memory_fraction: 9}", "free_gpu_memory_fraction=9 must be a number"),
]


@pytest.mark.parametrize(("text", "sentence"), NO_ARGUMENTS)
def test_a_file_that_is_no_table_is_refused(tmp_path, text, sentence):
    file = tmp_path / "theirs.yaml"
    file.write_text(text, encoding="utf-8")
    config = load([*R1])
    with pytest.raises(ConfigError, match=sentence):
        compare_file(config, config.model.hf, report(), file)
    with pytest.raises(ConfigError, match="cannot be read"):
        compare_file(config, config.model.hf, report(), tmp_path / "absent.yaml")


def test_the_published_recipes_still_decide_where_speed_cannot_be_predicted():
    choice = choose(case("workload=latency"))
    assert str(choice.layout) == "TP8+EP2"
    warnings = report("parallel.tp=4", "parallel.pp=2", "slo.tpot_ms=50")["warnings"]
    assert any("not predicted" in text for text in warnings)


def test_a_report_does_not_depend_on_the_order_of_sets(tmp_path):
    """Terms that differ by nothing tie; the seed of Python's hashes must not choose between them."""
    command = [sys.executable, "-m", "pipeline", "plan", "+hw=h200", "model=deepseek_r1", "quant.accuracy_sensitive=true"]
    reports = set()
    for seed in ("1", "2", "3", "4"):
        root, seeded = tmp_path / seed, os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([*command, f"store.root={root}"], cwd=ROOT, env=seeded, check=True, capture_output=True)
        reports.add((root / "latest/plan/report.json").read_text())
    assert len(reports) == 1
