"""The latent cache of the compiled torch engine in FP8: what is stored, what is written from it, and what it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is compiled by torch")

from torch import Tensor  # noqa: E402

from pipeline.config.load import load  # noqa: E402
from pipeline.config.schema import Config, EngineConfig, TorchEngineConfig  # noqa: E402
from pipeline.core.errors import ConfigError  # noqa: E402
from pipeline.core.stage import StageContext  # noqa: E402
from pipeline.engines.torch import build, selfcheck  # noqa: E402
from pipeline.engines.torch.export import new_caches  # noqa: E402
from pipeline.engines.torch.graph import store  # noqa: E402
from pipeline.engines.torch.selfcheck import import_runtime  # noqa: E402
from pipeline.planner.plan import make_plan  # noqa: E402
from pipeline.triton import smoke  # noqa: E402
from tests._utils.run_stage import Notes  # noqa: E402
from tests.conftest import Workspace  # noqa: E402
from tests.unit.test_engine_torch_plugins import (  # noqa: E402
    ARCH,
    BEGIN,
    OFF,
    PAGE,
    PAGES,
    PROMPT,
    RUNTIME,
    TINY_R1,
    TOKENIZER,
    TOKENS,
    decoder,
    plugins,
)  # fmt: skip

TABLE = torch.tensor([[3, 1, 4]])
FP8 = torch.float8_e4m3fn


def prompt() -> Tensor:
    """Of the text that the model was not trained on, which continues so surely that no rounding changes its words."""
    text = (TINY_R1 / "heldout.txt").read_text(encoding="utf-8")
    return torch.tensor(TOKENIZER.encode(text).ids[BEGIN : BEGIN + PROMPT])[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine over an FP8 cache, which its build compared with its graph."""
    settings = TorchEngineConfig(kv_dtype="fp8", max_batch_size=2, max_seq_len=128, prefill_chunk=80, expanded_from=40)
    out = tmp_path_factory.mktemp("fp8") / "1"
    out.mkdir()
    config = Config(engine=EngineConfig(kind="torch", torch=settings))
    build.build(StageContext(config=config, inputs={"convert": TINY_R1}, checkpoint=TINY_R1, out=out, progress=Notes()))
    return out


@pytest.fixture(scope="module")
def engines(cpu_build: Workspace, folder: Path) -> dict[str, Any]:
    """That of `build +hw=cpu`, and the one over an FP8 cache."""
    open_engine = import_runtime(RUNTIME / "runtime.py").CompiledEngine.load
    return {name: open_engine(path) for name, path in (("auto", cpu_build.latest("engine")), ("fp8", folder))}


def write(engine: Any, chunks: list[int]) -> tuple[list[int], Tensor]:
    """Greedy tokens after the prompt, taken in such chunks, and their logits."""
    begin, words, rows = 0, prompt(), []
    for length in chunks:
        positions = torch.arange(begin, begin + length)[None]
        logits = engine.step(words[:, begin : begin + length], positions, TABLE[:, : -(-(begin + length) // PAGE)])
        begin += length
    for position in range(PROMPT, PROMPT + TOKENS):
        rows.append(logits[0])
        logits = engine.step(logits.argmax(-1, keepdim=True), torch.tensor([[position]]), TABLE)
    return [int(row.argmax()) for row in rows], torch.stack(rows)


def test_an_fp8_cache_writes_the_same_words(engines: dict[str, Any]) -> None:
    """Prefill in the expanded form, in the absorbed one, and in chunks of both, which see each other's codes."""
    words, logits = write(engines["auto"], [PROMPT])
    for chunks in ([PROMPT], [39, 31], [50, 20]):
        found, rounded = write(engines["fp8"], chunks)
        assert found == words
        assert 1e-4 < (rounded - logits).norm() / logits.norm() < 0.05


def test_the_cache_has_the_codes_of_the_other_one(engines: dict[str, Any]) -> None:
    """Of the first layer, whose inputs no cache has touched; it takes a quarter of float32's bytes, and engine.json says so."""
    for engine in engines.values():
        write(engine, [PROMPT])
    exact, codes = (engine.caches[0][TABLE[0]].flatten(0, 1)[:PROMPT] for engine in engines.values())
    assert codes.dtype == FP8 and 4 * codes.nbytes == exact.nbytes and exact.abs().max() < 448
    assert (exact.to(FP8).view(torch.uint8) == codes.view(torch.uint8)).float().mean() > 0.999
    assert engines["fp8"].info["kv_dtype"] == "float8_e4m3fn" and engines["auto"].info["kv_dtype"] == "float32"


def test_the_build_s_check_sees_another_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps more than codes, and one that is NaN in its last step alone."""
    limit = selfcheck.LIMITS["float32", "float8_e4m3fn"]
    assert max(selfcheck.compare(folder, RUNTIME / "runtime.py")) < limit / 4
    monkeypatch.setattr(selfcheck, "new_caches", lambda info: new_caches(info | {"kv_dtype": "float32"}))
    assert min(selfcheck.compare(folder, RUNTIME / "runtime.py")[1:]) > limit
    monkeypatch.setattr(selfcheck, "compare", lambda *_: [0.0, torch.nan])
    with pytest.raises(SystemExit, match="compiled and eager logits differ"):
        selfcheck.main(folder, RUNTIME / "runtime.py")


def test_what_padding_wrote_does_not_count() -> None:
    """In a step that is captured, rows and tokens are added that write to page 0; the graph beside it has none. NaN does count."""
    wanted = [torch.ones(3, 2, 4).to(kind) for kind in (FP8, torch.bfloat16)]
    found = [layer.clone() for layer in wanted]
    found[0][0] = torch.full((2, 4), 448.0).to(FP8)
    assert selfcheck.apart(found, wanted) == 0
    found[1][2, 1] = 2
    assert selfcheck.apart(found, wanted) == pytest.approx((4 / 32) ** 0.5)
    found[1][1, 0, 0] = torch.nan
    assert not selfcheck.apart(found, wanted) <= 1


def test_an_engine_of_an_older_build_is_refused(folder: Path, tmp_path: Path) -> None:
    info = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
    del info["kv_dtype"]
    (tmp_path / "engine.json").write_text(json.dumps(info), encoding="utf-8")
    with pytest.raises(RuntimeError, match="has no kv_dtype: the engine is of an older version, so build it again"):
        import_runtime(RUNTIME / "runtime.py").CompiledEngine.load(tmp_path)


def test_the_cache_s_type_counts_where_memory_is_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what float32's cache takes and what FP8's does; and it is no way out that is taken already."""
    weights, short = build.weight_bytes(json.loads((folder / "engine.json").read_text(encoding="utf-8"))), 10**7
    for name, places in (("auto", 4 * 1024), ("fp8", 1024)):
        settings = TorchEngineConfig(kv_dtype=name, max_batch_size=4)
        info = build.describe(ARCH, settings, TINY_R1)
        cache = info["num_layers"] * info["num_pages"] * info["page_size"] * ARCH.latent_dim * places // 1024
        monkeypatch.setattr(build, "free_memory", lambda _, free=weights + cache: free)
        build.refuse_impossible(ARCH, settings, info)
        monkeypatch.setattr(build, "free_memory", lambda _, free=weights + cache - short: free)
        with pytest.raises(ConfigError, match="GB of it KV cache in float") as refusal:
            build.refuse_impossible(ARCH, settings, info)
        assert ("kv_dtype=fp8" in str(refusal.value)) == (name == "auto")


def test_what_fp8_has_no_code_for() -> None:
    cache, rows = torch.zeros(2, 2, 4).to(FP8), torch.tensor([[1e4, -torch.inf, torch.nan, 0.0], [1.0, 2.0, 3.0, -0.5]])
    store(rows, cache, torch.tensor([2, 1]))
    found = cache.float().view(4, 4)
    torch.testing.assert_close(found[2], torch.tensor([448.0, -448.0, torch.nan, 0.0]), equal_nan=True)
    assert torch.equal(found[1], rows[1]) and not found[0].any() and not found[3].any()


@torch.inference_mode()
def test_plugins_read_and_write_an_fp8_cache(tmp_path: Path) -> None:
    """In their CPU forms, as the graph without them does, in BF16."""
    words, found = prompt(), []
    for chosen in (OFF, plugins()):
        cache = [torch.zeros(PAGES + 1, PAGE, ARCH.latent_dim).to(FP8) for _ in range(ARCH.num_hidden_layers)]
        expanded, absorbed = (decoder(TINY_R1, tmp_path, chosen, form) for form in ("expanded", "absorbed"))
        first = expanded(words, torch.arange(PROMPT)[None], TABLE, cache)
        second = absorbed(first.argmax(-1, keepdim=True), torch.tensor([[PROMPT]]), TABLE, cache)
        found.append((torch.cat((first, second)), cache[0].view(torch.uint8)))
    (plain, codes), (plugged, others) = found
    assert torch.equal(plain.argmax(-1), plugged.argmax(-1)) and (plugged - plain).norm() < 0.05 * plain.norm()
    assert (codes == others).float().mean() > 0.99 and codes[3].any()


def test_texts_over_an_fp8_cache_may_depend_on_the_batch() -> None:
    words = ["+hw=cpu", "engine=torch"]
    assert smoke.exact(load(words)) and not smoke.exact(load([*words, "engine.torch.kv_dtype=fp8"]))
    assert not smoke.exact(load([*words, "engine.torch.dtype=bfloat16"])) and not smoke.exact(load(["+hw=b200"]))


def test_a_plan_knows_what_the_cache_takes() -> None:
    found = {}
    for name in ("auto", "fp8"):
        config = load(["+hw=cpu", "engine=torch", f"engine.torch.kv_dtype={name}"])
        plan = make_plan(config, json.loads((TINY_R1 / "config.json").read_text(encoding="utf-8")))
        rows = {row["component"]: row["bytes"] for row in plan.report["memory"]["rows"]}
        found[name] = plan.deploy["kv_cache_dtype"], rows["kv_cache"]
    assert found["fp8"] == ("fp8", found["auto"][1] // 4) and found["auto"][0] == "float32"
