"""Prefill and decode apart, and the settings of engine.trtllm, from the plan to the files of the bundle."""

from __future__ import annotations

import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load
from pipeline.core.errors import ConfigError, StageError
from pipeline.core.jsonio import read_json, write_json
from pipeline.core.stage import StageContext
from pipeline.engines import trtllm
from pipeline.engines.trtllm import build as trtllm_build
from pipeline.engines.trtllm.llm_args import render
from pipeline.engines.trtllm.roles import roles_of
from pipeline.engines.trtllm.versions import known_lines, version_line
from pipeline.lint.report import lint
from pipeline.lint.target import Target
from pipeline.models.arch import Arch
from pipeline.planner.case import case_of
from pipeline.planner.costed import COSTED
from pipeline.planner.deploy import instance_row
from pipeline.planner.llm_args_file import read_llm_args
from pipeline.planner.plan import Plan, make_plan
from pipeline.planner.setup import Layout, Setup
from tests._utils.trtllm import RECIPES, Notes

R1_B200 = ("+hw=b200", "model=deepseek_r1")
FIXED = (*R1_B200, "parallel=adp8_ep8")
"""What the search finds for it, without the search."""
APART = (*R1_B200, "engine.trtllm.serving=disaggregated", "hw.num_nodes=2")


@cache
def plan_of(*overrides: str) -> Plan:
    config = load(list(overrides))
    return make_plan(config, config.model.hf)


def args_of(*overrides: str, line: str = "1.2") -> list[dict[str, Any]]:
    return [render(role, version_line(line)) for role in roles_of(plan_of(*overrides).deploy)]


def built(folder: Path, *overrides: str) -> StageContext:
    """The engine stage over a stand-in for convert's files."""
    plan, convert, out = folder / "plan", folder / "convert", folder / "out"
    for path in (plan, convert, out):
        path.mkdir(parents=True)
    (convert / "hf_quant_config.json").write_text("{}")
    write_json(plan / "deploy.json", plan_of(*overrides).deploy)
    inputs = {"plan": plan, "convert": convert}
    ctx = StageContext(config=load(list(overrides)), inputs=inputs, checkpoint=None, out=out, progress=Notes())
    trtllm_build.build(ctx)
    return ctx


class TestApart:
    def test_both_sides_are_what_was_predicted(self):
        """make_plan reads each side's arguments back and compares them with what was simulated."""
        plan = plan_of(*APART)
        context, generation = roles_of(plan.deploy)
        gpus = sum(role["count"] * role["num_devices"] for role in (context, generation))
        assert (context["role"], generation["role"]) == ("context", "generation") and 8 < gpus <= 16
        assert plan.report["predicted"]["layout"] == plan.report["layout"]
        assert f"{context['count']}P x " in plan.report["layout"] and f"{generation['count']}D x " in plan.report["layout"]
        best = max(row["tokens_per_gpu"] for row in plan.report["search"]["disaggregated"])
        assert plan.report["predicted"]["tokens_per_gpu"] == pytest.approx(best, rel=1e-3)

    def test_each_side_has_arguments_of_its_own(self):
        context, generation = args_of(*APART)
        assert context["cuda_graph_config"] is None and context["disable_overlap_scheduler"] is True
        assert generation["cuda_graph_config"]["max_batch_size"] == generation["max_batch_size"] > context["max_batch_size"]
        assert context["max_num_tokens"] > generation["max_num_tokens"] >= generation["max_batch_size"]
        buffers = {"backend": "DEFAULT", "max_tokens_in_buffer": 1024, "kv_transfer_timeout_ms": 60000}
        assert context["cache_transceiver_config"] == generation["cache_transceiver_config"] == buffers
        shared = ("kv_cache_config", "speculative_config", "max_seq_len")
        assert {name: context.get(name) for name in shared} == {name: generation.get(name) for name in shared}

    @pytest.mark.parametrize("line", known_lines())
    def test_every_line_takes_them(self, line):
        for args in args_of(*APART, "engine.trtllm.transfer=UCX", line=line):
            assert args["cache_transceiver_config"]["backend"] == ("ucx" if line == "1.0" else "UCX")

    def test_counts_can_be_given(self):
        deploy = plan_of(*APART, "engine.trtllm.context_instances=2", "engine.trtllm.generation_instances=1").deploy
        assert [role["count"] for role in roles_of(deploy)] == [2, 1]

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (("hw.num_nodes=1", "engine.trtllm.context_instances=9"), "8 GPUs do not hold engine.trtllm.context_instances=9"),
            (("hw.num_nodes=1", "quant=bf16"), "takes two instances, and the smallest .* hw.num_nodes="),
            (("parallel.pp=2",), "has no prediction"),
            (("slo.tpot_ms=1",), "No configuration|No split"),
        ],
    )
    def test_what_cannot_be_split_is_refused(self, more, said):
        with pytest.raises(ConfigError, match=said):
            plan_of(*APART, *more)

    def test_the_bundle_lists_instances_and_the_servers_file(self, tmp_path):
        ctx = built(tmp_path, *APART)
        engine, servers = read_json(ctx.out / "engine.json"), yaml.safe_load((ctx.out / "disaggregated.yaml").read_text())
        assert not (ctx.out / "llm_args.yaml").exists()
        for row, section in zip(engine["instances"], ("context_servers", "generation_servers"), strict=True):
            args = yaml.safe_load((ctx.out / row["llm_args"]).read_text())
            assert row["gpus_per_instance"] == row["tp"] * row["pp"] == args["tensor_parallel_size"]
            assert servers[section].items() <= {**args, "num_instances": row["count"]}.items()
        assert engine["serving"] == "disaggregated" and engine["quantization"] == "hf_quant_config.json"
        assert engine["num_devices"] == sum(row["count"] * row["gpus_per_instance"] for row in engine["instances"])

    def test_lint_finds_nothing_wrong_with_it(self, tmp_path):
        ctx = built(tmp_path, *APART)
        written = sorted(ctx.out.rglob("*.yaml"))
        report = lint(written, Target(version="1.2", config=ctx.config, load=True))
        assert len(report.linted) == 3 and {finding.level for finding in report.findings} <= {"note"}, list(report.lines())
        together = ctx.out / "llm_args.yaml"  # a server that does both must take a prompt in one step
        together.write_text((ctx.out / "instances" / "generation" / "llm_args.yaml").read_text())
        assert "cannot take a prompt" in "\n".join(lint([together], Target(version="1.2", config=ctx.config, load=True)).lines())

    def test_alike_instances_have_one_row(self, tmp_path):
        assert plan_of(*R1_B200).report["layout"] == plan_of(*FIXED).report["layout"]
        ctx = built(tmp_path, *R1_B200)
        assert read_json(ctx.out / "engine.json")["instances"] == [
            {"role": "aggregated", "count": 1, "tp": 8, "pp": 1, "gpus_per_instance": 8, "llm_args": "llm_args.yaml"}
        ]
        assert (ctx.out / "llm_args.yaml").is_file() and not (ctx.out / "disaggregated.yaml").exists()


class TestSettings:
    @pytest.mark.parametrize(
        ("setting", "path", "value"),
        [
            ("engine.trtllm.block_reuse=false", "kv_cache_config.enable_block_reuse", False),
            ("engine.trtllm.cuda_graphs=false", "cuda_graph_config", None),
            ("engine.trtllm.attention_dp_balance=false", "attention_dp_config", None),
            ("engine.trtllm.expert_slots=288", "moe_config.load_balancer", {"num_slots": 288, "layer_updates_per_iter": 0}),
            ("workload.chunked_prefill=true", "enable_chunked_prefill", True),
            ("engine.trtllm.mtp=2", "speculative_config.num_nextn_predict_layers", 2),
            ("+engine.trtllm.args.print_iter_log=true", "print_iter_log", True),
            ("+engine.trtllm.args.kv_cache_config.host_cache_size=1000", "kv_cache_config.host_cache_size", 1000),
            ("+engine.trtllm.args.stream_interval=4", "stream_interval", 4),
            ("+engine.trtllm.args.attention_dp_config.timeout_iters=5", "attention_dp_config.timeout_iters", 5),
            ("+engine.trtllm.args.attention_dp_config.timeout_iters=5", "attention_dp_config.enable_balance", True),
        ],
    )
    def test_reaches_the_engine(self, setting, path, value):
        (found,) = args_of(*FIXED, setting)
        for part in path.split("."):
            found = (found or {}).get(part)
        assert found == value

    def test_more_places_for_experts_cost_memory(self):
        held = [
            next(row["bytes"] for row in plan_of(*FIXED, *more).report["memory"]["rows"] if row["component"] == "routed_experts")
            for more in ((), ("engine.trtllm.expert_slots=288",))
        ]
        assert held[1] / held[0] == pytest.approx(288 / 256, rel=1e-6)

    @pytest.mark.parametrize(
        ("setting", "said"),
        [
            ("+engine.trtllm.args.max_seq_len=9000", "makes max_seq_len 9000, and the plan is for .* set workload.isl and"),
            ("+engine.trtllm.args.kv_cache_config.dtype=nvfp4", "makes kv_format nvfp4, .* for fp8: .* set quant.kv_dtype"),
            ("+engine.trtllm.args.max_batch_size=4", "cuda_graph_config.max_batch_size .* exceeds max_batch_size 4"),
            ("+engine.trtllm.args.disable_overlap_scheduler=true", "makes overlap false, .* there is no prediction for it"),
            ("+engine.trtllm.args.moe_config.load_balancer={num_slots: 288}", "set engine.trtllm.expert_slots for another"),
            ("+engine.trtllm.args.context_parallel_size=2", "context_parallel_size is decided by parallel"),
            ("+engine.trtllm.args.print_iter=1", "did you mean print_iter_log"),
            ("+engine.trtllm.args.sleep_config={}", "not an argument of 1.2, but of 1.3"),
            ("engine.trtllm.backend=_autodeploy", "choose one of pytorch, tensorrt"),
            ("engine.trtllm.backend=tensorrt", "no script converts a DeepSeek-R1 checkpoint"),
        ],
    )
    def test_what_cannot_be_is_refused_by_the_plan(self, setting, said):
        with pytest.raises(ConfigError, match=said):
            plan_of(*FIXED, setting)

    def test_what_predictions_do_not_know_is_told(self):
        more = "+engine.trtllm.args={max_beam_width: 2, print_iter_log: true, kv_cache_config: {max_tokens: 1000}}"
        said = "engine.trtllm.args: max_beam_width, kv_cache_config.max_tokens are handed on as given"
        assert [note for note in plan_of(*FIXED, more).report["warnings"] if note.startswith(said)]
        assert not [note for note in plan_of(*FIXED).report["warnings"] if "engine.trtllm.args" in note]

    def test_places_for_experts_divide_over_the_ranks(self):
        with pytest.raises(ConfigError, match="290"):
            plan_of(*FIXED, "engine.trtllm.expert_slots=290")

    @pytest.mark.parametrize(
        ("version", "said"),
        [
            ("1.2.1", "1.2.1 has it, for engines of trtllm-build"),
            ("1.3.0rc20", "1.3.0rc20 has it"),
            ("1.3.0rc22", "1.3.0rc22 has none: it is gone after 1.3.0rc20"),
            ("1.3", "gone after 1.3.0rc20"),
            ("1.4.0rc1", "is gone"),
        ],
    )
    def test_the_tensorrt_backend_by_release(self, version, said):
        with pytest.raises(ConfigError, match=said):
            load([*R1_B200, "engine.trtllm.backend=tensorrt", f"engine.trtllm.version={version}"])

    def test_rules_judge_the_users_own_arguments(self):
        more = "+engine.trtllm.args={speculative_config: {use_relaxed_acceptance_for_thinking: true}}"
        with pytest.raises(ConfigError, match="attention DP cannot be enabled at the same time"):
            plan_of(*FIXED, "engine.trtllm.mtp=1", more)


class TestWithTheEngineHere:
    """With a double of tensorrt_llm.llmapi.llm_args: that each role's file is put before TorchLlmArgs, and what it says is told."""

    @pytest.fixture
    def judged(self, monkeypatch) -> list[dict[str, Any]]:
        """The arguments of each call; those with print_iter_log are refused."""
        calls: list[dict[str, Any]] = []

        def torch_llm_args(**args):
            calls.append(args)
            if args.get("print_iter_log"):
                raise ValueError("1 validation error for TorchLlmArgs: print_iter_log")

        double = types.ModuleType("tensorrt_llm.llmapi.llm_args")
        double.TorchLlmArgs = torch_llm_args
        for name in ("tensorrt_llm", "tensorrt_llm.llmapi"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, double.__name__, double)
        for module in (trtllm, trtllm_build):
            monkeypatch.setattr(module, "installed_version", lambda: "1.2.1")
        return calls

    def test_it_judges_every_role(self, judged, tmp_path):
        ctx = built(tmp_path, *APART)
        files = [yaml.safe_load((ctx.out / row["llm_args"]).read_text()) for row in read_json(ctx.out / "engine.json")["instances"]]
        assert judged == [{"model": str(ctx.out / "checkpoint"), **args} for args in files]
        engine = read_json(ctx.out / "engine.json")
        assert engine["validated_by_engine"] and engine["not_run"].startswith("Validated by TensorRT-LLM's TorchLlmArgs")

    def test_what_it_refuses_is_the_stages_error(self, judged, tmp_path):
        with pytest.raises(StageError, match=r"TensorRT-LLM 1\.2\.1 refuses the arguments: 1 validation error for TorchLlmArgs"):
            built(tmp_path, *FIXED, "+engine.trtllm.args.print_iter_log=true")

    def test_another_line_is_not_asked(self, judged, tmp_path):
        ctx = built(tmp_path, *FIXED, "engine.trtllm.version=1.3")
        assert judged == [] and "tensorrt_llm of that line is not installed" in read_json(ctx.out / "engine.json")["not_run"]


def flat(args, prefix=""):
    """{dotted argument: value}."""
    nested = {key: value for key, value in args.items() if isinstance(value, dict) and value}
    rows = {f"{prefix}{key}": value for key, value in args.items() if key not in nested}
    return rows | {name: row for key, value in nested.items() for name, row in flat(value, f"{prefix}{key}.").items()}


NOT_CHOSEN = ("print_iter_log", "trust_remote_code", "relaxed_", "max_tokens_in_buffer")
"""What the plan has no opinion on, and the user adds."""


ALIKE = {
    "backend": lambda recipe, _: recipe["backend"] == "pytorch",  # the default
    "cuda_graph_config.max_batch_size": lambda recipe, written: (
        # the engine lowers it to the batch
        recipe["cuda_graph_config"]["max_batch_size"] > written["cuda_graph_config"]["max_batch_size"] == written["max_batch_size"]
    ),
    "kv_cache_free_gpu_memory_fraction": lambda recipe, written: (
        # the published file's mistake: no version takes it
        written["kv_cache_config"]["free_gpu_memory_fraction"] == recipe["kv_cache_free_gpu_memory_fraction"]
    ),
}
"""Arguments that are written otherwise than in the recipe, and mean the same."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_out_of_our_model_as_it_went_in(name):
    """NVIDIA's file, read as a setup, written as our arguments: the same arguments and, read again, the same instance."""
    recipe = RECIPES[name]
    line = version_line("1.3" if "max_draft_len" in recipe.get("speculative_config", {}) else "1.2")
    own = [
        f"++engine.trtllm.args.{key}={value}"
        for key, value in flat(recipe).items()
        if any(part in key for part in NOT_CHOSEN)
    ]  # fmt: skip
    config = load([*R1_B200, f"engine.trtllm.version={line.line}", *own])
    case = case_of(config, Arch.from_hf(config.model.hf))
    base = Setup(arch=case.arch, hw=case.hw, formats=case.formats, layout=Layout(8, 8, True), version=line.line)
    first = read_llm_args(recipe, base).setup
    row = instance_row(config.engine.trtllm, first, recipe.get("stream_interval", 1), 1024)
    written = render({**row, "max_seq_len": row["max_seq_len"] or 4096, "args": config.engine.trtllm.args}, line)
    again = read_llm_args(written, base).setup
    same = [item for item in COSTED if item != "max_seq_len" or first.max_seq_len]
    assert {item: getattr(again, item) for item in same} == {item: getattr(first, item) for item in same}
    odd = {key for key, value in flat(recipe).items() if flat(written).get(key) != value}
    assert odd <= ALIKE.keys() and all(ALIKE[key](recipe, written) for key in odd)
