"""Norms, RoPE and cache write against their reference: the kernel on the CPU, the ops everywhere, and those on a GPU if any."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from tests._utils.cuda_on_cpu import CudaOnCpu

torch = pytest.importorskip("torch", reason="the ops are torch's")

from plugins.fused_qkv_a import op, reference  # noqa: E402
from tests._utils.peers import poison  # noqa: E402

TYPES = "const uint4*, const uint4*, const uint4*, const float*, const int*, const long long*, u8*, uint4*, float, float"
SMALL, R1, NO_KERNEL = (512, 256, 16), (1536, 512, 64), (96, 40, 16)
SLOTS, POSITIONS = 64, 100
HAS_CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_CLUSTERS, reason="no GPU of sm_90 or later here"))]


def case(sizes: tuple[int, int, int], tokens: int, fp8: bool, bad: float = 0.0) -> list[torch.Tensor]:
    """qkv, q_norm, kv_norm, cos_sin, positions, slots (one of them negative) and a poisoned cache."""
    q, latent, rope = sizes
    qkv = (torch.randn(tokens, sum(sizes)) * 3).bfloat16()
    if tokens:
        qkv[0, [5, q + 5, q + latent + 5]] = bad
    angles = torch.arange(POSITIONS).unsqueeze(1) * 10.0 ** -torch.linspace(0, 4, rope // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(POSITIONS, (tokens,), dtype=torch.int32)
    slots = torch.randperm(SLOTS)[:tokens]
    slots[1:2] = -1
    norms = [(1 + torch.randn(size) / 10).bfloat16() for size in (q, latent)]
    cache = torch.full((SLOTS, latent + rope), 0x55, dtype=torch.uint8).repeat(1, 1 if fp8 else 2)
    return [qkv, *norms, cos_sin, positions, slots, cache.view(torch.float8_e4m3fn if fp8 else torch.bfloat16)]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for the last place: sums of squares are added in another order."""
    place, least = (2.0**-3, 2.0**-9) if wanted.dtype == torch.float8_e4m3fn else (2.0**-6, 0)  # E4M3 below 2^-6: 2^-9 apart
    found, wanted = found.float().cpu(), wanted.float()
    torch.testing.assert_close(found, wanted, rtol=place, atol=least, equal_nan=True)
    assert (found == wanted).logical_or(wanted.isnan()).float().mean() > 0.98


@pytest.fixture(scope="module", params=[False, True], ids=["bf16", "fp8"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, CudaOnCpu]:
    defines = dict(zip(("Q", "LATENT", "ROPE"), SMALL, strict=True)) | {"FP8": int(request.param)}
    return request.param, CudaOnCpu(
        Path(op.__file__).with_name("kernel.cu"), {"norm_rope_cache": TYPES}, defines, tmp_path_factory.mktemp("qkv")
    )


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")], ids=["numbers", "nan", "inf"])
def test_kernel_vs_reference(kernel: tuple[bool, CudaOnCpu], bad: float) -> None:
    fp8, source = kernel
    *inputs, cache = case(SMALL, 7, fp8, bad)
    wanted = cache.clone()
    q_wanted = reference.tail(*inputs, wanted, 0.5, 1e-6)
    q_a = torch.full_like(q_wanted, torch.nan)
    arrays = [tensor.view(torch.uint8).numpy() for tensor in (*inputs, cache, q_a)]
    source.launch("norm_rope_cache", (7, 1, 1), (SMALL[0] + SMALL[1]) // 8 + 32, *arrays, 1e-6, 2.0)
    close(q_a, q_wanted)
    close(cache, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sizes", [SMALL, R1, NO_KERNEL], ids=["small", "deepseek_r1", "no kernel"])
def test_tail_vs_reference(device: str, sizes: tuple[int, int, int], fp8: bool) -> None:
    for tokens in (0, 1, 2, 37):
        *inputs, cache = case(sizes, tokens, fp8)
        wanted, found = cache.clone(), cache.to(device)
        q_wanted = reference.tail(*inputs, wanted, 0.5, 1e-6)
        poison(device)
        q_a = torch.ops.r1_pipeline.norm_rope_cache(*(tensor.to(device) for tensor in inputs), found, 0.5, 1e-6)
        close(found, wanted)
        if tokens:
            close(q_a, q_wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_tail_of_turned_rows_into_a_cache_at_an_odd_address(device: str, fp8: bool) -> None:
    qkv, *rest, cache = (tensor.to(device) for tensor in case(SMALL, 7, fp8))
    space = cache.new_empty(cache.numel() + 1)
    odd = space[1:].view(cache.shape).copy_(cache)
    poison(device)
    wanted = op.norm_rope_cache(qkv, *rest, cache)
    found = op.norm_rope_cache(qkv.t().contiguous().t(), *rest, odd)
    assert odd.data_ptr() % op.STORE and found.is_contiguous()  # as export is told
    close(found, wanted.cpu())
    close(odd, cache.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_product_vs_reference(device: str) -> None:
    weight = (torch.randn(2112, 7168, device=device) / 85).bfloat16()
    for tokens in (0, 1, 2, 3, 8, 13, 16, 17) if device == "cuda" else (0, 3):
        x = torch.randn(tokens, 7168, device=device).bfloat16()
        poison(device)
        found = torch.ops.r1_pipeline.qkv_a(x, weight)
        torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=2.0**-7, atol=1e-4)


def test_both_are_one_after_the_other() -> None:
    *inputs, cache = case(NO_KERNEL, 5, False)
    x, weight = torch.randn(5, 32).bfloat16(), torch.randn(sum(NO_KERNEL), 32).bfloat16()
    wanted = cache.clone()
    found = op.fused_qkv_a(x, weight, *inputs[1:], cache)
    assert torch.equal(found, reference.tail(reference.qkv_a(x, weight), *inputs[1:], wanted, 1.0, 1e-6))
    assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


def test_ops_are_known_to_export() -> None:
    torch.library.opcheck(op.norm_rope_cache, (*case(NO_KERNEL, 3, False), 1.0, 1e-6))
    torch.library.opcheck(op.qkv_a, (torch.randn(3, 64).bfloat16(), torch.randn(8, 64).bfloat16()))


def test_what_kernels_cannot_take_is_refused() -> None:
    qkv, *rest = case(SMALL, 3, False)
    with pytest.raises(ConfigError, match="for this cache"):
        op.norm_rope_cache(qkv[:, :8], *rest)
    with pytest.raises(ConfigError, match="int32 and int64"):
        op.norm_rope_cache(qkv, *rest[:3], rest[3].long(), *rest[4:])
    with pytest.raises(ConfigError, match="positions are"):
        op.norm_rope_cache(qkv, *rest[:3], rest[3][:2], *rest[4:])
    with pytest.raises(ConfigError, match="must be bfloat16"):
        op.qkv_a(torch.zeros(2, 256), torch.zeros(32, 256, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="must be bfloat16"):
        op.qkv_a(torch.zeros(2, 512, dtype=torch.bfloat16), torch.zeros(32, 256, dtype=torch.bfloat16))
