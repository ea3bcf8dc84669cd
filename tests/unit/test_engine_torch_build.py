"""The compiled engine: what a build writes, that it says what the graph says, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is compiled by torch")

from torch import Tensor  # noqa: E402

from pipeline.checkpoint import dequantized  # noqa: E402
from pipeline.config.schema import Config, EngineConfig, TorchEngineConfig  # noqa: E402
from pipeline.core.errors import ConfigError, MissingToolError, StageError  # noqa: E402
from pipeline.core.stage import StageContext  # noqa: E402
from pipeline.engines.torch import build  # noqa: E402
from pipeline.engines.torch.export import export_form, load_decoder, new_caches  # noqa: E402
from pipeline.engines.torch.selfcheck import import_runtime  # noqa: E402
from pipeline.engines.torch.toolchain import cxx, resolve_compiler  # noqa: E402
from pipeline.engines.torch.weights import write_weights  # noqa: E402
from pipeline.models import deepseek_v3  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from tests._utils.run_stage import Notes  # noqa: E402
from tests.conftest import Workspace  # noqa: E402

ROOT = Path(__file__).parents[2]
TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
RUNTIME = ROOT / "triton_repo" / "torch" / "1" / "runtime.py"
ARCH = Arch.from_dir(TINY_R1)
TOLERANCE = 3e-4  # float32 on both sides; logits reach 23
LENGTHS = (1, 255, 256, 257)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def make(out: Path, checkpoint: Path = TINY_R1, **settings: Any) -> Path:
    """Run the engine's build on a checkpoint."""
    out.mkdir(parents=True)
    config = Config(engine=EngineConfig(kind="torch", torch=TorchEngineConfig(**settings)))
    inputs = {"convert": checkpoint}
    build.build(StageContext(config=config, inputs=inputs, checkpoint=checkpoint, out=out, progress=Notes()))
    return out


@pytest.fixture(scope="session")
def exported(quick_build: Workspace) -> Path:
    """The one of two layers."""
    return quick_build.latest("engine")


@pytest.fixture(scope="session")
def compiled(cpu_build: Workspace) -> Path:
    """The one that `build +hw=cpu` made."""
    folder = cpu_build.latest("engine")
    if json.loads((folder / "engine.json").read_text())["compiler"] != "aoti":
        pytest.skip("no C++ compiler here, so `build` made the interpreted engine")
    return folder


@pytest.fixture(params=["compiled", "exported"], scope="session")
def engine(request: pytest.FixtureRequest) -> Any:
    return import_runtime(RUNTIME).CompiledEngine.load(request.getfixturevalue(request.param))


@cache
def reference_of(checkpoint: Path) -> deepseek_v3.DeepseekV3:
    return deepseek_v3.build(Arch.from_dir(checkpoint), {name: torch.from_numpy(value) for name, value in dequantized(checkpoint)})


@pytest.fixture(scope="session")
def reference(engine, two_layers: Path) -> deepseek_v3.DeepseekV3:
    return reference_of(two_layers if engine.info["compiler"] == "export" else TINY_R1)


@pytest.fixture(scope="session")
def ids() -> Tensor:
    return torch.randint(3, ARCH.vocab_size, (max(LENGTHS),), generator=torch.Generator().manual_seed(5))


def prefill(engine: Any, tokens: Tensor, first_page: int = 1) -> Tensor:
    pages = torch.arange(first_page, first_page + -(-len(tokens) // engine.info["page_size"]))
    return engine.step(tokens[None], torch.arange(len(tokens))[None], pages[None])[0]


@torch.inference_mode()
def test_every_length_around_the_change_of_form(engine, reference, ids) -> None:
    expected = reference(ids[None])[0]
    for length in LENGTHS:
        assert (prefill(engine, ids[:length]) - expected[length - 1]).abs().max() < TOLERANCE, length


@torch.inference_mode()
def test_decode_of_a_mixed_batch_equals_the_reference(engine, reference, ids) -> None:
    lengths = (1, 40, 64, 257)
    for row, length in enumerate(lengths):
        prefill(engine, ids[:length], 1 + 10 * row)
    tokens, positions = torch.tensor([[7], [8], [9], [10]]), torch.tensor(lengths)[:, None]
    pages = torch.arange(1, 41, dtype=torch.int32).view(4, 10)[:, :9]  # neither int64 nor contiguous
    found = engine.step(tokens, positions, pages)
    for row, length in enumerate(lengths):
        expected = reference(torch.cat([ids[:length], tokens[row]])[None])[0, -1]
        assert (found[row] - expected).abs().max() < TOLERANCE


@torch.inference_mode()
def test_left_padding_is_ignored(engine, reference, ids) -> None:
    tokens, positions = torch.full((3, 20), -1), torch.full((3, 20), -1)
    for row, length in enumerate((1, 13, 20)):
        tokens[row, 20 - length :], positions[row, 20 - length :] = ids[:length], torch.arange(length)
    found = engine.step(tokens, positions, torch.tensor([[3], [1], [2]]))
    assert (found - reference(ids[None, :20])[0, [0, 12, 19]]).abs().max() < TOLERANCE


@pytest.mark.parametrize(("length", "size"), [(5, (1, 8, 3)), (40, (1, 48, 4)), (1, (2, 1, 4))])
@torch.inference_mode()
def test_a_step_of_a_rounded_size_equals_the_step(engine, ids, length: int, size: tuple[int, int, int]) -> None:
    """What is captured on CUDA is first run so, here without a graph."""
    module = import_runtime(RUNTIME)
    step = module.StepGraph(engine._form(*size), size, engine.caches)
    pages = torch.arange(1, 1 + -(-length // engine.info["page_size"]))[None]
    inputs = ids[None, :length], torch.arange(length)[None], pages
    torch.testing.assert_close(step(list(inputs))[:1], engine.step(*inputs), rtol=1e-4, atol=1e-4)


def test_sizes_of_graphs_are_few(engine, monkeypatch) -> None:
    module, most = import_runtime(RUNTIME), 4096
    assert [module._rounded(size, 60) for size in (1, 8, 9, 33, 50, 59)] == [1, 8, 10, 40, 56, 60]
    assert all(size <= module._rounded(size, most) <= max(size, 1.25 * size) for size in range(1, most))
    assert len({module._rounded(size, most) for size in range(1, most)}) == 44
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    monkeypatch.setattr(engine, "info", engine.info | {"max_batch_size": 48, "prefill_chunk": 2048, "max_seq_len": 2048})
    pages = -(-2048 // engine.info["page_size"])
    assert engine._captured_size(5, 1, 3) == (8, 1, pages) and engine._captured_size(33, 1, 3) == (48, 1, pages)
    assert engine._captured_size(1, 300, 11) == (1, 320, 12) and engine._captured_size(2, 300, 11) is None
    assert engine._captured_size(1, 1025, 33) is None
    monkeypatch.setattr(engine, "_graphs", dict.fromkeys(range(128)))
    assert engine._captured_size(1, 300, 11) is None and engine._captured_size(5, 1, 3) == (8, 1, pages)


def test_greedy_text_equals_transformers_token_for_token(compiled, tmp_path) -> None:
    """64 tokens, on the dequantised weights, by an implementation that is not ours."""
    transformers = pytest.importorskip("transformers", reason="the independent implementation to compare with")
    from safetensors.torch import save_file

    table = json.loads((TINY_R1 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in table.items() if k != "quantization_config"}))
    mtp = f"model.layers.{ARCH.num_hidden_layers}."
    state = {k: v.contiguous() for k, v in reference_of(TINY_R1).state_dict().items() if not k.startswith(mtp)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    peer = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = torch.randint(3, ARCH.vocab_size, (1, 300), generator=torch.Generator().manual_seed(6))
    theirs = peer.generate(prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None)[0, 300:]
    engine = import_runtime(RUNTIME).CompiledEngine.load(compiled)
    ours, pages = [int(prefill(engine, prompt[0]).argmax())], torch.arange(1, 13)[None]
    while len(ours) < 64:
        position = torch.tensor([[299 + len(ours)]])
        ours.append(int(engine.step(torch.tensor([ours[-1:]]), position, pages).argmax()))
    assert ours == theirs.tolist()


ALONE = """
import sys
sys.modules |= {"pipeline": None, "plugins": None}  # importing either is an error from here on
sys.path.insert(0, sys.argv[1])
import torch, runtime
engine = runtime.CompiledEngine.load(sys.argv[1])
logits = engine.step(torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), torch.tensor([[1]]))
assert logits.shape == (1, engine.info["vocab_size"]) and logits.isfinite().all()
"""


@pytest.mark.parametrize("kind", ["compiled", "exported"])
def test_runs_where_the_pipeline_is_not(request, tmp_path, kind: str) -> None:
    folder = tmp_path / "1"
    shutil.copytree(request.getfixturevalue(kind), folder)
    shutil.copyfile(RUNTIME, folder / "runtime.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CXX": "/nowhere", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", ALONE, str(folder)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_form_is_the_same_bytes_again(compiled, tmp_path) -> None:
    """In another process and another temporary folder; one form, to save time. Exported ones: tests/integration/test_build.py."""
    for name in ("engine.json", "weights.safetensors"):
        shutil.copyfile(compiled / name, tmp_path / name)
    build.compile_forms(tmp_path, json.loads((compiled / "engine.json").read_text()) | {"forms": ["absorbed"]})
    assert (tmp_path / "absorbed.pt2").read_bytes() == (compiled / "absorbed.pt2").read_bytes()


def test_nothing_in_an_engine_names_a_folder_of_this_machine(compiled, exported) -> None:
    roots = {str(ROOT), sys.prefix, str(Path(torch.__file__).parents[1]), str(Path.home()) + "/", "/tmp/"}
    for file in [*compiled.iterdir(), *exported.iterdir()]:
        content = file.read_bytes()
        assert not [root for root in roots if root.encode() in content], file


def test_an_engine_that_says_something_else_is_not_published(compiled, tmp_path, monkeypatch) -> None:
    """The check runs the runtime; one whose logits are off stands for a wrong compilation."""
    (tmp_path / "torch" / "1").mkdir(parents=True)
    wrong = RUNTIME.read_text().replace("return self._form(", "return 1.01 * self._form(")
    assert wrong != RUNTIME.read_text()
    (tmp_path / "torch" / "1" / "runtime.py").write_text(wrong)
    monkeypatch.setattr(build, "share", lambda name: tmp_path)
    with pytest.raises(StageError, match=r"not published: compiled and eager logits differ by 1.0e-02"):
        build.check(compiled)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "1.2.3"}, r"compiled with torch 1\.2\.3, but torch .* install 1\.2\.3, or build it again"),
        ({"cpu_features": ["avx9000"]}, "processor with avx9000, which this one lacks"),
        ({"weights": {}}, "differ in .* weights"),
    ],
)
def test_a_machine_or_file_that_does_not_fit_is_refused(exported, tmp_path, change, words: str) -> None:
    info = json.loads((exported / "engine.json").read_text())
    (tmp_path / "engine.json").write_text(json.dumps(info | change))
    os.link(exported / "weights.safetensors", tmp_path / "weights.safetensors")
    with pytest.raises(RuntimeError, match=words):
        import_runtime(RUNTIME).CompiledEngine.load(tmp_path)


def test_weights_of_another_type_are_refused_before_they_crash(compiled, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    weights = load_file(compiled / "weights.safetensors")
    (tmp_path / "weights.safetensors").unlink()
    save_file(weights | {"head.weight": weights["head.weight"].bfloat16()}, tmp_path / "weights.safetensors")
    with pytest.raises(RuntimeError, match=r"head\.weight .* \['bfloat16', \[1024, 256\]\], but the engine needs"):
        import_runtime(RUNTIME).CompiledEngine.load(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "positions", "pages", "words"),
    [
        ([[1024]], [[0]], [[1]], "Token 1024 is out of range"),
        ([[-1]], [[0]], [[1]], "Token -1 is out of range"),
        ([[1]], [[32]], [[1]], "Position 32 is out of range"),
        ([[1]], [[-1]], [[1]], "Last position -1 is out of range"),
        ([[1]], [[0]], [[100000]], "Page 100000 is out of range"),
        ([[1]] * 9, [[0]] * 9, [[1]] * 9, "9 rows; this engine was built for 1 to 8"),
        ([[1] * 513], [[0] * 513], [[1]], "513 tokens a row; this engine was built for 1 to 512"),
        ([[1]], [[0, 1]], [[1]], "must be"),
    ],
)
def test_steps_out_of_bounds_are_refused(engine, tokens, positions, pages, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine.step(*(torch.tensor(value) for value in (tokens, positions, pages)))


def test_threads_that_call_the_engine_are_limited(engine, monkeypatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(engine, "threads", wanted := torch.get_num_threads() + 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(prefill, engine, torch.tensor([5])).result()
        assert pool.submit(torch.get_num_threads).result() == wanted


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"max_seq_len": 4096}, ConfigError, "max_seq_len=4096 exceeds the 2048 positions"),
        ({"max_batch_size": 10**6}, ConfigError, r"GB of it KV cache in float32\), but cpu has .* lower engine.torch.max_bat"),
    ],
)
def test_what_cannot_be_built_is_refused_first(tmp_path, settings, error, words: str) -> None:
    with pytest.raises(error, match=words):
        make(tmp_path / "engine", compiler="export", **settings)
    assert not list((tmp_path / "engine").iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(tmp_path) -> None:
    with pytest.raises(MissingToolError, match="needs a GPU that torch sees"):
        make(tmp_path / "engine", device="cuda", compiler="export")


@torch.inference_mode()
def test_limits_of_one_leave_no_dimension_open(exported, two_layers, ids) -> None:
    """One row of one page, and no expanded form."""
    settings = TorchEngineConfig(compiler="export", max_batch_size=1, max_seq_len=32, prefill_chunk=2)
    info = build.describe(Arch.from_dir(two_layers), settings, two_layers)
    assert info["forms"] == ["absorbed"] and info["num_pages"] == 2
    program = export_form(load_decoder(exported, "absorbed"), "absorbed", info)
    found = program.module()(ids[None, :2], torch.tensor([[0, 1]]), torch.tensor([[1]]), new_caches(info))
    assert (found - reference_of(two_layers)(ids[None, :2])[:, -1]).abs().max() < TOLERANCE


def test_without_a_compiler_auto_exports_and_aoti_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    cxx.cache_clear()
    try:
        assert resolve_compiler("auto") == "export"
        with pytest.raises(MissingToolError, match=r"/nowhere/g\+\+ is not on PATH .*: apt-get install g\+\+ .*compiler=export"):
            resolve_compiler("aoti")
    finally:
        cxx.cache_clear()


def test_toolchain_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from pipeline.config.schema import Config, EngineConfig, TorchEngineConfig\n"
        "from pipeline.stages.engine import STAGE\n"
        "print(STAGE.toolchain(Config(engine=EngineConfig(kind='torch', torch=TorchEngineConfig())))['torch'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().split("+")[0] == torch.__version__.split("+")[0]


def plan_of(arch: Arch) -> dict[str, tuple[str, tuple[int, ...]]]:
    return build.stored_as(build.weight_table(arch, TorchEngineConfig(), {"taken": [], "experts": None, "products": []}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [row for row in rows if "layers.3.mlp.experts.7.up_proj" not in row[0]],
         r"lacks 1 of the engine's \d+ weights, layers\.3\.mlp\.gate_up\.weight among them \(found: .*experts\.7\.gate_proj"),
        (lambda rows: [row for row in rows if row[0] != "lm_head.weight"], r"head\.weight among them \(found: none"),
        (lambda rows: [*rows, ("model.layers.0.mlp.extra.weight", rows[0][1])], "mlp.extra.weight of a layer has no place"),
        (lambda rows: [*rows, ("visual.proj.weight", rows[0][1])], "another model's checkpoint"),
        (lambda rows: [(name, value[:-1] if name == "model.norm.weight" else value) for name, value in rows],
         r"model\.norm\.weight has the shape \[255\] where the engine needs \[256\]"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, change, words: str) -> None:
    with pytest.raises(StageError, match=words):
        write_weights(change(list(dequantized(TINY_R1))), ARCH, plan_of(ARCH), tmp_path / "weights.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_config_of_another_model_is_refused(tmp_path) -> None:
    other = replace(ARCH, first_k_dense_replace=2)
    with pytest.raises(StageError, match="do not belong together"):
        write_weights(dequantized(TINY_R1), other, plan_of(other), tmp_path / "weights.safetensors")
