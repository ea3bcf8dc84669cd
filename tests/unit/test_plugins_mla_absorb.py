"""The products around absorbed attention against float32: ops and cuBLAS's form on the CPU, the kernel where there is an H200."""

from __future__ import annotations

import pytest

from pipeline.core.errors import ConfigError

torch = pytest.importorskip("torch", reason="the ops are torch's")

from plugins.mla_absorb import op, reference, tactics  # noqa: E402
from tests._utils.peers import poison  # noqa: E402

HAS_WGMMA = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here"))]
CLOSE = {"rtol": 1e-2, "atol": 1e-2}


def case(device: str, tokens: int, heads: int) -> tuple[torch.Tensor, ...]:
    """q, latent, and both weights as views of one kv_b."""
    q, latent = (torch.randn(tokens, heads, width, device=device).bfloat16() for width in (192, 512))
    return q, latent, *torch.randn(heads, 256, 512, device=device).mul(0.05).bfloat16().split((128, 128), 1)


@pytest.mark.parametrize("device", DEVICES)
def test_ops_vs_reference(device: str) -> None:
    shapes = [(1, 1), (7, 3), (0, 2)]
    if device == "cuda":
        shapes += [(1, 128), (63, 128), (64, 16), (65, 128), (200, 128), (1031, 8)]
    for tokens, heads in shapes:
        q, latent, w_uk, w_uv = case(device, tokens, heads)
        torch.testing.assert_close(torch.ops.r1_pipeline.absorb_query(q, w_uk).float(), reference.absorb_query(q, w_uk), **CLOSE)
        found = torch.ops.r1_pipeline.absorb_output(latent, w_uv)
        torch.testing.assert_close(found.float(), reference.absorb_output(latent, w_uv), **CLOSE)


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize("tokens", [1, 5, 64, 129, 1000])
def test_kernel_vs_reference(tokens: int) -> None:
    for heads in (128, 16, 1):
        q, _, w_uk, _ = case("cuda", tokens, heads)
        out = torch.full((tokens, heads, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
        op.launch(q, w_uk, out)
        torch.testing.assert_close(out.float(), reference.absorb_query(q, w_uk), **CLOSE)


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize("name", ["ours", "bmm"])
def test_each_implementation_in_the_op_vs_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(tactics.TABLE, "choose", lambda same, sizes, names: asked.append(names) or name)
    for tokens, heads in ((1, 128), (65, 128), (300, 16)):
        q, latent, w_uk, w_uv = case("cuda", tokens, heads)
        poison()
        torch.testing.assert_close(op.absorb_query(q, w_uk).float(), reference.absorb_query(q, w_uk), **CLOSE)
        torch.testing.assert_close(op.absorb_output(latent, w_uv).float(), reference.absorb_output(latent, w_uv), **CLOSE)
    assert asked == [("ours", "bmm")] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_batched_products_vs_reference(device: str) -> None:
    q, latent, w_uk, w_uv = case(device, 5, 3)
    query, out = torch.full((5, 3, 576), torch.nan), torch.full((5, 3, 128), torch.nan)
    query, out = (x.bfloat16().to(device) for x in (query, out))
    tactics.bmm_query(q, w_uk, query)
    tactics.bmm_output(latent, w_uv, out)
    torch.testing.assert_close(query.float(), reference.absorb_query(q, w_uk), **CLOSE)
    torch.testing.assert_close(out.float(), reference.absorb_output(latent, w_uv), **CLOSE)


def test_both_make_what_attention_over_heads_makes() -> None:
    """softmax(q k) v with keys and values of each head is the same through the latents."""
    q, latent, w_uk, w_uv = (x.float() for x in case("cpu", 6, 2))
    q, latent = q[..., :128], latent[:, 0] / 20
    keys, values = (torch.einsum("sl,ahl->sah", latent, weight) for weight in (w_uk, w_uv))
    wanted = torch.einsum("ats,sav->tav", torch.einsum("tan,san->ats", q, keys).softmax(-1), values)
    weights = torch.einsum("tal,sl->ats", reference.absorb_query(q, w_uk), latent).softmax(-1)
    found = reference.absorb_output(torch.einsum("ats,sl->tal", weights, latent), w_uv)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_not_a_number_stays_in_its_token_and_head() -> None:
    q, _, w_uk, _ = case("cpu", 3, 2)
    q[1, 0, 5] = torch.nan
    found = op.absorb_query(q, w_uk).isnan()
    assert found[1, 0, :512].all() and found.sum() == 512


def test_weights_need_no_copy() -> None:
    _, _, w_uk, w_uv = case("cpu", 1, 3)
    for weight in (w_uk, w_uv):
        matrix, pitch = op._weight_matrix(weight)
        assert matrix.data_ptr() == weight.data_ptr() and pitch == 256
        torch.testing.assert_close(matrix[pitch : pitch + 128], weight[1])


def test_rows_that_are_one_in_memory_are_copied() -> None:
    _, _, w_uk, _ = case("cpu", 1, 3)
    matrix, pitch = op._weight_matrix(w_uk[:, :1].expand_as(w_uk))
    torch.testing.assert_close(matrix[pitch : pitch + 128], w_uk[1, :1].expand(128, -1))


def test_ops_are_known_to_export() -> None:
    q, latent, w_uk, w_uv = case("cpu", 2, 3)
    torch.library.opcheck(op.absorb_query, (q, w_uk))
    torch.library.opcheck(op.absorb_output, (latent, w_uv))


def test_what_does_not_fit_is_refused() -> None:
    q, latent, w_uk, w_uv = case("cpu", 2, 3)
    with pytest.raises(ConfigError, match="must be bfloat16"):
        op.absorb_query(q.float(), w_uk)
    with pytest.raises(ConfigError, match="must be bfloat16"):
        op.absorb_query(q, w_uk[0])
    with pytest.raises(ConfigError, match=r"\[A, V, L\]"):
        op.absorb_output(latent[..., :100], w_uv)
