"""The config loader: every file composes, every mistake is a sentence."""

import dataclasses
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from pipeline.config import schema
from pipeline.config.load import choices, from_plain, load, resolved_yaml
from pipeline.core.errors import ConfigError
from pipeline.share import share

GROUPS = {path.name for path in share("conf").iterdir() if path.is_dir()}
EVERY_FILE = [(group, name) for group in sorted(GROUPS - {"hw", "deployment"}) for name in choices(group)]


def test_the_groups_are_those_the_readme_names() -> None:
    assert {"hw", "deployment", "model", "quant", "parallel", "workload", "engine", "serve", "executor", "store"} == GROUPS


@pytest.mark.parametrize("hw", choices("hw"))
def test_every_hardware_composes(hw: str) -> None:
    config = load([f"+hw={hw}"])
    assert config.hw.name == hw
    assert config.hw.source, "a hardware file names where its numbers come from"


@pytest.mark.parametrize("name", choices("deployment"))
def test_a_deployment_brings_its_hardware_and_the_command_line_wins(name: str) -> None:
    config = load([f"deployment={name}"])
    assert (config.hw.name, config.engine.kind, config.model.name) == (name.split("_")[0], "trtllm", "deepseek_r1")
    assert load([f"+deployment={name}", "workload=latency", "workload.osl=7"]).workload.osl == 7
    with pytest.raises(ConfigError, match=rf"\+deployment={name} and \+hw=b300 both bring the hardware"):
        load([f"+deployment={name}", "+hw=b300"])


@pytest.mark.parametrize(("group", "name"), EVERY_FILE)
def test_every_choice_composes(group: str, name: str) -> None:
    config = load(["+hw=cpu", f"{group}={name}"])
    section = getattr(config, group)
    assert (section.kind if group == "engine" else section.name) == name


@pytest.mark.parametrize("path", sorted(share("conf").glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_names_its_schema(path: Path) -> None:
    line = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# schema: "))
    assert hasattr(schema, line.removeprefix("# schema: ").split(".")[0])


def test_hw_without_plus_is_understood() -> None:
    assert load(["hw=cpu"]).hw.name == "cpu"


def test_hardware_sets_defaults_and_the_command_line_wins() -> None:
    assert load(["+hw=b200"]).engine.kind == "trtllm"
    assert load(["+hw=b200"]).quant.name == "nvfp4"
    assert load(["+hw=b200", "quant=fp8_block", "engine=torch"]).quant.name == "fp8_block"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], r"Choose the hardware: add one of .*\+hw=b200.*\+hw=cpu.* or a whole deployment: one of .*\+deployment=h200_fp8"),
        (["+hw=b20"], r"\+hw=b20 is not known: choose one of .*\+hw=b200.* Did you mean b200\?"),
        (["+hw=cpu", "quant=nvpf4"], r"quant=nvpf4 is not known: choose one of .*quant=nvfp4.* Did you mean nvfp4\?"),
        (["+hw=cpu", "+quant.kv_dytpe=fp8"], r"There is no key quant\.kv_dytpe; did you mean quant\.kv_dtype\?"),
        (["+hw=cpu", "quant.kv_dytpe=fp8"], r"There is no key quant\.kv_dytpe; did you mean quant\.kv_dtype\?"),
        (["+hw=cpu", "+hw.smm=3"], r"There is no key hw\.smm; did you mean hw\.sm\?"),
        (["+hw=cpu", "enginee=torch"], r"There is no key enginee; did you mean engine\?"),
        (["+hw=cpu", "+foo=1"], r"There is no key foo"),
        (["+hw=cpu", "quant.kv_dtype=int3"], r"quant\.kv_dtype=int3 is not supported: choose one of bf16, fp8"),
        (["+hw=cpu", "quant.routed_experts=fp3"], r"quant\.routed_experts=fp3 is not supported"),
        (["+hw=cpu", "engine.torch.page_size=abc"], r"engine\.torch\.page_size.*'abc'.*Integer"),
        (["+hw=cpu", "engine.torch.page_size=0"], r"engine\.torch\.page_size=0 is too small: it must be at least 1"),
        (["+hw=cpu", "workload.isl=-5"], r"workload\.isl=-5 is too small"),
        (["+hw=cpu", "engine.trtllm.mtp=1"], r"select it with engine=trtllm"),
        (["+hw=cpu", "quant"], r"quant is not an override: write KEY=VALUE"),
        (["+hw=cpu", ""], r"An empty word is not an override: write KEY=VALUE"),
        (["+hw=cpu", "workload.isl=["], r"is not an override"),
        (["+hw=cpu", "+hw=h200"], r"hw"),
        (["+hw=[cpu,b200]"], r"\+hw=\[cpu,b200\] does not choose one hw: choose one of .*\+hw=b200"),
        (["+hw=cpu", "engine=null"], r"engine=null does not choose one engine: choose one of .*engine=torch, engine=trtllm"),
        (["+hw=cpu", "quant="], r"quant= does not choose one quant"),
        (["+hw=cpu", "quant=bf16,fp8"], r"quant=bf16,fp8 does not choose one quant"),
        (["+hw=cpu", "checkpoint=${nope}"], r"checkpoint: .*'nope' not found"),
        (["+hw=cpu", "model.title=${oc.env:NO_SUCH_VARIABLE}"], r"model\.title: .*NO_SUCH_VARIABLE"),
        (["+hw=cpu", "verify=5"], r"verify: .*int"),
        (["+hw=cpu", "verify=null"], r"verify"),
        (["+hw=cpu", "~engine"], r"engine\.kind has no value"),
        (["+hw=cpu", "serve.grpc_port=8002"], r"serve\.grpc_port and serve\.metrics_port are both 8002: give each its own"),
        (["+hw=cpu", "serve.http_port=70000"], r"serve\.http_port=70000 is too large: it must be at most 65,535"),
        (["+hw=cpu", "serve.smoke_requests=0"], r"serve\.smoke_requests=0 is too small"),
        (["+hw=cpu", "serve.smoke_tokens=-1"], r"serve\.smoke_tokens=-1 is too small"),
        (["+hw=cpu", "serve.ready_timeout=nan"], r"serve\.ready_timeout=nan is not a finite number"),
        (["+hw=cpu", "serve.host="], r"serve\.host is empty: 127\.0\.0\.1"),
        (["+hw=cpu", "serve.model_name=../../x"], r"serve\.model_name=\.\./\.\./x is no plain name: use letters"),
        (["+hw=cpu", "serve.model_name='a b'"], r"serve\.model_name=a b is no plain name"),
        (["+hw=cpu", "model.name="], r"model\.name= is no plain name"),
        (["+hw=cpu", "store.root="], r"store\.root is empty: name a folder"),
        (["+hw=cpu", "verify.max_kl=nan"], r"verify\.max_kl=nan is not a finite number"),
        (["+hw=cpu", "verify.max_kl=-0.1"], r"verify\.max_kl=-0\.1 is too small"),
        (["+hw=cpu", "verify.min_top1=1.5"], r"verify\.min_top1=1\.5 is too large: it must be at most 1"),
        (["+hw=cpu", "verify.min_sqnr_db.nvfp4=inf"], r"verify\.min_sqnr_db\.nvfp4=inf is not a finite number"),
        (["+hw=cpu", "+verify.min_sqnr_db.nvpf4=1"], r"nvpf4; did you mean verify\.min_sqnr_db\.nvfp4\?"),
        (["+hw=cpu", "+verify.min_sqnr_db.foo=1"], r"no key verify\.min_sqnr_db\.foo: known are .*nvfp4"),
        (["+hw=b200", "engine.trtllm.args.revision=a"], r"add it as \+engine\.trtllm\.args\.revision=VALUE"),
        (["+hw=b200", "engine.trtllm.args={revision: a}"], r"add it as \+engine\.trtllm\.args\.NAME=VALUE"),
        (["+hw=cpu", "model.hf.hidden_size=1"], r"model\.hf\.hidden_size is not set yet: add it as \+model\.hf\.hidden_size"),
        (["+hw=b200", "model=deepseek_r1", "model.hf.hiden_size=1"], r"did you mean model\.hf\.hidden_size\?"),
        (["+hw=cpu", "slo.ttft_ms=inf"], r"slo\.ttft_ms=inf is not a finite number.*null is no limit"),
        (["+hw=cpu", "slo.tpot_ms=0"], r"slo\.tpot_ms=0\.0 is too small: it must be above 0"),
        (["+hw=b200", "hw.memory_bytes=-1"], r"hw\.memory_bytes=-1\.0 is too small"),
        (["+hw=b200", "hw.weight_formats=[fp3]"], r"hw\.weight_formats\[0\]=fp3 is not supported"),
        (["+hw=b200", "engine.trtllm.mtp=100"], r"engine\.trtllm\.mtp=100 is too large.*1 to 3 are usual"),
        (["+hw=b200", "engine.trtllm.free_gpu_memory_fraction=1"], r"must be below 1; 0\.8 is usual"),
        (["+hw=cpu", "quant.input_scale=inf"], r"quant\.input_scale=inf is not a finite number"),
        (["+hw=cpu", "quant.input_scale=0"], r"quant\.input_scale=0\.0 is too small.*it divides the activations"),
    ],
)
def test_mistakes_are_sentences(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(overrides)
    assert caught.value.exit_code == 2
    assert "Traceback" not in str(caught.value)


def test_own_config_dir_adds_hardware(tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / "hw" / "mine.yaml").write_text("name: mine\ntitle: Mine\nmemory_bytes: 1e9\nmemory_bandwidth: 1e9\n")
    assert load(["+hw=mine"], tmp_path).hw.title == "Mine"
    with pytest.raises(ConfigError, match=r"\+hw=mine"):
        load([], tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("hw/cpu.yaml", b"name: mine", r"hw/cpu\.yaml has the name of a file that comes with the pipeline"),
        ("loose.yaml", b"name: mine", r"loose\.yaml would not be read: move it into the folder of a group"),
        ("hw/mine.yaml", b"a: [1\n", r"hw/mine\.yaml, line 2, column 1 is not YAML"),
        ("hw/mine.yaml", b"a: 1\na: 2\n", r"hw/mine\.yaml, line 2, column 1 is not YAML: found duplicate key a"),
        ("hw/mine.yaml", b"\xff\xfe", r"hw/mine\.yaml is not UTF-8 text"),
        ("hw/mine.yaml", b"- a\n- b\n", r"mine"),
        ("hw/mine.yaml", b"just text\n", r"mine"),
        ("hw/mine.yaml", b"name: mine\ntitle: ${nope}\nmemory_bytes: 1\nmemory_bandwidth: 1\n", r"hw\.title: .*'nope' not found"),
        ("hw/mine.yaml", b"name: mine\n", r"hw\.memory_bytes has no value"),
        ("hw/mine.yaml", b"nmae: mine\n", r"'nmae' not in 'HwConfig'"),
    ],
)
def test_mistakes_in_own_files_name_the_file(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        load(["+hw=mine"], tmp_path)


def test_all_limits_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["+hw=cpu", "verify.tokens=1", "serve.http_port=-1", "slo.ttft_ms=nan"])
    assert len(str(caught.value).splitlines()) == 3


def test_a_config_survives_the_way_to_another_process() -> None:
    config = load(["+hw=b200", "workload.isl=77", "slo.tpot_ms=50"])
    assert from_plain(dataclasses.asdict(config)) == config


def test_cfg_prints_what_load_sees() -> None:
    assert "isl: 77" in resolved_yaml(["+hw=cpu", "workload.isl=77"])


def test_schemas_have_slots_so_that_unknown_keys_cannot_pass() -> None:
    for name in schema.__all__:
        kind = getattr(schema, name)
        assert dataclasses.is_dataclass(kind) and hasattr(kind, "__slots__"), name
        assert typing.get_type_hints(kind)


@pytest.mark.parametrize(
    "command", [["--help"], ["plan", "--help"], ["doctor"], ["plan", "+hw=b200", "model=deepseek_r1"], ["explain", "+hw=cpu"]]
)
def test_light_commands_do_not_import_torch(command: list[str], tmp_path: Path) -> None:
    call = f"from pipeline.cli import main; code = main({command!r})"
    code = f"import sys; {call}; assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
