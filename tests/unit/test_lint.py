"""`lint`: what it recognises, what it says of checkpoints and of recipes that run, its outputs, and what it survives."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import main
from pipeline.core.errors import ConfigError
from pipeline.lint import catalogue, checkpoint, planned
from pipeline.lint.args import args_of
from pipeline.lint.args import findings as args_findings
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Place, Rule, apply
from pipeline.lint.document import MOST_BYTES, read_document
from pipeline.lint.report import Report, lint
from pipeline.lint.sarif import sarif
from pipeline.lint.target import Target, target_of
from pipeline.planner import rules as planner
from tests._utils.known_good import MEASURED, RECIPES, TRUE_ALARMS, alarms_of_measured, alarms_of_recipe, target
from tests._utils.repositories import BASES, write
from tests.unit.test_launch import rendered as launched

DATA = Path(__file__).parents[1] / "data"
ARGS = "tensor_parallel_size: 8\nmoe_expert_parallel_size: 8\nmax_batch_size: 64\n"


def rules_of(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}


# --- what is known to run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
@pytest.mark.parametrize("placed", [False, True], ids=["by itself", "on its machine"])
def test_a_published_recipe_has_no_false_alarm(file: Path, placed: bool) -> None:
    found = alarms_of_recipe(file, placed)
    assert [finding.rule for finding in found] == ([TRUE_ALARMS[file.stem]] if file.stem in TRUE_ALARMS else [])
    assert not found or "kv_cache_config.free_gpu_memory_fraction" in found[0].fix


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(map(str, row)))
def test_a_measured_layout_has_no_false_alarm(row: list[Any]) -> None:
    assert alarms_of_measured(row) == []


def test_the_planner_judges_where_machine_and_model_are_given(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"{ARGS}enable_attention_dp: true\nmoe_config:\n  backend: CUTLASS\n")
    report = lint([file], target("b200", "deepseek_r1", "fp8_block"))
    first, *others = report.findings
    assert (first.rule, first.level, first.place.line) == ("plan/moe_kernels", ERROR, 6)
    assert "CUTLASS has no kernels for fp8_block experts on SM100" in first.reason
    assert all(finding.level == NOTE for finding in others)
    assert not rules_of(lint([file], target("h200", "deepseek_r1", "fp8_block"))) & {"plan/moe_kernels"}


@pytest.mark.parametrize(("hw", "rule"), [("b200", None), ("h200", "plan/format"), ("rtx_pro_6000", "plan/sm")])
def test_a_checkpoint_is_judged_by_its_own_formats(hw: str, rule: str | None, tmp_path: Path) -> None:
    """Also the arguments that lie beside it, whatever quant= says."""
    shutil.copytree(DATA / "foreign" / "modelopt_nvfp4", tmp_path / "checkpoint")
    (tmp_path / "llm_args.yaml").write_text(ARGS)
    found = [item for item in lint([tmp_path], target(hw, "deepseek_r1", "fp8_block")).findings if item.rule.startswith("plan/")]
    told = {(item.rule, item.place.file.name) for item in found if item.level == ERROR}
    assert told == ({(rule, "checkpoint"), (rule, "llm_args.yaml")} if rule else set())


def test_the_default_load_is_nobody_s(tmp_path: Path) -> None:
    """A recipe for 1K + 1K is not wrong because plan's default is 1K + 2K."""
    file = DATA / "recipes" / "DeepSeek-R1-0528__B200__1k1k_tp8_conc256.yaml"
    for load, rules in ({}, set()), ({"isl": 1024, "osl": 2048}, {"plan/max_seq_len"}):
        found = lint([file], target("b200", "deepseek_r1", "fp8_block", **load)).findings
        assert {item.rule for item in found if item.level == ERROR} == rules


def test_every_rule_of_the_planner_is_told_once() -> None:
    ids = {rule.id for rule in planner.RULES}
    assert ids >= {*planned.SAID_BY_FILE, *planned.TOLD, *planned.OF_LOAD, *planned.KEYS, *planned.OF_CHECKPOINT}
    assert not set(planned.SAID_BY_FILE) & set(planned.TOLD)


def test_without_a_version_the_line_that_fits_is_meant(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"{ARGS}moe_config: {{backend: WIDEEP}}\nenable_attention_dp: true\n")
    args = args_of(read_document(file), Target())
    assert args.line.line == "1.2" and all(finding.level == NOTE for finding in args_findings(args))


# --- checkpoints --------------------------------------------------------------------------------------------------

SOUND = {"n_group": 2, "topk_group": 2}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # rule: (file, what is put into it, what is put into it instead)
    "checkpoint/algorithm": ("hf_quant_config.json", {"quant_algo": "NVFP5"}, {}),
    "checkpoint/group-size": ("hf_quant_config.json", {"group_size": 32}, {"group_size": 16}),
    "checkpoint/block-size": (
        "config.json", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    ),
    "checkpoint/cache-algorithm": ("hf_quant_config.json", {"kv_cache_quant_algo": "FP4"}, {"kv_cache_quant_algo": "FP8"}),
    "checkpoint/cache-of-mla": ("hf_quant_config.json", {"kv_cache_quant_algo": "NVFP4"}, {"kv_cache_quant_algo": "FP8"}),
    "checkpoint/two-caches": ("quant_cfg.json", {"kv_cache_quant_algo": "INT8"}, {"kv_cache_quant_algo": "FP8"}),
    "checkpoint/routing-limits": ("config.json", {"n_routed_experts": 512, "n_group": 8, "topk_group": 4}, {}),
    "checkpoint/routing-groups": ("config.json", {"topk_group": 1}, {"topk_group": 2}),
    "checkpoint/routing-norm": ("config.json", {"norm_topk_prob": False}, {"norm_topk_prob": True}),
    "checkpoint/routing-score": ("config.json", {"scoring_func": "softmax"}, {"scoring_func": "sigmoid"}),
}  # fmt: skip


def changed_checkpoint(folder: Path, file: str, changes: dict[str, Any]) -> Path:
    shutil.copytree(DATA / "foreign" / "modelopt_nvfp4", folder)
    declared = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": []}}
    tables = {"config.json": json.loads((folder / "config.json").read_text()) | SOUND, "hf_quant_config.json": declared}
    table = tables.setdefault(file, {})
    (table["quantization"] if file == "hf_quant_config.json" else table).update(changes)
    for name, content in tables.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def test_every_rule_over_a_checkpoint_has_a_case() -> None:
    assert {rule.id for rule in checkpoint.RULES} == CHECKPOINTS.keys()


@pytest.mark.parametrize("rule", CHECKPOINTS)
def test_checkpoint_rule(rule: str, tmp_path: Path) -> None:
    file, breaking, keeping = CHECKPOINTS[rule]
    report = lint([changed_checkpoint(tmp_path / "broken", file, breaking)], Target())
    assert {finding.place.file.name for finding in report.findings if finding.rule == rule} == {file}
    assert rule not in rules_of(lint([changed_checkpoint(tmp_path / "sound", file, keeping)], Target()))


def test_the_invariants_of_verify_are_told(tmp_path: Path) -> None:
    report = lint([DATA / "foreign" / "deepseek_script_index"], Target())
    found = {finding.rule: finding for finding in report.findings}["checkpoint/tensor-without-index"]
    assert found.place.key.endswith("input_scale") and "83 more" in found.reason and report.exit_code == 4


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "checkpoint/no-weights" in rules_of(lint([tmp_path], Target()))


@pytest.mark.parametrize(("version", "level"), [("1.2", WARNING), ("1.3.0rc20", WARNING), ("1.3.0rc22", ERROR), ("1.4", ERROR)])
def test_a_tensorrt_engine_is_recognised(tmp_path: Path, version: str, level: str) -> None:
    write(tmp_path, {"config.json": '{"version": "1.0.0", "pretrained_config": {}, "build_config": {}}', "rank0.engine": ""})
    (finding,) = lint([tmp_path], target_of([f"version={version}"])).findings
    assert (finding.rule, finding.level) == ("checkpoint/tensorrt-engine", level)


# --- what is recognised -------------------------------------------------------------------------------------------


def test_what_the_pipeline_writes_is_recognised(tmp_path: Path) -> None:
    """A bundle of `engine` with instances, and the output of `package`, by their parts."""
    repository = {f"package/repository/{name}": text for name, text in BASES["llmapi"].items()}
    bundle = {
        "engine/engine.json": '{"kind": "trtllm", "line": "1.1"}', "engine/llm_args.yaml": ARGS,
        "engine/instances/context/llm_args.yaml": ARGS, "engine/checkpoint/config.json": "{}", "package/package.json": "{}",
    }  # fmt: skip
    write(tmp_path, repository | bundle)
    linted = lint([tmp_path / "engine", tmp_path / "package"], Target()).linted
    assert [item.version for item in linted] == ["1.1", "1.1", "1.1", None]
    kinds = [(item.kind, item.path.parent.name) for item in linted]
    assert kinds == [("arguments", "engine"), ("checkpoint", "engine"), ("arguments", "context"), ("repository", "package")]


def test_vllm_s_arguments_can_be_named_by_themselves(tmp_path: Path) -> None:
    args = {"tensor_parallel_size": 8, "gpu_memory_utilization": 1.5, "max_model_len": 4096, "max_num_seqs": 8, "model": "m"}
    args |= {"enable_lora": True}
    (tmp_path / "engine_args.json").write_text(json.dumps(args, indent=1))
    (finding,) = lint([tmp_path / "engine_args.json"], Target()).findings
    assert (finding.rule, finding.place.line) == ("vllm/memory-share", 3)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (None, "", "", ""),
        ("repository/llm/1/model.yaml", "pipeline_parallel_size: 2", "pipeline_parallel_size: 4", "16 ranks.* take 32"),
        ("launch/slurm/serve.sbatch", "--nodes=2", "--nodes=1", "asks for 1 nodes"),
        ("launch/kubernetes/serve.yaml", "kind: ", "kind: [", "could not be applied"),
    ],
)
def test_launchers_are_held_against_what_they_start(file: str | None, old: str, new: str, says: str, tmp_path: Path) -> None:
    package = launched(tmp_path / "rendered", "two_nodes").unpack(tmp_path / "package")
    files = {f"repository/{name}": text for name, text in BASES["llmapi"].items()}
    files["repository/llm/1/model.yaml"] += "pipeline_parallel_size: 2\n"
    about = {"engine": "trtllm", "triton": {"release": "26.07", "engine_version": "1.2.1"}}
    write(package, {**files, "package.json": json.dumps(about)})
    if file:
        (package / file).write_text((package / file).read_text().replace(old, new, 1))
    found = [item for item in lint([package], Target()).findings if item.level != NOTE]
    assert bool(found) == bool(file) and all(re.search(says, item.reason) for item in found), found


def test_arguments_inside_a_repository_are_judged(tmp_path: Path) -> None:
    files = dict(BASES["llmapi"])
    files["llm/1/model.yaml"] = files["llm/1/model.yaml"].replace("moe_expert_parallel_size: 8", "moe_expert_parallel_size: 3")
    write(tmp_path, files)
    (finding,) = lint([tmp_path], Target()).findings
    assert (finding.rule, finding.place.file.name, finding.place.line) == ("args/expert-ranks", "model.yaml", 3)


def test_both_sides_of_a_disaggregated_deployment_are_judged(tmp_path: Path) -> None:
    side = "{num_instances: 1, tensor_parallel_size: 8, moe_expert_parallel_size: 3, cache_transceiver_config: {backend: UCX}}"
    file = tmp_path / "disaggregated.yaml"
    file.write_text(f"hostname: localhost\ncontext_servers:\n  {side}\ngeneration_servers:\n  {side}\n")
    lines = [finding.place.line for finding in lint([file], Target()).findings if finding.rule == "args/expert-ranks"]
    assert lines == [3, 5]


@pytest.mark.parametrize("text", ["", "# nothing\n", "name: x\nversion: 3\n", "- 1\n", "services: {a: {image: b}}\n"])
def test_what_is_not_known_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"no file that lint knows|not a table"):
        lint([tmp_path / "a.yaml"], Target())
    with pytest.raises(ConfigError, match="holds nothing that lint knows"):
        lint([tmp_path], Target())


def test_beside_others_what_is_not_known_is_a_finding(tmp_path: Path) -> None:
    write(tmp_path, {"good.yaml": ARGS, "notes.txt": "just text\nand more\n"})
    report = lint([tmp_path / "good.yaml", tmp_path / "notes.txt"], Target())
    assert rules_of(report) == {"file/not-recognised"} and report.exit_code == 4


def test_a_rule_that_fails_is_told_and_stops_no_other() -> None:
    def fails(subject: None) -> Iterator[Fault]:
        raise KeyError("odd")

    rules = [Rule("x/fails", ERROR, fails, "f", "s"), Rule("x/next", NOTE, lambda _: [Fault(Place(Path("a")), "r")], "f", "s")]
    found = list(apply(rules, None, Path("a")))
    assert [finding.rule for finding in found] == ["file/not-applied", "x/next"] and "x/fails" in found[0].reason


# --- what it prints -----------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["lint", *words])
    return code, *capsys.readouterr()


def test_text_json_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(ARGS)
    bad.write_text(f"{ARGS}max_num_token: 1\n")
    assert run(capsys, str(good))[:2] == (0, "1 subject: nothing to report\n")
    code, out, _ = run(capsys, str(bad), "version=1.2")
    assert code == 4 and out.startswith(f"{bad}:4 max_num_token: error args/unknown: ")
    assert "did you mean max_num_tokens?" in out and out.endswith("against TensorRT-LLM 1.2: 1 error\n")
    code, out, _ = run(capsys, str(bad), "--json")
    *lines, last = [json.loads(line) for line in out.splitlines()]
    assert code == last["exit_code"] == 4 and last["counts"] == {"error": 1, "warning": 0, "note": 0}
    assert [(line["finding"]["rule"], line["finding"]["line"]) for line in lines] == [("args/unknown", 4)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "lint takes files or folders"),
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["{file}", "version=one"], "version=one is no release"),
        (["{file}", "triton=19.01"], "19.01 is not a known release"),
        (["{file}", "quant=nvfp4"], "lint does not know quant by itself"),
        (["{file}", "hw=b900"], "b900"),
        (["{file}", "--sarif", "{file}/x/y.sarif"], "cannot be written"),
        (["--rules", "{file}"], "takes no paths"),
    ],
)
def test_refusals(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(ARGS)
    code, _, err = run(capsys, *(word.replace("{file}", str(file)) for word in words))
    assert code == 2 and says in err and "Traceback" not in err


def test_sarif_has_the_structure_of_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"a b.yaml": f"{ARGS}max_num_token: 1\nmax_batch_size: 5\n"})
    assert run(capsys, "a b.yaml", str(DATA / "foreign" / "modelopt_nvfp4"), "--sarif", "out/x.sarif")[0] == 4
    log = json.loads((tmp_path / "out" / "x.sarif").read_text())
    assert log["version"] == "2.1.0" and log["$schema"].startswith("https://") and len(log["runs"]) == 1
    check_run(log["runs"][0])
    uris = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in log["runs"][0]["results"]}
    assert "a%20b.yaml" in uris and any(uri.startswith("file:///") for uri in uris)


def check_run(run: dict[str, Any]) -> None:
    """What the SARIF 2.1.0 schema requires of a run: required keys, enumerations, and references that hold."""
    driver = run["tool"]["driver"]
    assert isinstance(driver["name"], str) and run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids), "reportingDescriptors are unique"
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"] and rule["help"]["text"] and re.fullmatch(r"\w+", rule["name"])
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    assert run["results"]
    for result in run["results"]:
        assert result["message"]["text"] and result["level"] in ("none", "note", "warning", "error")
        assert ids[result["ruleIndex"]] == result["ruleId"]
        physical = result["locations"][0]["physicalLocation"]
        assert re.fullmatch(r"[\w:/.%~!$&'()*+,;=@-]+", physical["artifactLocation"]["uri"])
        assert physical.get("region", {"startLine": 1})["startLine"] >= 1


def test_sarif_is_written_though_nobody_reads_the_lines(tmp_path: Path) -> None:
    write(tmp_path, {"a.yaml": f"{ARGS}max_num_token: 1\n"})
    unread, lines = os.pipe()
    os.close(unread)
    words = [sys.executable, "-m", "pipeline", "lint", "a.yaml", "--sarif", "x.sarif"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with open(lines, "wb") as output:
        done = subprocess.run(words, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == 141
    assert json.loads((tmp_path / "x.sarif").read_text())["runs"][0]["results"]


def test_sarif_of_nothing_is_a_run_without_results() -> None:
    assert sarif([])["runs"][0]["results"] == []


def test_the_table_of_rules_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--rules")
    rows = catalogue.rows()
    assert code == 0 and f"{len(rows)} rules." in out
    assert len({row.id for row in rows}) == len(rows) and all(row.source and row.fix for row in rows)
    assert all(row.keys() == {"what", "why", "where", "source"} and all(row.values()) for row in catalogue.not_static())
    code, out, _ = run(capsys, "--rules", "--json")
    assert code == 0 and len(json.loads(out.splitlines()[-1])["rules"]) == len(rows)


def test_no_torch_no_hydra_no_protobuf_for_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(ARGS)
    code = (
        "import sys; from pathlib import Path; from pipeline.lint.report import lint; from pipeline.lint.target import Target; "
        "lint([Path('a.yaml')], Target()); "
        "print([name for name in ('torch', 'hydra', 'google.protobuf') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- what it survives ---------------------------------------------------------------------------------------------

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
ODD: dict[str, bytes] = {
    "binary": bytes(range(256)) * 20, "not utf-8": b"model: \xff\xfe\n", "deep": b"[" * 100_000, "deep tables": b"{a: " * 5_000,
    "deep blocks": b"- " * 50_000, "billion laughs": LAUGHS.encode(), "holds itself": b"a: &a {b: *a}\n",
    "merges itself": b"a: &a {<<: *a}\n", "merges a number": b"<<: 5\n", "python tag": b"a: !!python/object/apply:os.system [id]\n",
    "bad date": b"a: 2001-13-45\n", "endless number": b"max_batch_size: " + b"9" * 10_000, "two documents": b"a: 1\n---\nb: 2\n",
    "table as key": b"? {a: b}\n: c\n", "null key": b"~: 1\n", "anchor lost": b"a: *b\n", "tabs": b"a:\n\t- b\n",
    "huge": b"#" * (MOST_BYTES + 1),
    "many keys": b"".join(b"k%d: 1\n" % index for index in range(60_000)), "surrogate": b'a: "\\ud800"\n',
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("file", ["a.yaml", "config.pbtxt", "model.json"])
def test_odd_files_end_in_a_sentence(name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"m/1/model.py": "", "m/config.pbtxt": 'name: "m" backend: "vllm"'})
    place = {"a.yaml": "a.yaml", "config.pbtxt": "m/config.pbtxt", "model.json": "m/1/model.json"}[file]
    (tmp_path / place).write_bytes(ODD[name])
    code, out, err = run(capsys, str(tmp_path / place))
    assert code in (2, 4) and (out + err).strip() and "Traceback" not in out + err


WORDS = [
    "tensor_parallel_size", "moe_config", "kv_cache_config", "speculative_config", "cuda_graph_config", "context_servers",
    "generation_servers", "backend", "batch_sizes", "load_balancer", "num_slots", "urls", "attention_dp_config", "pp_partition",
    "draft_len_schedule", "cache_transceiver_config", "env_overrides", "cp_config", "triton_config", "decoding_type",
    "max_batch_size", "max_num_tokens", "moe_expert_parallel_size", "pytorch_backend_config",
]  # fmt: skip
VALUES = [
    None, True, 0, -1, 2**70, 1.5, float("nan"), float("inf"), "", "x" * 300, "MTP", "8", [], [None], ["a:b:c"], {}, "é\n\x07",
]  # fmt: skip


def random_table(choose: random.Random, depth: int) -> Any:
    if depth == 0 or choose.random() < 0.4:
        return choose.choice(VALUES)
    if choose.random() < 0.2:
        return [random_table(choose, depth - 1) for _ in range(choose.randrange(4))]
    return {choose.choice(WORDS): random_table(choose, depth - 1) for _ in range(choose.randrange(1, 6))}


@pytest.mark.parametrize("seed", range(60))
def test_random_arguments_never_break_a_rule_s_code(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    table = {"max_batch_size": 1} | {choose.choice(WORDS): random_table(choose, 3) for _ in range(6)}
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(table), encoding="utf-8")
    meant = target("b200", "deepseek_r1", "nvfp4") if seed % 3 == 0 else Target(choose.choice([None, "1.0", "1.2", "1.4"]))
    report = lint([file], meant)
    assert "file/not-applied" not in rules_of(report), [finding.reason for finding in report.findings]
    json.dumps(sarif(report.findings))


@pytest.mark.parametrize("seed", range(30))
def test_random_damage_to_a_repository_never_breaks_a_rule_s_code(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    files = dict(BASES[choose.choice(list(BASES))])
    for name in choose.sample(list(files), min(3, len(files))):
        text = files[name]
        begin = choose.randrange(len(text) + 1)
        files[name] = choose.choice([text[:begin], text[:begin] + text[begin + choose.randrange(1, 30) :], text + text[begin:]])
    report = lint([write(tmp_path, files)], Target(triton=choose.choice([None, "24.10", "25.12"])))
    assert "file/not-applied" not in rules_of(report), [finding.reason for finding in report.findings]


def _loop(folder: Path) -> Path:
    (folder / "a.yaml").symlink_to(folder / "b.yaml")
    (folder / "b.yaml").symlink_to(folder / "a.yaml")
    return folder / "a.yaml"


def _folder_loop(folder: Path) -> Path:
    (folder / "m").mkdir()
    (folder / "m" / "1").symlink_to(folder)
    return folder


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.yaml")
    return folder / "a.yaml"


def _odd_name(folder: Path) -> Path:
    file = Path(os.fsdecode(os.fsencode(folder) + b"/\xff.yaml"))
    file.write_text("max_num_token: 1\n")
    return file


@pytest.mark.parametrize("make", [_loop, _folder_loop, _pipe, _odd_name, lambda folder: Path("/dev/zero"), lambda folder: folder])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_odd_places_end_in_a_sentence(make: Callable[[Path], Path], as_json: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "lint", str(make(tmp_path)), *as_json]
    done = subprocess.run(command, capture_output=True, cwd=Path(__file__).parents[2], timeout=300)
    assert done.returncode in (2, 4) and b"Traceback" not in done.stderr and done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_end_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(ARGS)
    (tmp_path / "a.yaml").chmod(0)
    assert run(capsys, str(tmp_path / "a.yaml"))[0] == 2


def test_a_file_may_be_named_twice(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max_num_token: 1\n")
    assert len(lint([tmp_path / "a.yaml", tmp_path / "a.yaml"], replace(Target(), version="1.2")).findings) == 1


def test_hardware_alone_is_judged_for_deepseek_r1(tmp_path: Path) -> None:
    write(tmp_path, {"a.yaml": ARGS})
    assert str(target_of(["hw=b200"])) == "deepseek_r1 on b200 (no workload given)"
    assert lint([tmp_path / "a.yaml"], target_of(["hw=b200"])).exit_code == 0
