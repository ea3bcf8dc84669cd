"""Plugins in the compiled torch engine, in their CPU forms: the same text, what is taken and what is not, and what is carried."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is compiled by torch")

from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

from pipeline.config.load import load  # noqa: E402
from pipeline.config.schema import Config, EngineConfig, TorchEngineConfig  # noqa: E402
from pipeline.core.errors import StageError  # noqa: E402
from pipeline.core.key import key_parts  # noqa: E402
from pipeline.core.stage import StageContext  # noqa: E402
from pipeline.engines.torch import build, choose  # noqa: E402
from pipeline.engines.torch.carry import PLUGINS, sources  # noqa: E402
from pipeline.engines.torch.export import export_form  # noqa: E402
from pipeline.engines.torch.graph import Decoder, Form  # noqa: E402
from pipeline.engines.torch.plugged import EXPERTS, ops  # noqa: E402
from pipeline.engines.torch.weights import parameters, write_weights  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from pipeline.planner import torch_limits  # noqa: E402
from pipeline.stages.engine import STAGE  # noqa: E402
from pipeline.triton.check import check_repository  # noqa: E402
from pipeline.triton.layouts.torch import write_repository  # noqa: E402
from plugins import nvrtc  # noqa: E402
from plugins.gemm_tactics import tactics  # noqa: E402
from tests._utils import random_checkpoint, serving  # noqa: E402
from tests._utils.run_stage import Notes, convert, recipe  # noqa: E402

ROOT = Path(__file__).parents[2]
TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
RUNTIME = ROOT / "triton_repo" / "torch" / "1"
ARCH = Arch.from_dir(TINY_R1)
TOKENIZER = Tokenizer.from_file(str(TINY_R1 / "tokenizer.json"))
PAGE, PAGES, PROMPT, TOKENS, BEGIN = 32, 4, 70, 8, 617
"""The text continues so surely that no rounding changes it: the second best logits are 4 below the best, of 14."""
ATTENTION = ["fused_qkv_a", "mla_absorb", "mla_decode", "mla_prefill", "router_gemm", "topk_router"]
OFF: dict[str, Any] = {"taken": [], "left": {}, "experts": None, "products": []}
R1 = replace(
    ARCH, hidden_size=7168, moe_intermediate_size=2048, num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512,
    n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
)  # fmt: skip


def plugins(experts: str | None = None) -> dict[str, Any]:
    """All of them; `moe_grouped_gemm` for experts that stay in a format."""
    taken = [*ATTENTION, "gemm_tactics", *(["moe_grouped_gemm"] if experts else [])]
    return OFF | {"taken": taken, "experts": experts, "products": [[ARCH.hidden_size, ARCH.intermediate_size]]}


def decoder(checkpoint: Path, folder: Path, chosen: dict[str, Any], form: Form = "absorbed", dtype: str = "bfloat16") -> Decoder:
    """The eager graph, with its weights."""
    from safetensors.torch import load_file

    arch, settings = Arch.from_dir(checkpoint), TorchEngineConfig(dtype=dtype, page_size=PAGE)
    path = folder / f"{checkpoint.name}-{dtype}-{chosen['experts']}-{len(chosen['taken'])}.safetensors"
    if not path.exists():
        plan = build.stored_as(build.weight_table(arch, settings, chosen))
        write_weights(parameters(checkpoint, chosen["experts"]), arch, plan, path)
    with torch.device("meta"):
        module = Decoder(arch, form, PAGE, getattr(torch, dtype), ops(chosen))
    module.load_state_dict(load_file(path), strict=True, assign=True)
    return module.eval()


def caches(layers: int = ARCH.num_hidden_layers, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.zeros(PAGES + 1, PAGE, ARCH.latent_dim, dtype=dtype) for _ in range(layers)]


@torch.inference_mode()
def write(prefill: Decoder, decode: Decoder) -> tuple[list[int], Tensor]:
    """Greedy tokens after the first ones of a text, and their logits."""
    tokens = torch.tensor(TOKENIZER.encode((TINY_R1 / "heldout.txt").read_text()).ids[BEGIN : BEGIN + PROMPT])[None]
    pages, cache, text, rows = torch.tensor([[3, 1, 4]]), caches(), [], []
    logits = prefill(tokens, torch.arange(PROMPT)[None], pages, cache)
    for position in range(PROMPT, PROMPT + TOKENS):
        rows.append(logits[0])
        text.append(int(logits.argmax()))
        logits = decode(torch.tensor([text[-1:]]), torch.tensor([[position]]), pages, cache)
    return text, torch.stack(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of two layers."""
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    return random_checkpoint.write(folder, {"num_hidden_layers": 2, "num_nextn_predict_layers": 0})


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[int], Tensor]:
    return write(decoder(TINY_R1, folder, OFF, "expanded"), decoder(TINY_R1, folder, OFF))


def test_tokens_with_plugins_equal_those_without(folder, plain) -> None:
    text, logits = write(decoder(TINY_R1, folder, plugins(), "expanded"), decoder(TINY_R1, folder, plugins()))
    assert text == plain[0]
    assert (logits - plain[1]).norm() / plain[1].norm() < 0.03


def test_experts_that_stay_fp8_write_the_same_tokens(folder, plain) -> None:
    chosen = plugins("fp8_block")
    text, logits = write(*[decoder(TINY_R1, folder, chosen)] * 2)
    assert text == plain[0]
    assert (logits - plain[1]).norm() / plain[1].norm() < 0.08  # activations are rounded to 3 bits of mantissa


def test_logits_are_as_near_to_float32_as_those_without_plugins(folder, small) -> None:
    """Random routes are near ties, so rounding to BF16 changes some of them, with plugins and without."""
    texts = torch.randint(3, ARCH.vocab_size, (4, 2, 48), generator=torch.Generator().manual_seed(7))
    positions, pages = torch.arange(48).expand(2, 48), torch.tensor([[1, 3], [4, 2]])

    @torch.inference_mode()
    def logits(chosen: dict[str, Any], dtype: str) -> Tensor:
        module, cache = decoder(small, folder, chosen, dtype=dtype), caches(2, getattr(torch, dtype))
        starts = [tokens[:, :end] for tokens in texts for end in (1, 20, 33, 48)]
        return torch.cat([module(start, positions[:, : start.shape[1]], pages, cache) for start in starts])

    exact, without, plugged = logits(OFF, "float32"), logits(OFF, "bfloat16"), logits(plugins(), "bfloat16")
    errors = [((found - exact).norm(dim=1) / exact.norm(dim=1)).median().item() for found in (without, plugged)]
    assert errors[1] < 1.25 * errors[0] < 0.05, errors  # of most rows: another route is an error of up to 0.8


def test_experts_that_stay_nvfp4_are_those_that_were_converted(tmp_path, small) -> None:
    checkpoint = convert(small, tmp_path, recipe("bf16", routed_experts="w4a16_nvfp4"))
    tokens, positions = torch.arange(5, 25)[None], torch.arange(20)[None]
    with torch.inference_mode():
        logits = [
            decoder(checkpoint, tmp_path, chosen)(tokens, positions, torch.tensor([[1]]), caches(2))
            for chosen in (OFF, plugins("w4a16_nvfp4"))
        ]
    assert (logits[1] - logits[0]).norm() / logits[0].norm() < 0.03


def test_gate_and_up_of_different_scales_are_refused(tmp_path, small) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = convert(small, tmp_path, recipe("bf16", routed_experts="w4a16_nvfp4"))
    for shard in checkpoint.glob("*.safetensors"):
        tensors = {name: value.clone() for name, value in load_file(shard).items()}
        for name in tensors:
            if name.endswith("experts.3.up_proj.weight_scale_2"):
                tensors[name] *= 2
        save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(StageError, match=r"experts\.3\.up_proj has weight_scale_2=.* and its gate .* engine.torch.plugins=off"):
        list(parameters(checkpoint, "w4a16_nvfp4"))


def test_a_graph_of_plugins_can_be_recorded(folder, small) -> None:
    """In the expanded form; `engine` below records the other, and its build's check compares it."""
    module = decoder(small, folder, plugins("fp8_block"), "expanded")
    info = {
        "dtype": "bfloat16", "kv_dtype": "bfloat16", "device": "cpu",
        "max_seq_len": 128, "page_size": PAGE, "max_batch_size": 4, "prefill_chunk": 64,
        "num_layers": 2, "num_pages": PAGES + 1, "latent_dim": ARCH.latent_dim,
    }  # fmt: skip
    with torch.no_grad():
        recorded = export_form(module, "expanded", info).module()
    inputs = torch.arange(7, 19)[None], torch.arange(-2, 10).clamp(min=-1)[None], torch.tensor([[2, 3]])
    first, second = caches(2), caches(2)
    with torch.inference_mode():
        assert torch.equal(recorded(*inputs, first), module(*inputs, second))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert any(layer[2, 0].any() for layer in first)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are asked about tensors that seem to lie on such a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = choose.blank

    def blank(*shape: int, device: str = "cuda:0") -> Tensor:
        with FakeTensorMode() if device == "cuda:0" else nullcontext():
            return plain(*shape, device=device)

    monkeypatch.setattr(choose, "blank", blank)
    monkeypatch.setattr(choose, "library", tactics.library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_r1_takes_all_on_hopper(hopper) -> None:
    found = choose.choose(R1, TorchEngineConfig(device="cuda", dtype="bfloat16"), TINY_R1)
    products = found.pop("products")
    assert found == {"taken": sorted([*ATTENTION, "gemm_tactics", "moe_grouped_gemm"]), "left": {}, "experts": "fp8_block"}
    assert [24576, 1536] in products and [R1.vocab_size, 7168] not in products
    assert {tuple(shape) for shape in products} <= tactics.products(*tactics.library())


@pytest.mark.parametrize(("here", "why"), [(("NVIDIA H200", 1), "with cuBLASLt 1"), (None, "no algorithm for a product")])
def test_a_tactic_file_of_another_library_or_model_is_left(hopper, monkeypatch, here: tuple[str, int] | None, why: str) -> None:
    monkeypatch.setattr(choose, "library", lambda: here or tactics.library())
    found = choose.choose(R1 if here else ARCH, TorchEngineConfig(device="cuda", dtype="bfloat16"), TINY_R1)
    assert why in found["left"]["gemm_tactics"] and found["products"] == []


def test_products_of_the_tactic_file_are_those_of_its_op(small, folder) -> None:
    """Decode calls it for the shapes that engine.json lists (here o of both layers, and the dense down), long chunks never."""
    chosen = OFF | {"taken": ["gemm_tactics"], "products": [[ARCH.hidden_size, ARCH.intermediate_size]]}
    inputs = torch.arange(5, 25)[None], torch.arange(20)[None], torch.tensor([[1]])
    for form, calls in (("absorbed", 3), ("expanded", 0)):
        module = decoder(small, folder, chosen, form)
        with torch.inference_mode(), torch.profiler.profile() as profile:
            logits = module(*inputs, caches(2))
        assert sum(event.name == "r1_pipeline::tuned_linear" for event in profile.events()) == calls
        assert torch.equal(logits, decoder(small, folder, OFF, form)(*inputs, caches(2)))


@pytest.mark.parametrize(
    ("settings", "taken", "ends"),
    [
        ({}, ATTENTION, (13, 49)), ({"max_seq_len": 4096}, ATTENTION, (13, 182)),
        ({}, [], (256, 256)), ({"expanded_from": 7}, ATTENTION, (7, 7)), ({"kv_dtype": "fp8"}, ATTENTION, (20, 77)),
    ],
)  # fmt: skip
def test_the_expanded_form_starts_where_it_was_measured_faster(monkeypatch, settings, taken: list[str], ends: tuple[int, int]):
    known = {"bf16": {256: 13, 4096: 182}, "fp8": {256: 20, 4096: 300}}
    monkeypatch.setattr(build.crossover, "_crossings", known.get)
    build.crossover.expanded_from.cache_clear()
    settings = TorchEngineConfig(device="cuda", dtype="bfloat16", **settings)
    assert settings.page_size == 64 and TorchEngineConfig().page_size == 32
    found = build.expanded_from(settings, taken)
    assert (found[0], found[-1]) == ends and found == sorted(found) and len(found) == settings.max_seq_len // 64
    build.crossover.expanded_from.cache_clear()


def test_what_is_not_taken_says_why(hopper, monkeypatch) -> None:
    settings = TorchEngineConfig(device="cuda", dtype="bfloat16", page_size=32)
    found = choose.choose(ARCH, settings, TINY_R1)
    assert found["left"]["router_gemm"].endswith("and experts of 32; this model has 256 and 16.")
    assert "page_size in multiples of 64; here are sm_90, heads=4, kv_lora_rank=128" in found["left"]["mla_decode"]
    assert set(found["taken"]) | set(found["left"]) == set(choose.RULES)
    notes = Notes()
    build.tell_plugins(SimpleNamespace(progress=notes), found)
    assert notes.notes[0].startswith("plugins: ") and len(notes.notes) == 1 + len(found["left"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    newer = choose.choose(R1, replace(settings, page_size=64), TINY_R1)
    assert newer["taken"] == ["fused_qkv_a", "gemm_tactics", "router_gemm", "topk_router"] and newer["experts"] is None
    assert all("sm_100" in why or "surrounds" in why for why in newer["left"].values())
    monkeypatch.setattr(choose, "formats", lambda *_: {"routed_experts": {"bf16"}, "router": {"F32"}})
    other = choose.choose(R1, settings, TINY_R1)["left"]
    assert "this checkpoint's are bf16: convert it with quant=fp8_block" in other["moe_grouped_gemm"]
    assert "this checkpoint's are F32" in other["router_gemm"]


@pytest.mark.parametrize(("settings", "word"), [({}, "this engine is for the CPU"), ({"plugins": "off"}, "plugins=off")])
def test_without_cuda_or_by_configuration_none_is_taken(settings, word: str) -> None:
    found = choose.choose(R1, TorchEngineConfig(**settings), TINY_R1)
    assert found["taken"] == [] and all(word in why for why in found["left"].values())


def test_the_key_has_the_plugins_code_where_they_may_be_taken() -> None:
    def code(*words: str) -> set[str]:
        return set(key_parts(STAGE, load(["+hw=h200", "engine=torch", *words]), {})["code"])

    cuda = ["engine.torch.device=cuda", "engine.torch.dtype=bfloat16"]
    assert set(PLUGINS) == set(choose.RULES)
    needed = set(sources(PLUGINS))
    decoding = {f"plugins/mla_decode/{name}" for name in ("sm90_kernel.cu", "expand.cuh", "fp8.py", "sm90_fp8.cu", "combine.cu")}
    assert decoding | {"plugins/nvrtc.py", "pipeline/core/errors.py"} <= needed
    assert {"plugins/gemm_tactics/tactics.json", "plugins/numerics.cuh"} <= needed
    assert not {"plugins/bench.py", "plugins/reads.cu"} & needed, "benchmarks change without engines"
    assert {name for name in needed if name.startswith("plugins/")} <= code(*cuda)
    assert "plugins/mla_decode/sm90_kernel.cu" not in code() | code(*cuda, "engine.torch.plugins=off")


ALONE = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import torch, runtime
engine = runtime.CompiledEngine.load(sys.argv[1])
logits = engine.step(torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), torch.tensor([[1]]))
assert logits.shape == (1, engine.info["vocab_size"]) and logits.isfinite().all()
import plugins.mla_decode.op, pipeline.core.errors
assert plugins.mla_decode.op.__file__.startswith(sys.argv[1])
print(sorted(name for name in sys.modules if name.startswith("pipeline")))
for name in ("topk_router/op.py", "moe_grouped_gemm/launch.py", "router_gemm/sm90_many.cu", "nowhere.py"):
    other = engine.info["plugins"] | {"sources": engine.info["plugins"]["sources"] | {"plugins/" + name: "0" * 64}}
    try:
        runtime._load_ops(pathlib.Path(sys.argv[1], "ops"), other)
    except RuntimeError as error:
        print(error, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """An engine of two layers, exported, all plugins taken."""
    base = tmp_path_factory.mktemp("engine")
    settings = TorchEngineConfig(compiler="export", dtype="bfloat16", max_batch_size=2, max_seq_len=64, prefill_chunk=16)
    config = Config(engine=EngineConfig(kind="torch", torch=settings))
    out = base / "1"
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose", lambda *_: plugins("fp8_block"))
        build.build(StageContext(config=config, inputs={"convert": small}, checkpoint=small, out=out, progress=Notes()))
    return out


def test_a_package_has_the_plugins_and_passes_its_own_check(engine, tmp_path) -> None:
    (tmp_path / "repository").mkdir()
    ctx = StageContext(
        config=serving.serve_config(), inputs={"engine": engine}, checkpoint=None, out=tmp_path, progress=serving.Quiet()
    )
    version = write_repository(ctx, None)
    assert check_repository(tmp_path / "repository", "24.10")
    assert (version / "ops" / "plugins" / "mla_decode" / "op.py").is_file() and (version / "model.py").is_file()


def test_an_engine_carries_its_plugins(engine, tmp_path) -> None:
    """It runs where the project is not, and refuses another version of an op, or of what it needs."""
    engine = shutil.copytree(engine, tmp_path / "1")
    info = json.loads((engine / "engine.json").read_text())
    assert info["plugins"]["sources"] == sources(info["plugins"]["taken"])
    carried = {path.relative_to(engine / "ops").as_posix() for path in (engine / "ops").rglob("*.*")}
    assert carried == set(info["plugins"]["sources"])
    (engine / "runtime.py").write_bytes((RUNTIME / "runtime.py").read_bytes())
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", ALONE, str(engine)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "['pipeline', 'pipeline.core', 'pipeline.core.errors']", done.stderr
    for name in ("topk_router/op.py", "moe_grouped_gemm/launch.py", "router_gemm/sm90_many.cu", "nowhere.py"):
        assert f"plugins/{name} is not the version that this engine was built with" in done.stderr


def test_carried_kernels_need_no_compiler(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(nvrtc, "_carried", [])
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, options: b"cubin of " + source)
    monkeypatch.setenv("R1_PIPELINE_CACHE", str(tmp_path / "ops"))
    assert nvrtc._cached(b"a", ("-DX=1",)) == b"cubin of a"
    monkeypatch.setenv("R1_PIPELINE_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: pytest.fail("asked for a compiler"))
    nvrtc.carried(tmp_path / "ops" / "kernels")
    assert nvrtc._cached(b"a", ("-DX=1",)) == b"cubin of a"


def test_every_format_of_experts_has_its_weights() -> None:
    """Bytes of an expert: 1 a weight and its scales in FP8, half and its scales in NVFP4; the planner knows the same formats."""
    assert set(torch_limits.KEPT) == set(EXPERTS)
    for name, bits in (("fp8_block", 8 + 32 / 128**2), ("w4a16_nvfp4", 4.5), ("nvfp4", 4.5)):
        with torch.device("meta"):
            weight = EXPERTS[name]["expert_weight"](4, 256, 512, dtype=torch.bfloat16)
        parts = {key: value for key, value in weight.named_parameters() if key != "weight_scale_2"}
        assert sum(8 * value.numel() * value.itemsize for value in parts.values()) == 4 * 256 * 512 * bits
