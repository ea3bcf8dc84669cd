"""The routed experts against float64: the op on the CPU, all of it where there is an H200."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from tests._utils.cuda_on_cpu import CudaOnCpu

torch = pytest.importorskip("torch", reason="the ops are torch's")

from plugins.moe_grouped_gemm import launch, marlin, op, plain, reference, tactics  # noqa: E402
from plugins.quantize.reference import fp8_quantize  # noqa: E402
from tests._utils.peers import poison  # noqa: E402

HAS_WGMMA = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here"))]
OPS = torch.ops.r1_pipeline
FP8 = torch.float8_e4m3fn


def routes(tokens: int, chosen: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token, as a router gives them, and weights."""
    indices = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)]) if tokens else torch.empty(0, chosen)
    return indices.int(), torch.rand(tokens, chosen)


def fp8_weights(experts: int, width: int, hidden: int) -> list[torch.Tensor]:
    """gate_up, its scales, down, its scales"""
    shapes = (experts, 2 * width, hidden), (experts, hidden, width)
    pairs = [(torch.randn(s).to(FP8), torch.rand(s[0], s[1] // 128, s[2] // 128) / s[2] ** 0.5 + 1e-3) for s in shapes]
    return [tensor for pair in pairs for tensor in pair]


def nvfp4_weights(experts: int, width: int, hidden: int) -> list[torch.Tensor]:
    """gate_up, its two scales, down, its two scales"""

    def one(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
        codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8)
        return codes, (torch.rand(experts, rows, columns // 16) * 400).to(FP8), (torch.rand(experts) + 1e-1) / 400 / columns**0.5

    return [*one(2 * width, hidden), *one(hidden, width)]


FORMS = {
    "fp8": (OPS.moe_fp8_block, fp8_weights, 128),
    "nvfp4": (OPS.moe_w4a16_nvfp4, nvfp4_weights, 16),
}


def by_hand(compute: Callable[..., torch.Tensor], inputs: list[torch.Tensor], first: int = 0) -> torch.Tensor:
    """What a form of the experts makes of x, indices, weights, and the parts of gate_up and of down."""
    half = len(inputs[3:]) // 2
    return compute(*inputs[:3], tuple(inputs[3 : 3 + half]), tuple(inputs[3 + half :]), first)


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """BF16 of the reference, but for quantised values that round the other way: tensor cores add FP8 products in 14 bits."""
    assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
    nan = wanted.isnan()
    assert torch.equal(found.isnan().cpu(), nan.cpu())
    error = (found.double().to(wanted.device) - wanted).masked_fill(nan, 0).norm()
    assert error <= (1.5e-2 if found.is_cuda else 6e-3) * wanted.masked_fill(nan, 0).norm()


CASES = {
    "one token": (1, 8, 16, 16, 0),
    "primes": (13, 3, 7, 7, 0),
    "an empty batch": (0, 8, 4, 4, 0),
    "one of three ranks": (11, 4, 5, 15, 5),
    "nothing here": (3, 2, 4, 2, 20),
}
"""Tokens, experts a token, experts here, experts everywhere, first expert"""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_op_vs_reference(form: str, name: str, device: str) -> None:
    call, make, unit = FORMS[form]
    tokens, chosen, here, everywhere, first = CASES[name]
    hidden, width = (512, 256) if device == "cuda" else (3 * unit, unit)
    inputs = [torch.randn(tokens, hidden).bfloat16(), *routes(tokens, chosen, everywhere), *make(here, width, hidden)]
    inputs = [tensor.to(device) for tensor in inputs]
    check(call(*inputs, first), by_hand(reference.experts, inputs, first))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_all_tokens_may_want_one_expert(form: str, device: str) -> None:
    call, make, unit = FORMS[form]
    hidden, width = (512, 256) if device == "cuda" else (2 * unit, unit)
    indices, weights = torch.full((19, 2), 1, dtype=torch.int64), torch.rand(19, 2)
    indices[4, 1] = 0
    inputs = [torch.randn(19, hidden).bfloat16(), indices, weights, *make(3, width, hidden)]
    inputs = [tensor.to(device) for tensor in inputs]
    check(call(*inputs, 0), by_hand(reference.experts, inputs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_value_spoils_its_own_token(form: str, bad: float, device: str) -> None:
    call, make, unit = FORMS[form]
    hidden, width = (512, 256) if device == "cuda" else (2 * unit, unit)
    inputs = [torch.randn(5, hidden).bfloat16(), *routes(5, 2, 3), *make(3, width, hidden)]
    inputs[0][2, 5] = bad
    inputs = [tensor.to(device) for tensor in inputs]
    found = call(*inputs, 0)
    wanted = by_hand(reference.experts, inputs)
    assert wanted[2].isfinite().sum() == 0 and found[2].isfinite().sum() == 0
    others = [0, 1, 3, 4]
    check(found[others], wanted[others])


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(9, 512, 256), (150, 1280, 768), (700, 512, 256), (64, 7168, 2048)])
@pytest.mark.parametrize("form", FORMS)
def test_tiles_of_every_size_vs_reference(form: str, tokens: int, hidden: int, width: int) -> None:
    call, make, _ = FORMS[form]
    hidden, width = (hidden + 128, width + 128) if form == "fp8" and tokens == 150 else (hidden, width)  # an odd number of tiles
    with torch.device("cuda"):
        inputs = [torch.randn(tokens, hidden).bfloat16(), *routes(tokens, 2, 3), *make(3, width, hidden)]
    inputs[1][: tokens // 3] = 1  # experts with very different numbers of rows
    poison()
    check(call(*inputs, 0), by_hand(plain.experts, inputs).double())


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize(("hidden", "width"), [(512, 256), (1280, 768), (7168, 2048)])
@pytest.mark.parametrize("form", FORMS)
def test_few_experts_are_shared_by_all_ctas_vs_reference(form: str, hidden: int, width: int) -> None:
    call, make, _ = FORMS[form]
    hidden, width = (hidden + 128, width + 128) if form == "fp8" and hidden == 1280 else (hidden, width)  # an odd number of tiles
    with torch.device("cuda"):
        matrices = make(12, width, hidden)
        for tokens, chosen in ((1, 1), (1, 2), (1, 3), (2, 2), (5, 1), (3, 4), (8, 12)):
            inputs = [torch.randn(tokens, hidden).bfloat16(), *routes(tokens, chosen, 12), *matrices]
            poison()
            found = call(*inputs, 0)
            check(found, by_hand(plain.experts, inputs).double())
            assert all(torch.equal(found, call(*inputs, 0)) for _ in range(3))  # whichever CTA is the last


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize(("chosen", "shared"), [(1, True), (12, False)])
@pytest.mark.parametrize("form", FORMS)
def test_ctas_share_experts_only_where_there_are_too_few(form: str, chosen: int, shared: bool) -> None:
    """Sharers that count from a wrong number never see the last of them arrive, and then nothing is written."""
    nvfp4 = form == "nvfp4"
    with torch.device("cuda"):
        matrices = FORMS[form][1](12, 512, 4096)
        x, (indices, _) = torch.randn(1, 512).bfloat16(), routes(1, chosen, 12)
    route = launch.permute(indices, 12, 0, launch.LEAST_ROWS, launch.ALIGN[nvfp4])
    assert not route.arrivals.any()
    route.arrivals.fill_(100)
    out = torch.full((len(route.pairs), 4096), torch.nan, device="cuda", dtype=torch.bfloat16)
    launch.product(tuple(matrices[len(matrices) // 2 :]), launch.gather(x, route, chosen, nvfp4), route, (out, None))
    assert out[route.pairs >= 0].isnan().all() if shared else out[route.pairs >= 0].isfinite().all()


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize("form", FORMS)
def test_an_expert_may_have_more_rows_than_there_are_tokens(form: str) -> None:
    call, make, _ = FORMS[form]
    with torch.device("cuda"):
        indices = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1]])
        inputs = [torch.randn(5, 512).bfloat16(), indices, torch.rand(5, 3), *make(3, 256, 512)]
    check(call(*inputs, 0), by_hand(plain.experts, inputs).double())


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [3, 33])
def test_a_captured_step_takes_new_routes(form: str, shared: bool, tokens: int) -> None:
    call, make, _ = FORMS[form]
    with torch.device("cuda"):
        matrices = [*make(6, 256, 512), 3, *(shared_weights(384, 512) if shared else ())]
        steps = [(torch.randn(tokens, 512).bfloat16(), *routes(tokens, 4, 12)) for _ in range(3)]
        steps[1][1][:] = torch.arange(3, 7)  # fewer experts, which more CTAs share
    given = [tensor.clone() for tensor in steps[0]]
    call(*given, *matrices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*given, *matrices)
    for step in steps:
        for place, tensor in zip(given, step, strict=True):
            place.copy_(tensor)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, call(*step, *matrices))  # the same bits, whatever order the pairs came in


@pytest.mark.skipif(not HAS_WGMMA or not importlib.util.find_spec("deep_gemm"), reason="no GPU of sm_90, or no DeepGEMM, here")
@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (300, 0), (700, 2)])
def test_deep_gemm_between_our_kernels_captured_vs_reference(tokens: int, first: int) -> None:
    with torch.device("cuda"):
        x, indices, weights, *matrices = torch.randn(tokens, 1024).bfloat16(), *routes(tokens, 3, 6), *fp8_weights(4, 512, 1024)
        indices[: tokens // 3] = torch.tensor([3, 5, 2], dtype=torch.int32)
    poison()
    out, replayed = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    launch.experts(x, indices, weights, tuple(matrices[:2]), tuple(matrices[2:]), out, first, products=tactics.DEEP_GEMM)
    wanted = plain.experts(x, indices, weights, tuple(matrices[:2]), tuple(matrices[2:]), first).double()
    assert (out.double() - wanted).norm() <= 3e-2 * wanted.norm()  # gate and up are rounded to BF16 on their way
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.experts(x, indices, weights, tuple(matrices[:2]), tuple(matrices[2:]), replayed, first, products=tactics.DEEP_GEMM)
    graph.replay()
    assert torch.equal(out, replayed)


def test_deep_gemm_is_taken_where_it_was_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {64: {"ours": 300, "deep_gemm": 400}, 9000: {"ours": 1400, "deep_gemm": 1100}}
    measured = [{"device": "a GPU", "experts": 32, "tokens": tokens, "us": us} for tokens, us in times.items()]
    monkeypatch.setitem(vars(tactics.TABLE), "rows", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(tactics.TABLE, "choose", tactics.TABLE._choose)
    monkeypatch.setattr(tactics, "present", lambda: ("ours", "deep_gemm"))
    fp8, nvfp4 = tuple(torch.empty(32, 1, 1) for _ in range(2)), tuple(torch.empty(32, 1, 1) for _ in range(3))
    assert [op._fastest(torch.empty(tokens, 1), fp8) for tokens in (1, 300, 8192)] == ["ours", "ours", "deep_gemm"]
    assert op._fastest(torch.empty(8192, 1), nvfp4) == "ours"


def test_the_peer_s_weights_are_ours_in_its_order() -> None:
    codes, scales, scales_2 = nvfp4_weights(2, 128, 128)[:3]
    words, others, others_2 = marlin.packed((codes, scales, scales_2))
    n, k = torch.meshgrid(torch.arange(256), torch.arange(128), indexing="ij")
    lane, tile, value = n % 8 * 4 + k % 8 // 2, n % 64 // 16, n % 16 // 8 * 4 + k % 16 // 8 * 2 + k % 2
    place = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])[value]  # even ones first
    found = words[:, k // 16, n // 64 * 128 + lane * 4 + tile] >> 4 * place & 15
    assert torch.equal(found, (codes.repeat_interleave(2, dim=2).int() >> k % 2 * 4) & 15)
    n, group = torch.meshgrid(torch.arange(256), torch.arange(8), indexing="ij")
    place = n // 64 * 64 + n % 8 * 8 + n % 64 // 8  # of eights, and of four the middle two change places
    bits = others.view(torch.uint8)[:, group, place // 4 * 4 + torch.tensor([0, 2, 1, 3])[place % 4]].short()
    exact, factors = (bits << 7).view(torch.half).float(), scales_2.view(2, 1, 1) * 2.0**126  # S0E5M3 is half without its sign
    assert (exact[scales.float() > 0.1] >= 2).all() and exact.max() <= 448 * 2**7
    torch.testing.assert_close(exact * others_2.view(2, 1, 1), scales.float() * factors, rtol=1e-6, atol=2.0**110)


def shared_weights(width: int, hidden: int) -> list[torch.Tensor]:
    """gate_up and down of the expert that all tokens visit"""
    return [torch.randn(n, k).bfloat16() / k**0.5 for n, k in ((2 * width, hidden), (hidden, width))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_shared_expert_beside_the_routed_is_their_sum(form: str, device: str) -> None:
    call, make, unit = FORMS[form]
    hidden, width = (512, 256) if device == "cuda" else (2 * unit, unit)
    for tokens in (7, 0):
        inputs = [torch.randn(tokens, hidden).bfloat16(), *routes(tokens, 2, 5), *make(4, width, hidden)]
        inputs, more = [tensor.to(device) for tensor in inputs], [tensor.to(device) for tensor in shared_weights(192, hidden)]
        gate, up = torch.nn.functional.linear(inputs[0], more[0]).chunk(2, dim=-1)
        wanted = call(*inputs, 1) + torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, more[1])
        found = call(*inputs, 1, *more)
        assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_permutation_groups_pairs_by_expert(device: str) -> None:
    for tokens, chosen, here, everywhere, first in (*CASES.values(), (257, 8, 32, 256, 64)):
        indices, _ = routes(tokens, chosen, max(everywhere, chosen))
        offsets, pairs, slots = (tensor.cpu() for tensor in OPS.moe_permute(indices.to(device), here, first))
        local = indices.flatten() - first
        assert offsets.diff().tolist() == [int((local == expert).sum()) for expert in range(here)]
        assert all(set(local[pairs[offsets[e] : offsets[e + 1]].long()].tolist()) <= {e} for e in range(here))
        ours = (local >= 0) & (local < here)
        assert torch.equal(slots >= 0, ours) and torch.equal(pairs[slots[ours].long()].long(), ours.nonzero().flatten())
        assert (pairs[int(offsets[-1]) :] == -1).all() and len(pairs) == len(slots) == tokens * chosen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 2])
def test_numbers_beyond_32_bits_are_no_expert_s(first: int, device: str) -> None:
    """Cut to 32 bits, all but the last of these would be numbers of experts here."""
    wild = torch.tensor([[2**32, 2**32 + 3], [-(2**32) + 2, 3 - 2**40], [2**31, first]], device=device)
    for indices in (wild, op._narrow(wild)):
        assert (OPS.moe_permute(indices, 4, first)[2] >= 0).tolist() == [False] * 5 + [True]
    assert op._narrow(narrow := wild.int()) is narrow  # without a launch


SIGNATURES = {
    "moe_permute": "const int*, int*, int*, int*, int4*, int*, int*, int, int, int, int, int, int",
    "moe_gather_fp8": "const uint4*, const int*, const int4*, uint2*, float*, int",
    "moe_gather_bf16": "const uint4*, const int*, const int4*, u32*",
    "moe_swiglu_fp8": "const uint4*, const int*, const int4*, uint2*, float*, int",
    "moe_finalize": "const uint4*, const float*, const int*, const uint4*, uint4*",
}
HIDDEN, TOP_K = 512, 3


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CudaOnCpu:
    defines = {"HIDDEN": HIDDEN, "TOP_K": TOP_K}
    return CudaOnCpu(Path(op.__file__).with_name("route.cu"), SIGNATURES, defines, tmp_path_factory.mktemp("route"))


@pytest.mark.parametrize("align", [1, 4, 128])
@pytest.mark.parametrize(("tokens", "here", "everywhere", "first"), [(1, 4, 4, 0), (401, 7, 11, 2), (5, 3, 40, 37), (9, 1, 3, 2)])
def test_permuting_kernel_vs_reference(kernels: CudaOnCpu, tokens: int, here: int, everywhere: int, first: int, align: int) -> None:
    indices, _ = routes(tokens, TOP_K, everywhere)
    count, most = indices.numel(), 8
    capacity = (count + (align - 1) * min(count, here)) // align * align
    ends, offsets, pairs, slots, arrivals = (np.full(size, -7, np.int32) for size in (here, here + 1, capacity, count, 1024))
    work = np.full((1 + min(count, here + count // most), 4), -7, np.int32)
    sizes = count, capacity, here, first, most, align
    kernels.launch("moe_permute", (1, 1, 1), 1024, indices.numpy(), offsets, pairs, slots, work, ends, arrivals, *sizes)
    assert not arrivals.any()
    wanted_offsets, wanted_pairs, wanted_slots = (tensor.numpy() for tensor in plain.permute(indices, here, first))
    rows = np.diff(wanted_offsets)
    np.testing.assert_array_equal(np.diff(offsets), -(-rows // align) * align)
    np.testing.assert_array_equal(ends, offsets[:-1] + rows)
    for begin, wanted, number in zip(offsets, wanted_offsets, rows, strict=False):  # an expert's pairs come in no order
        assert sorted(pairs[begin : begin + number]) == sorted(wanted_pairs[wanted : wanted + number])
    assert (pairs == -1).sum() == capacity - rows.sum()
    np.testing.assert_array_equal(slots >= 0, wanted_slots >= 0)
    np.testing.assert_array_equal(pairs[slots[slots >= 0]], np.flatnonzero(slots >= 0))
    tiles = [[e, offsets[e], number] for e, number in enumerate(rows) for _ in range(-(-number // most))]
    found = work[1 : 1 + len(tiles)]
    assert work[0, :2].tolist() == [len(tiles), offsets[-1]] and found[:, [0, 2, 3]].tolist() == tiles
    assert found[:, 1].tolist() == [[expert for expert, *_ in tiles].index(e) for e, *_ in tiles]


def test_gathering_kernels_vs_reference(kernels: CudaOnCpu) -> None:
    x, pairs = torch.randn(4, HIDDEN).bfloat16(), np.array([7, 0, 11, 2, -1, -1], np.int32)
    bits, tokens = x.view(torch.int16).numpy(), pairs[:4] // TOP_K
    codes, scales = np.full((6, HIDDEN), 0x55, np.uint8), np.full((HIDDEN // 128, 8), -1, np.float32)
    used = np.array([0, 5, 0, 0], np.int32)
    kernels.launch("moe_gather_fp8", (2, 1, 1), 256, bits, pairs, used, codes, scales, 8)
    wanted, wanted_scales = fp8_quantize(x[tokens])
    np.testing.assert_array_equal(codes[:4], wanted.view(torch.uint8).numpy())
    np.testing.assert_array_equal(scales[:, :4].T, wanted_scales.numpy())
    assert (codes[4:] == 0x55).all() and (scales[:, 4:] == -1).all()
    rows = np.full((6, HIDDEN), 0x5555, np.int16)
    kernels.launch("moe_gather_bf16", (2, 1, 1), 256, bits, pairs, used, rows)
    place = launch.places(HIDDEN).numpy()
    assert len(set(place)) == HIDDEN
    np.testing.assert_array_equal(rows[:4, place], bits[tokens])
    assert (rows[4:] == 0x5555).all()


def test_quantising_of_gate_and_up_vs_reference(kernels: CudaOnCpu) -> None:
    both, pairs, used = torch.randn(4, 2 * HIDDEN).bfloat16(), np.array([1, -1, 0, -1], np.int32), np.array([0, 3, 0, 0], np.int32)
    both[0, 130], both[2, 5], both[2, HIDDEN + 200] = 300, 0, torch.nan
    both[2, 256:384] = 0
    codes, scales = np.full((4, HIDDEN), 0x55, np.uint8), np.full((HIDDEN // 128, 4), -1, np.float32)
    kernels.launch("moe_swiglu_fp8", (2, 1, 1), 256, both.view(torch.int16).numpy(), pairs, used, codes, scales, 4)
    gate, up = both[[0, 2]].float().chunk(2, dim=1)
    inner = (torch.nn.functional.silu(gate) * up).unflatten(1, (-1, 128))
    tops = inner.abs().amax(2).clamp(min=2.0**-33)
    found, wanted = torch.from_numpy(codes[[0, 2]]).view(FP8).float().unflatten(1, (-1, 128)), inner * (448 / tops).unsqueeze(2)
    torch.testing.assert_close(torch.from_numpy(scales[:, [0, 2]].T.copy()), tops / 448, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(found, wanted, rtol=2**-4, atol=2**-10, equal_nan=True)
    assert (codes[[1, 3]] == 0x55).all() and (scales[:, [1, 3]] == -1).all()


@pytest.mark.parametrize("beside", [False, True])
def test_adding_kernel_vs_reference(kernels: CudaOnCpu, beside: bool) -> None:
    rows, weights = torch.randn(9, HIDDEN).bfloat16(), torch.rand(3, TOP_K)
    slots = torch.tensor([3, -1, 8, -1, -1, -1, 0, 1, 2], dtype=torch.int32)
    rows[5] = torch.nan
    out = np.full((3, HIDDEN), 0x7FFF, np.int16)
    added = torch.randn(3, HIDDEN).bfloat16()
    given = rows.view(torch.int16).numpy(), weights.numpy(), slots.numpy(), added.view(torch.int16).numpy() if beside else None
    kernels.launch("moe_finalize", (3, 1, 1), 256, *given, out)
    found, wanted = torch.from_numpy(out).view(torch.bfloat16), plain.finalize(rows, weights, slots)
    wanted, least = (wanted + added, 2**-6) if beside else (wanted, 2**-20)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=least)


def test_ops_are_known_to_export() -> None:
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # the schema's check cannot compare FP8 tensors
    indices, weights = routes(3, 2, 4)
    torch.library.opcheck(op.moe_permute, (indices, 4, 1))
    for form, call in (("fp8", op.moe_fp8_block), ("nvfp4", op.moe_w4a16_nvfp4)):
        unit = FORMS[form][2]
        inputs = torch.randn(3, unit).bfloat16(), indices, weights, *FORMS[form][1](4, unit, unit)
        torch.library.opcheck(call, (*inputs, 0), test_utils=checks)
        torch.library.opcheck(call, (*inputs, 0, *shared_weights(64, unit)), test_utils=checks)


def test_what_does_not_fit_is_refused() -> None:
    indices, weights = routes(3, 2, 4)
    x, matrices = torch.randn(3, 256).bfloat16(), fp8_weights(4, 128, 256)
    with pytest.raises(ConfigError, match=r"must be int32 \(or int64\) and float32"):
        op.moe_fp8_block(x, indices, weights.double(), *matrices)
    with pytest.raises(ConfigError, match=r"with H = 128"):
        op.moe_fp8_block(x[:, :128], indices, weights, *matrices)
    with pytest.raises(ConfigError, match=r"down_scale is .*must be torch.float32 \[4, 2, 1\]"):
        op.moe_fp8_block(x, indices, weights, *matrices[:3], matrices[1])
    with pytest.raises(ConfigError, match=r"gate_up is .*\[4, 257, 256\]"):
        op.moe_fp8_block(x, indices, weights, torch.zeros(4, 257, 256).to(FP8), *matrices[1:])
    with pytest.raises(ConfigError, match=r"indices are torch\.float32"):
        op.moe_permute(weights, 4)
    with pytest.raises(ConfigError, match=r"shared expert is .*\[2S, H\] and \[H, S\] with H = 256"):
        op.moe_fp8_block(x, indices, weights, *matrices, 0, *shared_weights(64, 128))
    with pytest.raises(ConfigError, match=r"one of two weights: give shared_gate_up and shared_down"):
        op.moe_fp8_block(x, indices, weights, *matrices, 0, shared_weights(64, 256)[0])
    with pytest.raises(ConfigError, match="multiples of it"):
        op.moe_w4a16_nvfp4(torch.randn(3, 24).bfloat16(), indices, weights, *nvfp4_weights(4, 16, 24))
