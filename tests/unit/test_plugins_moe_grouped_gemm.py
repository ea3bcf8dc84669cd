"""The routed experts against float64: the op on the CPU, all of it where there is an H200."""

from __future__ import annotations

import pytest

from pipeline.core.errors import ConfigError

torch = pytest.importorskip("torch", reason="the ops are torch's")

from plugins.moe_grouped_gemm import op, reference  # noqa: E402

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
    "fp8": (OPS.moe_fp8_block, reference.moe_fp8_block, fp8_weights, 128),
    "nvfp4": (OPS.moe_w4a16_nvfp4, reference.moe_w4a16_nvfp4, nvfp4_weights, 16),
}


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """BF16 of the reference, but for a quantised value here and there that rounds the other way."""
    assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
    nan = wanted.isnan()
    assert torch.equal(found.isnan().cpu(), nan.cpu())
    error = (found.double() - wanted).masked_fill(nan, 0).norm()
    assert error <= 6e-3 * wanted.masked_fill(nan, 0).norm()


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
    call, plainly, make, unit = FORMS[form]
    tokens, chosen, here, everywhere, first = CASES[name]
    hidden, width = (512, 256) if device == "cuda" else (3 * unit, unit)
    inputs = [torch.randn(tokens, hidden).bfloat16(), *routes(tokens, chosen, everywhere), *make(here, width, hidden)]
    check(call(*(tensor.to(device) for tensor in inputs), first).cpu(), plainly(*inputs, first))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_all_tokens_may_want_one_expert(form: str, device: str) -> None:
    call, plainly, make, unit = FORMS[form]
    hidden, width = (512, 256) if device == "cuda" else (2 * unit, unit)
    indices, weights = torch.full((19, 2), 1, dtype=torch.int64), torch.rand(19, 2)
    indices[4, 1] = 0
    inputs = [torch.randn(19, hidden).bfloat16(), indices, weights, *make(3, width, hidden)]
    check(call(*(tensor.to(device) for tensor in inputs), 0).cpu(), plainly(*inputs, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_value_spoils_its_own_token(form: str, bad: float, device: str) -> None:
    call, plainly, make, unit = FORMS[form]
    hidden, width = (512, 256) if device == "cuda" else (2 * unit, unit)
    inputs = [torch.randn(5, hidden).bfloat16(), *routes(5, 2, 3), *make(3, width, hidden)]
    inputs[0][2, 5] = bad
    found = call(*(tensor.to(device) for tensor in inputs), 0).cpu()
    wanted = plainly(*inputs, 0)
    assert wanted[2].isfinite().sum() == 0 and found[2].isfinite().sum() == 0
    others = [0, 1, 3, 4]
    check(found[others], wanted[others])


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


def test_ops_are_known_to_export() -> None:
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # the schema's check cannot compare FP8 tensors
    indices, weights = routes(3, 2, 4)
    torch.library.opcheck(op.moe_permute, (indices, 4, 1))
    for form, call in (("fp8", op.moe_fp8_block), ("nvfp4", op.moe_w4a16_nvfp4)):
        unit = FORMS[form][3]
        inputs = torch.randn(3, unit).bfloat16(), indices, weights, *FORMS[form][2](4, unit, unit)
        torch.library.opcheck(call, (*inputs, 0), test_utils=checks)


def test_what_does_not_fit_is_refused() -> None:
    indices, weights = routes(3, 2, 4)
    x, matrices = torch.randn(3, 256).bfloat16(), fp8_weights(4, 128, 256)
    with pytest.raises(ConfigError, match=r"must be int32 \(or int64\) and float32"):
        op.moe_fp8_block(x, indices, weights.double(), *matrices)
    with pytest.raises(ConfigError, match=r"with H = 128"):
        op.moe_fp8_block(x[:, :128], indices, weights, *matrices)
    with pytest.raises(ConfigError, match=r"down_scale is .*must be torch.float32 \[4, 2, 1\]"):
        op.moe_fp8_block(x, indices, weights, *matrices[:3], matrices[1])
    with pytest.raises(ConfigError, match="multiples of it"):
        op.moe_w4a16_nvfp4(torch.randn(3, 24).bfloat16(), indices, weights, *nvfp4_weights(4, 16, 24))
