"""The runtime of native TensorRT engines, under the real scheduler; the engines are interpreted, as there is no GPU (`_utils`)."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorrt_rtx_bindings", reason="it defines the networks: pip install 'r1-pipeline[rtx]'")
torch = pytest.importorskip("torch", reason="the runtime is in torch")

from pipeline.checkpoint import dequantized  # noqa: E402
from pipeline.config.load import load  # noqa: E402
from pipeline.core.jsonio import write_json  # noqa: E402
from pipeline.core.stage import StageContext  # noqa: E402
from pipeline.engines.tensorrt.networks import name_of, networks  # noqa: E402
from pipeline.models import deepseek_v3  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from tests._utils import fake_tensorrt, random_checkpoint, serving  # noqa: E402, F401
from tests._utils.interpreted_runner import InterpretedRanks  # noqa: E402
from tests._utils.run_stage import Notes  # noqa: E402

from scheduler import FinishEvent, Limits, Request, Scheduler  # isort: skip  # noqa: E402  (serving puts it on the path)

ROOT = Path(__file__).parents[2]
TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
ARCH = Arch.from_dir(TINY_R1)
WORDS = ("+hw=rtx_pro_6000", "engine=tensorrt", "engine.tensorrt.dtype=float32", "engine.tensorrt.max_seq_len=48",
         "engine.tensorrt.prefill_chunk=8", "engine.tensorrt.max_batch_size=3", "engine.tensorrt.mtp=false")  # fmt: skip


def runtime() -> Any:
    spec = importlib.util.spec_from_file_location("tensorrt_runtime", ROOT / "triton_repo" / "tensorrt" / "1" / "runtime.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def engine_json(*words: str, arch: Arch = ARCH) -> dict[str, Any]:
    """What a build writes, as far as the runtime reads it."""
    specs = networks(load([*WORDS, *words]), arch)
    engines = {name_of(spec): spec.plain() for spec in specs}
    return {
        "ranks": specs[0].ranks, "parallel": specs[0].parallel, "mtp": specs[0].mtp, "hidden_size": ARCH.hidden_size,
        "max_batch_size": 3, "max_seq_len": 48, "prefill_chunk": 8, "expanded_from": 2, "vocab_size": ARCH.vocab_size,
        "latent_dim": ARCH.latent_dim, "num_layers": arch.num_hidden_layers, "engines": engines, "targets": ["SM120"],
        "library": "tensorrt_rtx", "version": "1.7.1.116", "dtype": "float32", "weight_files": {}, "eos_token_ids": [],
    }  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return engine_of(tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense and a MoE layer, and the MTP layer."""
    return random_checkpoint.write(tmp_path_factory.mktemp("two_layers"), {"num_hidden_layers": 2})


def engine_of(scratch: Path, *words: str, checkpoint: Path = TINY_R1) -> Any:
    info = engine_json(*words, arch=Arch.from_dir(checkpoint))
    return runtime().CompiledEngine(info, InterpretedRanks(info, checkpoint, scratch))


def test_continuous_batching_gives_each_request_the_reference_model_s_tokens(engine) -> None:
    """More requests than rows, prompts of one token to several chunks, answers of different lengths: rows are used again."""
    serve(engine, ((1, 3), (20, 2), (9, 4), (8, 1), (13, 3)))
    shapes = set(engine._ranks.runners[0].steps)
    assert ("absorbed", (3, 1)) in shapes and ("expanded", (1, 8)) in shapes and ("expanded", (1, 4)) in shapes
    assert {shape for form, shape in shapes if form == "absorbed"} == {(3, 1)}  # one CUDA graph


@pytest.mark.parametrize("words", [
    ("parallel.tp=2", "engine.tensorrt.exchange=all_to_all"),
    ("parallel.tp=2", "parallel.attention_dp=false"),
])  # fmt: skip
def test_ranks_together_give_the_tokens_of_one(tmp_path, small, words) -> None:
    """Attention data parallelism has rows on every rank, tensor parallelism the same ones on all."""
    engine = engine_of(tmp_path, *words, checkpoint=small)
    adp = engine.info["parallel"] == "adp"
    assert engine.info["max_batch_size"] == (6 if adp else 3)
    serve(engine, ((1, 2), (11, 2), (9, 3), (5, 1)), checkpoint=small)
    mine, theirs = (runner.steps for runner in engine._ranks.runners)
    assert mine == theirs and ("absorbed", (3, 1)) in mine
    prefills = [shape for form, shape in mine if form == "expanded"]
    assert len(prefills) == (3 if adp else 4)  # 1 and 8 of 11; 3 more and 8 of 9; 1 more and 5: of two ranks side by side


def test_drafts_change_how_many_steps_there_are_and_no_token(tmp_path) -> None:
    """Of more requests than run at once; one ends at its limit in the middle of an accepted pair."""
    engine = engine_of(tmp_path, "engine.tensorrt.mtp=true")
    stats = serve(engine, ((1, 5), (11, 6), (9, 3), (8, 2), (13, 1)), text=True)
    assert stats.drafted > stats.accepted > 0
    decodes = [shape for form, shape in engine._ranks.runners[0].steps if shape == (3, 2) and form == "absorbed"]
    assert len(decodes) % 2 == 0 and stats.tokens == 17  # a drafted step runs the MTP layer and the model
    with pytest.raises(ValueError, match="Position of a drafted step 47 is out of range"):
        engine.speculate(*(torch.tensor([[value]]) for value in (5, 47, 1)))


def test_tokens_that_miss_experts_are_told_in_the_log(tmp_path, small, capfd) -> None:
    words = ("parallel.tp=2", "engine.tensorrt.exchange=all_to_all", "engine.tensorrt.exchange_share=0.25")
    engine = engine_of(tmp_path, *words, checkpoint=small)
    engine.step(torch.arange(5, 13)[None], torch.arange(8)[None], torch.tensor([[1]]))
    counts = [int(line.split()[0]) for line in capfd.readouterr().err.splitlines() if "times a token has missed an expert" in line]
    assert sorted(counts) == sorted(int(runner.dropped) for runner in engine._ranks.runners) and max(counts) > 3


def test_a_row_that_draws_at_random_has_the_same_tokens_with_drafts(tmp_path, small) -> None:
    from sampler import Sampling

    def drawn(*words: str) -> list[int]:
        engine, tokens = engine_of(tmp_path, *words, checkpoint=small), []
        scheduler = Scheduler(engine, Limits.of(engine.info, 10))
        scheduler.submit(Request(1, [5, 6, 7, 8, 9], 6, collect(tokens), sampling=Sampling(temperature=0.8, seed=3)))
        while scheduler.stats().running or scheduler.stats().waiting:
            scheduler.iterate()
        assert scheduler.stats().drafted == 0
        return tokens

    assert drawn("engine.tensorrt.mtp=true") == drawn()


def serve(engine: Any, requests: Any, *, text: bool = False, checkpoint: Path = TINY_R1) -> Any:
    """Requests of (prompt, answer) tokens through the scheduler; their tokens must be the reference model's."""
    model = reference(checkpoint)
    scheduler, random = Scheduler(engine, Limits.of(engine.info, 10)), torch.Generator().manual_seed(3)
    wanted, found = {}, {}
    for number, (length, count) in enumerate(requests):
        prompt = text_ids()[7 * number :][:length] if text else torch.randint(3, ARCH.vocab_size, (length,), generator=random)
        wanted[number], found[number] = greedy(model, prompt, count), []
        scheduler.submit(Request(number, prompt.tolist(), count, collect(found[number])))
    while scheduler.stats().running or scheduler.stats().waiting:
        scheduler.iterate()
    assert found == wanted
    return scheduler.stats()


@cache
def reference(checkpoint: Path) -> Any:
    torch.set_num_threads(1)
    return deepseek_v3.build(Arch.from_dir(checkpoint), {name: torch.from_numpy(value) for name, value in dequantized(checkpoint)})


def text_ids() -> Any:
    """Tokens of a text that the model knows something about."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY_R1 / "tokenizer.json"))
    return torch.tensor(tokenizer.encode((TINY_R1 / "heldout.txt").read_text()[:2000], add_special_tokens=False).ids)


def greedy(model: Any, prompt: Any, count: int) -> list[int]:
    ids = prompt[None]
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def collect(tokens: list[int]) -> Any:
    def on_event(event: Any) -> bool:
        assert not isinstance(event, FinishEvent) or event.reason == "length", event
        if not isinstance(event, FinishEvent):
            tokens.append(event.token)
        return False

    return on_event


def test_padding_on_the_left_is_ignored(engine) -> None:
    tokens = torch.tensor([[-1, -1, 5, 6, 7], [1, 2, 3, 4, 5]])
    positions = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]])
    both = engine.step(tokens, positions, torch.tensor([[2], [3]]))
    alone = engine.step(tokens[:1, 2:], positions[:1, 2:], torch.tensor([[1]]))
    assert torch.equal(both[:1], alone) and not torch.equal(both[:1], both[1:])


@pytest.mark.parametrize(
    ("tokens", "positions", "pages", "sentence"),
    [
        ([[5000]], [[0]], [[1]], "Token 5000 is out of range"),
        ([[5]], [[48]], [[1]], "Position 48 is out of range"),
        ([[5]], [[0]], [[4]], "Page 4 is out of range"),
        ([[5]], [[0]], [[0]], "Page 0 is out of range"),
        ([[5], [5]], [[0], [0]], [[1], [1]], "Two rows of a step have the same page"),
        ([[5] * 9], [list(range(9))], [[1]], "A step has 9 tokens a row; these engines were built for 1 to 8"),
        ([[5]], [[0]], [[1, 2]], "they must be"),
    ],
)
def test_what_engines_would_read_out_of_bounds_is_refused(engine, tokens, positions, pages, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine.step(torch.tensor(tokens), torch.tensor(positions), torch.tensor(pages))


def test_the_runner_binds_what_engines_read_and_write(tmp_path, small, monkeypatch) -> None:
    """The code that runs on a GPU, over doubles of TensorRT's API and of CUDA: addresses, shapes, caches in place, segments."""
    code, words = importlib.import_module("tensorrt_runner"), ("engine.tensorrt.mtp=true", "engine.tensorrt.layers_per_engine=1")
    info = engine_json(*words, arch=Arch.from_dir(small))
    interpreters = fake_tensorrt.write_engines(tmp_path, info, small)
    (tmp_path / "engine.json").write_text(json.dumps(info))
    for name, value in fake_tensorrt.CUDA.items():
        monkeypatch.setattr(code.torch.cuda, name, value)
    monkeypatch.setattr(code, "DEVICE", "cpu")
    monkeypatch.setattr(code, "_Graph", fake_tensorrt.Graph)
    monkeypatch.setattr(code, "_library", lambda info: fake_tensorrt.FakeTensorrt(info, interpreters))
    stats = serve(runtime().CompiledEngine.load(tmp_path), ((1, 3), (11, 4), (9, 2)), checkpoint=small)
    assert stats.tokens == 9 and stats.drafted > 0


def test_results_cross_processes_in_memory_that_both_map() -> None:
    import os

    from ranks import Results

    shared = os.memfd_create("results")
    os.ftruncate(shared, size := Results.size({"max_batch_size": 3, "vocab_size": 7}))
    mine, theirs = Results(shared, size), Results(shared, size)
    sent = torch.arange(42, dtype=torch.float32).view(6, 7), torch.tensor([1, 2, 3], dtype=torch.int32)
    got = theirs.take(mine.put(sent))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, sent, strict=True))


def test_a_communicator_is_given_as_a_capsule() -> None:
    import ctypes

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert pointer(importlib.import_module("tensorrt_runner")._capsule(4096), None) == 4096


def test_a_machine_that_the_engines_do_not_cover_is_refused(tmp_path, monkeypatch) -> None:
    module, info = runtime(), engine_json()
    code = importlib.import_module("tensorrt_runner")
    (tmp_path / "engine.json").write_text(json.dumps(info))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="built for SM120, but torch sees no GPU here"):
            module.CompiledEngine.load(tmp_path)
    cuda = SimpleNamespace(
        is_available=lambda: True, get_device_capability=lambda _: (9, 0), get_device_name=lambda _: "NVIDIA H200",
        device_count=lambda: 4, set_device=lambda _: None, Stream=object,
    )  # fmt: skip
    monkeypatch.setattr(code.torch, "cuda", cuda)
    with pytest.raises(RuntimeError, match=r"built for SM120; NVIDIA H200 is SM90: build them for"):
        module.CompiledEngine.load(tmp_path)
    cuda.get_device_capability = lambda device: (12, 0)
    (tmp_path / "engine.json").write_text(json.dumps(info | {"version": "1.6.0"}))
    with pytest.raises(RuntimeError, match=r"built by tensorrt_rtx 1\.6\.0; .* is here: install the same"):
        module.CompiledEngine.load(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps(info | {"ranks": 8}))
    with pytest.raises(RuntimeError, match="of 8 ranks, one a GPU, but torch sees 4 here"):
        module.CompiledEngine.load(tmp_path)
    cuda.device_count, cuda.get_device_capability = (lambda: 8), lambda device: (12, 0) if device < 7 else (9, 0)
    with pytest.raises(RuntimeError, match="NVIDIA H200 is SM90"):
        module.CompiledEngine.load(tmp_path)


def test_what_engines_launch_from_python_is_registered_first(monkeypatch) -> None:
    runtime()
    code, known = importlib.import_module("tensorrt_runner"), []
    host = {"moe_fp8_block": "plugins.moe_grouped_gemm.trt", "mla_decode": "plugins.mla_decode.trt"}
    engines = {"a": {"plugins": {"host": host}}, "b": {"plugins": None}, "c": {}}
    monkeypatch.setattr("plugins.trt_class.register_creator", lambda trt, plugin: known.append((trt, plugin.name)))
    code.register_plugins("tensorrt", {"engines": engines})
    assert known == [("tensorrt", "mla_decode"), ("tensorrt", "moe_fp8_block")]
    for module in ("plugins.other.trt", "plugins.mla_decode.trt"):
        with pytest.raises(RuntimeError, match=rf"launch other from Python, but {module} has it not here"):
            code.register_plugins("tensorrt", {"engines": {"a": {"plugins": {"host": {"other": module}}}}})


def test_the_repository_has_the_scheduler_over_this_runtime(tmp_path) -> None:
    from pipeline.triton.check import check_repository
    from pipeline.triton.layouts.tensorrt import layout

    (tmp_path / "engine" / "engines").mkdir(parents=True)
    write_json(tmp_path / "engine" / "engine.json", engine_json())
    (tmp_path / "engine" / "engines" / "rank0_absorbed.engine").write_bytes(b"vtrt")
    out = tmp_path / "out"
    (out / "repository").mkdir(parents=True)
    inputs = {"engine": tmp_path / "engine"}
    ctx = StageContext(config=load(WORDS), inputs=inputs, checkpoint=None, out=out, progress=Notes())
    layout(ctx)
    assert list(check_repository(out / "repository")) == ["tiny_r1"]
    version = out / "repository" / "tiny_r1" / "1"
    assert "RankGroup" in (version / "runtime.py").read_text() and (version / "scheduler.py").is_file()
    assert (version / "ranks.py").is_file() and (version / "tensorrt_runner.py").is_file()
    assert (version / "engines" / "rank0_absorbed.engine").is_file()
