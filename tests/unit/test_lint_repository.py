"""Every rule over a Triton repository: a change to a good repository that breaks it; the good ones break none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.lint.base import ERROR, NOTE, WARNING, Finding
from pipeline.lint.report import Report, lint
from pipeline.lint.repository import MODEL_RULES, ROOT_RULES, findings, open_repository
from pipeline.lint.target import target_of
from tests._utils.repositories import BASES, write

Edit = str | None | tuple[str, str]
"""What a file becomes: a text, nothing, or itself with one part replaced."""
LLM, YAML, R1, JSON = "llm/config.pbtxt", "llm/1/model.yaml", "r1/config.pbtxt", "r1/1/model.json"
PRE, ENGINE, POST, ENSEMBLE = (f"{name}/config.pbtxt" for name in ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble"))
BLS = "tensorrt_llm_bls/config.pbtxt"
CPU = "instance_group [{ count: 1 kind: KIND_CPU }]"
STREAMS = "model_transaction_policy { decoupled: true }"


def argument(old: str, new: str) -> tuple[str, dict[str, Edit]]:
    """A change to vLLM's model.json."""
    return "vllm", {JSON: (old, new)}


def parameter(key: str, value: str) -> tuple[str, dict[str, Edit]]:
    """A parameter more of the engine's model."""
    return "ensemble", {ENGINE: (CPU, f'{CPU}\nparameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')}


CASES: dict[str, tuple[str, dict[str, Edit]]] = {
    "triton/empty": ("llmapi", dict.fromkeys((LLM, "llm/1/model.py", YAML))),
    "triton/stray-file": ("llmapi", {"package.json": "{}"}),
    "triton/memory-shared": ("llmapi", {"two/config.pbtxt": 'name: "two" backend: "vllm"', "two/1/model.json": '{"model": "m"}'}),
    "triton/stray-folder": ("llmapi", {".ipynb_checkpoints/x": ""}),
    "triton/no-config": ("llmapi", {LLM: None}),
    "triton/name": ("llmapi", {LLM: ('"llm"', '"tensorrt_llm"')}),
    "triton/no-version": ("llmapi", {"llm/01/model.py": "", "llm/1/model.py": None, YAML: None}),
    "triton/no-code": ("llmapi", {"llm/1/model.py": None}),
    "triton/no-engine-args": ("vllm", {JSON: None, "r1/1/x": ""}),
    "triton/unreadable-settings": ("llmapi", {YAML: "a: ["}),
    "triton/empty-version": ("ensemble", {"ensemble/1/.gitkeep": None}),
    "triton/two-settings": ("llmapi", {"llm/1/model.json": '{"model": "m"}'}),
    "triton/placeholder": ("ensemble", {PRE: ("max_batch_size: 8", "max_batch_size: ${triton_max_batch_size}")}),
    "triton/placeholder-required": ("ensemble", {ENGINE: ("inflight_fused_batching", "${batching_strategy}")}),
    "triton/placeholder-unset": parameter("max_beam_width", "${max_beam_width}"),
    "triton/parse": ("llmapi", {LLM: ("max_batch_size", "max_batchsize")}),
    "triton/parameter-twice": parameter("gpt_model_path", "/other"),
    "triton/no-backend": ("llmapi", {LLM: ('backend: "python"', "")}),
    "triton/backend": ("llmapi", {LLM: ('"python"', '"pithon"')}),
    "triton/newer-field": ("llmapi", {LLM: (CPU, f"{CPU}\nmodel_metrics {{ }}")}),
    "triton/no-policy": ("ensemble", {BLS: (STREAMS, "")}),
    "triton/instance-count": ("llmapi", {LLM: ("count: 1", "count: 0")}),
    "triton/max-batch-size": ("ensemble", {PRE: ("max_batch_size: 8", "max_batch_size: -1")}),
    "triton/preferred-batch-size": ("ensemble", {PRE: (CPU, f"{CPU}\ndynamic_batching {{ preferred_batch_size: [16] }}")}),
    "triton/tensor-twice": ("llmapi", {LLM: ('"streaming"', '"text_input"')}),
    "triton/data-type": ("llmapi", {LLM: ("data_type: TYPE_BOOL", "")}),
    "triton/dims": ("llmapi", {LLM: ("dims: [1]", "dims: [0]")}),
    "triton/code-syntax": ("llmapi", {"llm/1/model.py": "class TritonPythonModel\n"}),
    "triton/code-class": ("llmapi", {"llm/1/model.py": "class Model:\n    pass\n"}),
    "triton/code-logger": ("llmapi", {"llm/1/helpers.py": "import p\n\np.Logger.log_warning('x')\n"}),
    "triton/code-responses": ("llmapi", {"llm/1/model.py": "class TritonPythonModel:\n    pass\n"}),
    "triton/gpu-device-ids": ("vllm", {R1: ("0,1,2,3", "0,1,2,2")}),
    "triton/kind-gpu": ("llmapi", {LLM: ("KIND_CPU", "KIND_GPU")}),
    "triton/world-size": parameter("world_size", "8"),
    "engine/instances": ("ensemble", {ENGINE: ("count: 1", "count: 2")}),
    "ensemble/model": ("ensemble", {ENSEMBLE: ('"postprocessing"', '"postproc"')}),
    "ensemble/version": ("ensemble", {ENSEMBLE: ("model_version: -1", "")}),
    "ensemble/unknown-tensor": ("ensemble", {ENSEMBLE: ('key: "QUERY"', 'key: "QUERYX"')}),
    "ensemble/unmapped": ("ensemble", {ENSEMBLE: ('input_map { key: "REQUEST_OUTPUT_LEN" value: "max_tokens" }', "")}),
    "ensemble/unwritten": ("ensemble", {ENSEMBLE: ('output_map { key: "output_ids" value: "_TOKENS" }', "")}),
    "ensemble/unused": ("ensemble", {ENSEMBLE: ('input_map { key: "STOP_WORDS_DICT" value: "stop_words" }', "")}),
    "ensemble/written-twice": ("ensemble", {ENSEMBLE: ('value: "_STOPS" }\n', 'value: "_IDS" }\n')}),
    "ensemble/type": ("ensemble", {POST: ("TYPE_INT32", "TYPE_INT64")}),
    "ensemble/shape": ("ensemble", {POST: ("dims: [-1, -1]", "dims: [-1]")}),
    "ensemble/optional": ("ensemble", {PRE: ("dims: [-1] optional: true", "dims: [-1]")}),
    "ensemble/batch": ("ensemble", {ENSEMBLE: ("max_batch_size: 8", "max_batch_size: 64")}),
    "ensemble/no-batch": ("ensemble", {ENSEMBLE: ("max_batch_size: 8", "max_batch_size: 0")}),
    "ensemble/instance-group": ("ensemble", {ENSEMBLE: ("max_batch_size: 8", f"max_batch_size: 8\n{CPU}")}),
    "ensemble/stop-words": ("ensemble", {ENSEMBLE: ('input_map { key: "stop_words_list" value: "_STOPS" }', "")}),
    "ensemble/end-id": ("ensemble", {ENSEMBLE: ('input_map { key: "end_id" value: "_END" }', "")}),
    "ensemble/decoupled": ("ensemble", {BLS: ("decoupled: true", "decoupled: false")}),
    "ensemble/tokenizer": ("ensemble", {PRE: ("/tokenizer", "/other")}),
    "bls/model": ("ensemble", {BLS: ('string_value: "tensorrt_llm"', 'string_value: "llm"')}),
    "bls/one-at-a-time": ("ensemble", {BLS: ("count: 64", "count: 1")}),
    "bls/token-by-token": ("ensemble", {BLS: ('"true"', '"false"')}),
    "llmapi/triton-config": ("llmapi", {YAML: ("decoupled: true, ", "")}),
    "llmapi/unknown-key": ("llmapi", {YAML: ("decoupled: true", "decoupled: true, streaming: true")}),
    "llmapi/decoupled": ("llmapi", {YAML: ("decoupled: true", "decoupled: false")}),
    "llmapi/silent-policy": ("llmapi", {LLM: (STREAMS, "")}),
    "llmapi/batching": (
        "llmapi", {YAML: ("max_batch_size: 0", "max_batch_size: 4"), LLM: ("max_batch_size: 0", "max_batch_size: 4")},
    ),
    "llmapi/max-batch-size": ("llmapi", {LLM: ("max_batch_size: 0", "max_batch_size: 4")}),
    "llmapi/cancellation-period": ("llmapi", {YAML: ("decoupled: true", "decoupled: true, cancellation_check_period_ms: 0")}),
    "llmapi/tensor-type": ("llmapi", {LLM: ("TYPE_INT32", "TYPE_INT64")}),
    "llmapi/text-input": ("llmapi", {LLM: ('"text_input"', '"prompt"')}),
    "llmapi/instances": ("llmapi", {LLM: ("count: 1", "count: 2")}),
    "llmapi/gpus": ("llmapi", {LLM: (CPU, f'{CPU}\nparameters {{ key: "gpu_device_ids" value {{ string_value: "0,1" }} }}')}),
    "engine/removed-backend": ("ensemble", {}),
    "engine/value": parameter("batch_scheduler_policy", "max_use"),
    "engine/share": ("ensemble", {ENGINE: ('"0.8"', '"80"')}),
    "engine/v1-streams": ("ensemble", {ENGINE: ("inflight_fused_batching", "V1")}),
    "engine/max-utilization": parameter("batch_scheduler_policy", "max_utilization"),
    "engine/removed-parameter": parameter("enable_trt_overlap", "true"),
    "engine/unknown-parameter": parameter("batch_schedule_policy", "max_utilization"),
    "engine/no-engine": ("ensemble", {ENGINE: ("gpt_model_path", "engine")}),
    "engine/batch": ("ensemble", {}),
    "engine/version": ("ensemble", {}),
    "engine/guided": (
        "ensemble", {ENGINE: ('name: "end_id" data_type: TYPE_INT32', 'name: "guided_decoding_guide" data_type: TYPE_STRING')},
    ),
    "engine/guided-tokenizer": parameter("guided_decoding_backend", "xgrammar"),
    "engine/escaped": parameter("gpu_device_ids", "0\\\\,1"),
    "vllm/model": argument('"model": "deepseek-ai/DeepSeek-R1", ', ""),
    "vllm/json": argument('8192}', '8192,}'),
    "vllm/unknown": argument('"max_num_seqs"', '"max_num_seq"'),
    "vllm/removed": argument('"block_size"', '"disable_log_requests": true, "block_size"'),
    "vllm/decoupled": ("vllm", {R1: ("decoupled: true", "decoupled: false")}),
    "vllm/auto-completed": ("vllm", {R1: (STREAMS, "")}),
    "vllm/max-batch-size": ("vllm", {R1: ("max_batch_size: 0", "max_batch_size: 8")}),
    "vllm/kind": ("vllm", {R1: ("KIND_MODEL", "KIND_GPU")}),
    "vllm/instance-group": ("vllm", {R1: ("instance_group [{ count: 1 kind: KIND_MODEL }]", "")}),
    "vllm/copies": ("vllm", {R1: ("count: 1", "count: 2")}),
    "vllm/gpu-device-ids": ("vllm", {R1: ("0,1,2,3,4,5,6,7", "0,1")}),
    "vllm/lora": argument('"block_size"', '"enable_lora": "true", "block_size"'),
    "vllm/count": argument('"tensor_parallel_size": 8', '"tensor_parallel_size": 0'),
    "vllm/switch": argument('"enable_prefix_caching": true', '"enable_prefix_caching": "yes"'),
    "vllm/memory-share": argument("0.9", "90"),
    "vllm/kv-cache-dtype": argument('"fp8"', '"int8"'),
    "vllm/block-size": argument('"block_size": 64', '"block_size": 48'),
    "vllm/max-model-len": argument('"max_model_len": 16384, ', ""),
    "vllm/tight": argument("0.9", "0.98"),
    "vllm/tokens": argument('"max_num_batched_tokens": 8192', '"max_num_batched_tokens": 128'),
    "vllm/prompt": argument('"block_size"', '"enable_chunked_prefill": false, "block_size"'),
    "vllm/kv-scales": argument('"kv_cache_dtype": "fp8"', '"kv_cache_dtype": "auto", "calculate_kv_scales": true'),
}  # fmt: skip
SETTINGS = {"triton/newer-field": "triton=24.10", "engine/removed-backend": "version=1.4", "engine/version": "triton=25.12"}


def changed(folder: Path, base: str, edits: Mapping[str, Edit]) -> Path:
    """A good repository with edits; the engine it names lies beside it."""
    files = dict(BASES[base])
    for name, edit in edits.items():
        if isinstance(edit, tuple):
            assert edit[0] in files[name], f"{name} has no {edit[0]}"
            files[name] = files[name].replace(*edit, 1)
        elif edit is None:
            del files[name]
        else:
            files[name] = edit
    if base == "ensemble":  # git and this table keep no empty folders
        (folder / "repository" / "ensemble" / "1").mkdir(parents=True)
    return write(folder / "repository", files)


def linted(folder: Path, rule: str) -> Report:
    base, edits = CASES[rule]
    repository = changed(folder, base, edits)
    if rule in ("engine/batch", "engine/version"):
        write(folder, {"engine/config.json": json.dumps({"version": "1.0.0", "build_config": {"max_batch_size": 4}})})
        file = repository / ENGINE
        file.write_text(file.read_text().replace("/engine", str(folder / "engine")))
    if rule == "triton/empty":
        repository.mkdir()
        return Report((), tuple(findings(open_repository(repository, target_of([])))), target_of([]))
    return lint([repository], target_of(SETTINGS.get(rule, "").split()))


def by_rule(report: Report) -> dict[str, Finding]:
    return {finding.rule: finding for finding in report.findings}


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    ids = [rule.id for rule in (*ROOT_RULES, *MODEL_RULES)]
    assert set(ids) == CASES.keys()
    assert len(set(ids)) == len(ids)
    assert all(rule.fix and rule.source and rule.level in (ERROR, WARNING, NOTE) for rule in (*ROOT_RULES, *MODEL_RULES))


@pytest.mark.parametrize("rule", CASES)
def test_a_breach_is_found_where_it_is(rule: str, tmp_path: Path) -> None:
    finding = by_rule(linted(tmp_path, rule))[rule]
    assert finding.reason and finding.fix and finding.source
    assert finding.place.file.is_relative_to(tmp_path)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("settings", ["", "triton=25.12", "version=1.2"])
def test_a_good_repository_breaks_no_rule(base: str, settings: str, tmp_path: Path) -> None:
    assert lint([changed(tmp_path, base, {})], target_of(settings.split())).findings == ()


SAMPLES: dict[str, dict[str, str]] = {
    "Triton docs getting_started/llm.md": {
        "tensorrt_llm/config.pbtxt": f'name: "tensorrt_llm"\nbackend: "python"\n{CPU}\n'
        'input [{ name: "text_input" data_type: TYPE_STRING dims: [-1] }]\n'
        'output [{ name: "text_output" data_type: TYPE_STRING dims: [-1] }]\n',
        "tensorrt_llm/1/model.py": "class TritonPythonModel:\n    pass\n",
        "tensorrt_llm/1/model.yaml": "model: nvidia/DeepSeek-R1-0528-FP4-V2\nbackend: pytorch\ntensor_parallel_size: 8\n"
        "moe_expert_parallel_size: 8\nmax_seq_len: 4096\nmax_num_tokens: 8192\n"
        "kv_cache_config:\n  free_gpu_memory_fraction: 0.7\ntriton_config:\n  max_batch_size: 0\n  decoupled: False\n",
    },
    "vllm_backend samples/model_repository": {
        "vllm_model/config.pbtxt": 'backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n',
        "vllm_model/1/model.json": '{"model": "facebook/opt-125m", "gpu_memory_utilization": 0.5}\n',
    },
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_published_sample_has_no_false_alarm(sample: str, tmp_path: Path) -> None:
    found = lint([write(tmp_path, SAMPLES[sample])], target_of([])).findings
    assert [finding for finding in found if finding.level != NOTE] == []


@pytest.mark.parametrize(
    ("rule", "line"), [("triton/placeholder", 3), ("ensemble/version", 13), ("llmapi/decoupled", 5), ("vllm/tight", 2)]
)
def test_the_line_is_that_of_the_fault(rule: str, line: int, tmp_path: Path) -> None:
    assert by_rule(linted(tmp_path, rule))[rule].place.line == line


def test_an_older_bls_calls_tensorrt_llm_without_saying_so(tmp_path: Path) -> None:
    says = 'parameters { key: "tensorrt_llm_model_name" value { string_value: "tensorrt_llm" } }'
    text = BASES["ensemble"][BLS]
    assert says in text and "decoupled: true" in text
    edits = {BLS: text.replace(says, "").replace("decoupled: true", "decoupled: false")}
    found = lint([changed(tmp_path, "ensemble", edits)], target_of([])).findings
    assert [(finding.rule, finding.place.file.parent.name) for finding in found if finding.level == "error"] == [
        ("ensemble/decoupled", "tensorrt_llm_bls")
    ]


def test_one_model_of_a_repository_can_be_named(tmp_path: Path) -> None:
    repository = changed(tmp_path, "ensemble", {BLS: ("count: 64", "count: 1"), PRE: ("TYPE_STRING", "TYPE_STRINGS")})
    assert {finding.rule for finding in lint([repository / "preprocessing"], target_of([])).findings} == {"triton/parse"}
    named = lint([repository / "tensorrt_llm_bls" / "config.pbtxt"], target_of([])).findings
    assert {finding.rule for finding in named} == {"bls/one-at-a-time"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("max_batch_size", "max_batchsize", "max_batchsize"),
        ("TYPE_BOOL", "TYPE_BOOLS", "TYPE_BOOLS"),
        ("decoupled: true", "decoupled: yes", "yes"),
        ("model_transaction_policy {", "model_transaction_policy [", "["),
        ("}", "", ""),
        (CPU, f"{CPU}\ndynamic_batching {{ }}\ndynamic_batching {{ }}", "dynamic_batching"),
        (CPU, f"{CPU}\ndynamic_batching {{ }}\nsequence_batching {{ }}", "sequence_batching"),
        ("name:", "\ufeffname:", ""),
        ("max_batch_size: 0", "max_batch_size: ${a} # ${b}", "${a}"),
    ],
)
def test_what_the_server_cannot_parse(old: str, new: str, says: str, tmp_path: Path) -> None:
    found = [item for item in lint([changed(tmp_path, "llmapi", {LLM: (old, new)})], target_of([])).findings if item.level == ERROR]
    assert [item.rule for item in found] in (["triton/parse"], ["triton/placeholder"]) and says in found[0].reason
    assert "${b}" not in str(found), "a comment is no placeholder"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("decoupled: true", "decoupled: True"),
        ('"llm"', "'llm'"),
        ("\n", "\r\n"),
        ("name:", "# ${comment}\nname:"),
        ("name:", "# caf\xe9\nname:"),
    ],
)
def test_what_the_server_also_takes(old: str, new: str, tmp_path: Path) -> None:
    repository = changed(tmp_path, "llmapi", {})
    text = (repository / LLM).read_text().replace(old, new)
    (repository / LLM).write_bytes(text.encode("latin-1"))
    assert lint([repository], target_of([])).findings == ()
