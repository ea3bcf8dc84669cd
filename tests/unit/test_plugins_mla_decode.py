"""Latent attention against float64: the op and the combining kernel's source on the CPU, all of it where there is an H200."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from tests._utils.cuda_on_cpu import CudaOnCpu

torch = pytest.importorskip("torch", reason="the op is torch's")

from pipeline.engines.torch import selfcheck  # noqa: E402
from plugins.mla_decode import op, reference, tactics  # noqa: E402
from plugins.mla_prefill import crossover  # noqa: E402
from plugins.router_gemm import op as router_gemm  # noqa: E402
from tests._utils.peers import WHERE, load_peers, poison  # noqa: E402

HAS_WGMMA = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here"))]
SCALE = 0.07
ROUNDING, CODED = 2.1 * 2**-8, 1.3 * 2**-4
"""Of a softmax weight and of the output to BF16, half a unit in the last place each, and float32's sums; of a weight to E4M3."""
runtime = selfcheck.import_runtime(Path(__file__).parents[2] / "triton_repo" / "torch" / "1" / "runtime.py")


def case(device: str, lengths: list[int], heads: int, page: int = 64, queries: int = 1, fp8: bool = False) -> list[torch.Tensor]:
    """q, cache, table and lengths; what is beyond a sequence's end in its last page, and every unused page, is NaN."""
    most = max(1, -(-max([*lengths, 1]) // page))
    q = torch.randn(len(lengths), queries, heads, op.DIM, device=device).bfloat16()
    cache = torch.randn(len(lengths) * most + 1, page, op.DIM, device=device).bfloat16()
    table = torch.randperm(len(lengths) * most, device=device).view(len(lengths), most) + 1
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    there = torch.zeros(cache.shape[:2], dtype=torch.bool, device=device)
    there[table] = torch.arange(most * page, device=device).view(most, page) < ends.view(-1, 1, 1)
    cache[~there] = torch.nan
    return [q, cache.to(torch.float8_e4m3fn) if fp8 else cache, table.int(), ends]


def coded(inputs: list[torch.Tensor], codes: bool | None = None) -> bool:
    """Whether these are multiplied in FP8."""
    q, cache, *_ = inputs
    if codes is None:
        codes = q.is_cuda and cache.dtype == torch.float8_e4m3fn and op.has_kernel(q, cache, op.LATENT)
        codes = codes and not op._exact()
    return codes


def check(
    found: tuple[torch.Tensor, torch.Tensor], inputs: list[torch.Tensor], kv_scale: float = 1.0, codes: bool | None = None
) -> None:
    """`codes`: whether the inputs were multiplied in FP8; as the op does unless said. Queries are the codes times scales then."""
    codes = coded(inputs, codes)
    if codes:
        q = inputs[0].double()
        scales = 2 ** (q.abs().amax(-1, keepdim=True).clamp(min=2.0**-63).log2().floor() - 7)
        inputs = [(q / scales).float().to(torch.float8_e4m3fn).double() * scales, *inputs[1:]]
    wanted, lse = reference.mla_decode(*inputs, SCALE, op.LATENT, kv_scale)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    assert all(each.is_contiguous() for each in found)  # as export is told, whoever computed it
    assert torch.equal(found[0].isnan(), wanted.isnan())
    if codes:  # the roundings of a head's weights are many and independent
        error, allowed = (found[0].double() - wanted).norm(dim=-1), CODED * wanted.norm(dim=-1) + 1e-5
    else:
        error, allowed = (found[0].double() - wanted).abs(), ROUNDING * magnitudes(*inputs, kv_scale) + 1e-5
    assert not (error > allowed).any(), f"{int((error > allowed).sum())} errors, up to {float(error.nan_to_num().max()):.2e}"
    torch.testing.assert_close(found[1].double(), lse, rtol=2e-3 if codes else 1e-4, atol=2e-2 if codes else 1e-3, equal_nan=True)


def magnitudes(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, kv_scale: float) -> torch.Tensor:
    """The weighted sums of the latents' magnitudes, of the same scores [B, T, A, L]: rounding errors are parts of them."""
    q, cache = torch.cat((torch.zeros_like(q[..., : op.LATENT]), q), -1), cache.double()
    cache = torch.cat((cache[..., : op.LATENT].abs(), cache), -1)
    return reference.mla_decode(q, cache, table, lengths, SCALE, op.LATENT, kv_scale)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("fp8", "kv_scale", "asked"), [
    (False, 1.0, ""), (False, 0.5, ""), (True, 0.5, "0"), (True, 0.5, ""),
])  # fmt: skip
def test_op_vs_reference(fp8: bool, kv_scale: float, asked: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1_PIPELINE_FP8_QUERIES", asked)
    cases: list[tuple[list[int], int, int, int]] = [([1, 0, 130], 4, 64, 1), ([67], 2, 16, 1), ([5, 200], 4, 64, 3)]
    if device == "cuda":
        long = [1, 63, 64, 65, 128, 129, 1000, 4096, 0, 777]
        cases += [(long, 128, 64, 1), (long, 16, 64, 1), (long, 64, 128, 1), (long[:7], 128, 64, 2), ([4096] * 70, 128, 64, 1)]
        cases += [([0, 1, 65] * 70, 128, 64, 1)]  # one CTA has pieces with tokens and without
    for lengths, heads, page, queries in cases:
        inputs = case(device, lengths, heads, page, queries, fp8)
        check(torch.ops.r1_pipeline.mla_decode(*inputs, SCALE, op.LATENT, kv_scale), inputs, kv_scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_nan_spoils_those_who_see_it(fp8: bool, device: str) -> None:
    """A query itself, which no rounding may make a number of, and all heads of a sequence by one of its tokens."""
    q, cache, table, lengths = case(device, [130, 70, 5], 16, fp8=fp8)
    q[0, 0, 3, 7] = torch.nan
    cache.view(torch.uint8)[int(table[1, 1]), 2] = 0xFF
    out, lse = op.mla_decode(q, cache, table, lengths, SCALE, op.LATENT)
    check((out, lse), [q, cache, table, lengths])
    spoilt = torch.zeros(3, 1, 16, dtype=torch.bool, device=device)
    spoilt[0, 0, 3] = spoilt[1] = True
    assert torch.equal(lse.isnan(), spoilt) and torch.equal(out.isnan(), spoilt.unsqueeze(3).expand_as(out))


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_of_no_page_and_a_table_s_free_places_are_not_read(device: str) -> None:
    inputs = case(device, [0, 0], 16, queries=3)
    check(op.mla_decode(inputs[0], inputs[1][:0], *inputs[2:], SCALE, op.LATENT), inputs)
    inputs = case(device, [2, 130, 300, 0], 16, queries=3)
    free = torch.arange(inputs[2].shape[1], device=device) * 64 >= inputs[3].unsqueeze(1)
    inputs[2] = inputs[2].masked_fill(free, -1)
    out, lse = op._plain(*inputs, SCALE, op.LATENT)
    if device == "cuda":
        op.launch(*inputs, out.fill_(torch.nan), lse, SCALE)
    check((out, lse), inputs)


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize("kind", ["bf16", "fp8", "exact fp8"])
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 12, 40])
def test_any_split_gives_the_same(splits: int, kind: str) -> None:
    inputs = case("cuda", [4096, 1, 300, 0, 129, 1024], 128, fp8=kind != "bf16")
    out, lse = op._outputs(inputs[0], op.LATENT)
    poison()
    op.launch(*inputs, out.fill_(torch.nan), lse, SCALE, splits=splits, exact=kind == "exact fp8")
    check((out, lse), inputs, codes=kind == "fp8")


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
def test_flash_mla_in_the_op_vs_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    load_peers()
    tactics.present.cache_clear()
    name = "flash_mla"
    if name not in tactics.present():
        pytest.skip(f"{name}: {WHERE}")
    ran: list[int] = []
    call = tactics.THEIRS[name]
    monkeypatch.setitem(tactics.THEIRS, name, lambda *inputs: (ran.append(1), call(*inputs))[1])
    monkeypatch.setattr(tactics.TABLE, "choose", lambda same, sizes, names: name if name in names else "ours")
    long = [1, 63, 64, 65, 128, 129, 1000, 4096, 0, 777]
    cases = [(long, 128, 1), (long, 16, 1), ([64, 4096], 128, 1), (long[:7], 128, 2)]
    for lengths, heads, queries in cases:
        inputs = case("cuda", lengths, heads, queries=queries)
        poison()
        check(torch.ops.r1_pipeline.mla_decode(*inputs, SCALE, op.LATENT, 1.0), inputs)
    assert len(ran) == len(cases) and not tactics.TABLE.failed


def test_flash_mla_is_given_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(op, "has_kernel", lambda *_: True)
    monkeypatch.setattr(op, "_fastest", lambda *_: "flash_mla")
    monkeypatch.setitem(tactics.THEIRS, "flash_mla", lambda *inputs: given.extend(inputs))
    inputs = [torch.stack((x.float(), x.float()), -1).to(x.dtype)[..., 0] for x in case("cpu", [70, 3], 2)]
    assert not any(x.is_contiguous() for x in inputs)
    op.mla_decode._init_fn(*inputs, SCALE, op.LATENT)
    for found, wanted in zip(given, inputs, strict=False):
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize("kind", ["bf16", "fp8", "exact fp8"])
def test_scores_that_grow_and_fall_vs_reference(kind: str) -> None:
    """The largest score so far is kept or replaced, in both warpgroups."""
    for begin, end in ((0.05, 3.0), (3.0, 0.05)):
        inputs = case("cuda", [4096] * 4, 128)
        inputs[1][inputs[2].long()] *= torch.linspace(begin, end, 64, device="cuda").bfloat16().view(64, 1, 1)
        inputs[1] = inputs[1] if kind == "bf16" else inputs[1].to(torch.float8_e4m3fn)
        out, lse = op._outputs(inputs[0], op.LATENT)
        op.launch(*inputs, out.fill_(torch.nan), lse, SCALE, exact=kind == "exact fp8")
        check((out, lse), inputs, codes=kind == "fp8")


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
def test_many_small_weights_beside_a_large_one_are_not_lost() -> None:
    """A sink takes half of the attention, 4,000 other tokens the rest: 2^-12 of it each, which E4M3 has if weights are raised.

    All are in one piece.
    """
    q, cache, table, lengths = case("cuda", [4001], 128)
    q[..., op.LATENT :], cache[..., op.LATENT :] = 0, 0  # the rope alone decides
    q[..., op.LATENT], cache[..., op.LATENT] = 1, 0
    cache[table[0, 0], 0, op.LATENT] = math.log(4096) / SCALE
    cache[..., : op.LATENT] += 1  # what the others have in common
    q[..., : op.LATENT] = 0
    inputs = [q, cache.to(torch.float8_e4m3fn), table, lengths]
    out, lse = op._outputs(q, op.LATENT)
    op.launch(*inputs, out.fill_(torch.nan), lse, SCALE, splits=1)
    wanted, _ = reference.mla_decode(*inputs, SCALE, op.LATENT)
    assert (out.double() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize("splits", [1, 3])
def test_queries_of_nothing_see_all_tokens_alike(splits: int) -> None:
    q, cache, table, lengths = case("cuda", [1, 65, 300], 64, fp8=True)
    q[:, :, 3], q[:, :, 5] = 0, 1e-30
    out, lse = op._outputs(q, op.LATENT)
    op.launch(q, cache, table, lengths, out.fill_(torch.nan), lse, SCALE, splits=splits)
    check((out, lse), [q, cache, table, lengths], codes=True)


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
def test_no_long_sum_of_one_sign_falls_short() -> None:
    """FP8's adder by itself, over all of a piece, would lose a quarter of this one."""
    q, cache, table, lengths = case("cuda", [16384], 64)
    q *= 0.1
    cache[..., : op.LATENT] = 1 + cache[..., : op.LATENT] / 2
    inputs = [q, cache.to(torch.float8_e4m3fn), table, lengths]
    out, lse = op._outputs(q, op.LATENT)
    op.launch(*inputs, out.fill_(torch.nan), lse, SCALE, splits=1)
    wanted, _ = reference.mla_decode(*inputs, SCALE, op.LATENT)
    assert abs(1 - float((out / wanted).mean())) < 2e-3


COMBINING = {
    "mla_combine": "const float4*, const float*, uint2*, float*, int",
    "mla_clear": "const int*, uint4*, float*, int, int",
}


@pytest.fixture(scope="module")
def combining(tmp_path_factory: pytest.TempPathFactory) -> list[CudaOnCpu]:
    source, forms = Path(op.__file__).with_name("combine.cu"), ({"AT_ONCE": 2, "GROUPS": 1}, {"AT_ONCE": 8, "GROUPS": 4})
    return [CudaOnCpu(source, COMBINING, form, tmp_path_factory.mktemp("combine")) for form in forms]


@pytest.mark.parametrize(("form", "splits"), [(0, 3), (1, 3), (1, 17), (1, 40)])
def test_combining_kernel_vs_reference(combining: list[CudaOnCpu], form: int, splits: int) -> None:
    rng = np.random.default_rng(0)
    part, lse = rng.normal(size=(6, splits, op.LATENT)).astype(np.float32), rng.normal(0, 4, (6, splits)).astype(np.float32)
    lse[1, 2] = lse[2] = lse[3, 0] = -np.inf
    part[1, 2] = part[2] = part[5, 1] = lse[5, 1] = np.nan
    out, total = np.full((6, op.LATENT), 0x7FFF, np.uint16), np.zeros(6, np.float32)
    combining[form].launch("mla_combine", (6, 1, 1), (1, 4)[form] * op.LATENT // 4, part, lse, out, total, splits)
    found, some = torch.from_numpy(out).view(torch.bfloat16).double().numpy(), [0, 1, 3, 4]
    weights = np.exp(lse[some].astype(np.float64))
    wanted = (np.nan_to_num(part[some]) * weights[..., None]).sum(1) / weights.sum(1)[:, None]
    np.testing.assert_allclose(found[some], wanted, rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(total[some], np.log(weights.sum(1)), rtol=1e-5)
    assert total[2] == -np.inf and not out[2].any()
    assert np.isnan(found[5]).all() and np.isnan(total[5])  # what is not a number stays visible


def test_rows_that_see_no_token_are_cleared(combining: list[CudaOnCpu]) -> None:
    lengths, heads = np.array([0, 2, 5], np.int32), 3
    out, lse = np.full((3, 3, heads, op.LATENT), 0x7FFF, np.uint16), np.full((3, 3, heads), np.inf, np.float32)
    combining[0].launch("mla_clear", (9, 1, 1), op.LATENT // 4, lengths, out, lse, 3, heads)
    none = np.array([[True] * 3, [True, False, False], [False] * 3])
    assert (out[none] == 0).all() and (out[~none] == 0x7FFF).all()
    assert (lse[none] == -np.inf).all() and (lse[~none] == np.inf).all()


def test_parts_are_joined_by_as_many_threads_as_they_need() -> None:
    forms = {splits: (*op.joining(splits)[0].values(), op.joining(splits)[1]) for splits in (2, 3, 8, 9, 17, 132)}
    assert forms == {2: (2, 1, 128), 3: (4, 1, 128), 8: (8, 1, 128), 9: (8, 2, 256), 17: (8, 4, 512), 132: (8, 4, 512)}


def test_splits_fill_the_chip() -> None:
    assert op.best_splits(2, 32, 132) >= 16  # one sequence of 4,096 tokens
    assert op.best_splits(128, 32, 132) == 1  # 64 of them are a wave
    assert op.best_splits(2, 2, 132) == 2 and op.best_splits(1, 128, 132, 16) == 64
    assert all(op.best_splits(tiles, 32, 132) == 1 for tiles in (96, 200))  # parts cost more than a better last wave saves
    assert all(1 <= op.best_splits(tiles, pairs, 132) <= max(1, pairs) for tiles in (1, 7, 300) for pairs in (1, 2, 33))


@pytest.mark.parametrize(("room", "chunk", "batch", "heads", "least"), [
    (1024, 512, 8, 128, None), (1024, 64, 1, 16, None), (4096, 512, 1, 128, None), (2048, 200, 2, 64, 300),
    (4096, 512, 128, 128, None),
])  # fmt: skip
def test_the_engine_s_check_compiles_all_joining_kernels(room: int, chunk: int, batch: int, heads: int, least: int | None) -> None:
    """A server may have no compiler: whatever chunk it is given, the kernel that joins its parts was compiled with the engine."""
    pages = room // tactics.PAGE
    engine = runtime.CompiledEngine.__new__(runtime.CompiledEngine)
    engine.device, engine.forms, engine._graphs, compiled = torch.device("cuda"), dict.fromkeys(("absorbed", "expanded")), {}, set()
    ran: set[tuple[int, ...]] = set()
    engine.info = {
        "max_batch_size": batch, "max_seq_len": room, "prefill_chunk": chunk, "page_size": tactics.PAGE, "vocab_size": 9,
        "num_pages": batch * pages + 1,
        "expanded_from": [least or crossover.expanded_from(page * tactics.PAGE + tactics.PAGE) for page in range(pages)],
    }  # fmt: skip

    def joined(rows: int, length: int, width: int) -> set[tuple[int, int]]:
        rows, length, width = engine._captured_size(rows, length, width) or (rows, length, width)
        if engine.form_of(rows, length, width) == "expanded":
            return set()
        tiles, pairs = rows * length * max(1, heads // op.BLOCK), -(-width * tactics.PAGE // (2 * op.BLOCK))
        splits = op.best_splits(tiles, pairs, 132, min(heads, op.BLOCK))
        return {tuple(op.joining(splits)[0].values())} if splits > 1 else set()

    def step(tokens: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
        engine._check(tokens, positions, table)
        compiled.update(joined(*tokens.shape, table.shape[1]))
        ran.add((*tokens.shape, table.shape[1]))

    engine.step = step
    selfcheck.warm(engine)
    steps = [(1, length, width) for length in range(2, chunk + 1) for width in range(-(-length // tactics.PAGE), pages + 1)]
    assert set().union(*(joined(*size) for size in [*steps, *((rows, 1, pages) for rows in range(1, batch + 1))])) <= compiled
    assert {(1, chunk), (batch, 1)} <= {size[:2] for size in ran}  # others' kernels have forms for many tokens

    def rows(sizes: Iterable[tuple[int, ...]]) -> set[int]:
        """What router_gemm is compiled for."""
        counts = (math.prod((engine._captured_size(*size) or size)[:2]) for size in sizes)
        return {router_gemm.rounded(count) for count in counts if router_gemm.MANY_TOKENS < count <= router_gemm.MAX_TOKENS}

    assert rows([*steps, *((count, 1, pages) for count in range(1, batch + 1))]) <= rows(ran)


def test_op_is_known_to_export() -> None:
    torch.library.opcheck(op.mla_decode, (*case("cpu", [3, 70], 2), SCALE, op.LATENT, 1.0))


def test_what_does_not_fit_is_refused() -> None:
    q, cache, table, lengths = case("cpu", [3], 2)
    with pytest.raises(ConfigError, match=r"\[pages, page, D\]"):
        op.mla_decode(q, cache[..., :64], table, lengths, SCALE, 512)
    with pytest.raises(ConfigError, match="must be int32"):
        op.mla_decode(q, cache, table.long(), lengths, SCALE, 512)
    with pytest.raises(ConfigError, match="must be int32"):
        op.mla_decode(q, cache, table[0, :1], lengths, SCALE, 512)
    for scale, kv_scale in ((0.0, 1.0), (-0.1, 1.0), (float("nan"), 1.0), (SCALE, 0.0)):
        with pytest.raises(ConfigError, match="must be above 0"):
            op.mla_decode(q, cache, table, lengths, scale, 512, kv_scale)


def test_the_tactic_file_decides() -> None:
    rows = [row for row in tactics.TABLE.rows if (row["device"], row["cache"]) == ("NVIDIA H200", "bf16")]
    assert any("flash_mla" in row["us"] for row in rows)
    for row in rows:
        same, sizes = (row["device"], "bf16"), tuple(row[key] for key in tactics.TABLE.sizes)
        assert row["us"][tactics.TABLE.choose(same, sizes, ("ours", "flash_mla"))] == min(row["us"].values())
        assert tactics.TABLE.choose(same, sizes, ("ours",)) == "ours"
