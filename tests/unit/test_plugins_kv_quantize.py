"""The KV cache's quantiser against its reference, to the bit: its own source run on the CPU, the op everywhere, on a GPU if any."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from tests._utils.cuda_on_cpu import CudaOnCpu

torch = pytest.importorskip("torch", reason="the op is torch's")

from plugins.kv_quantize import op, reference  # noqa: E402
from tests._utils.peers import poison  # noqa: E402

SIGNATURES = {"kv_quantize": "const uint4*, uint2*, float*, int, int, int"}
CHUNK, DIM, THREADS = 5, 72, 64
KINDS = ("random", "outliers", "mostly zero", "zeros", "equal", "nan", "inf")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")),
]


def inputs(kind: str, tokens: int, dim: int) -> torch.Tensor:
    x = torch.randn(tokens, dim)
    if kind == "outliers":
        x[::3, 1] *= 1e4
    if kind == "mostly zero":
        x *= torch.rand(tokens, dim) < 1e-2
    if kind == "zeros":
        x[:CHUNK] = 0
    if kind == "equal":
        x = torch.full_like(x, -0.3)
    if kind in ("nan", "inf") and tokens:
        x[0, 3] = float(kind)
    return x.bfloat16()


def same(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float().cpu(), other.float().cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module", params=[False, True], ids=["fp8", "int8"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.dtype, CudaOnCpu]:
    defines = {"CHUNK": CHUNK, "DIM": DIM, "THREADS": THREADS, "INT8": int(request.param)}
    source = CudaOnCpu(Path(op.__file__).with_name("kernel.cu"), SIGNATURES, defines, tmp_path_factory.mktemp("kv"))
    return torch.int8 if request.param else torch.float8_e4m3fn, source


@pytest.mark.parametrize("quantile", [0.5, 0.999, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_vs_reference(kernel: tuple[torch.dtype, CudaOnCpu], kind: str, quantile: float) -> None:
    dtype, source = kernel
    for tokens in (1, CHUNK, 13):
        x = inputs(kind, tokens, DIM)
        wanted = reference.kv_quantize(x, CHUNK, quantile, dtype)
        found = torch.full_like(wanted[0], -1), torch.full_like(wanted[1], -1)
        counts = CHUNK * DIM, ((tokens - 1) % CHUNK + 1) * DIM
        over = [count - reference.place(quantile, count) for count in counts]
        arrays = [tensor.view(torch.uint8).numpy() for tensor in (x, *found)]
        source.launch("kv_quantize", (len(wanted[1]), 1, 1), THREADS, *arrays, tokens, *over)
        same(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("int8", [False, True], ids=["fp8", "int8"])
def test_op_vs_reference(device: str, int8: bool) -> None:
    dtype = torch.int8 if int8 else torch.float8_e4m3fn
    for kind in KINDS:
        for tokens, chunk, dim in ((0, 64, 576), (1, 64, 576), (67, 32, 576), (131, 16, 192)):
            x = inputs(kind, tokens, dim)
            poison(device)
            found = torch.ops.r1_pipeline.kv_quantize(x.to(device), chunk, 0.999, int8)
            same(found, reference.kv_quantize(x, chunk, 0.999, dtype))


def test_a_quantile_spares_the_rest_of_a_chunk_from_outliers() -> None:
    x = inputs("outliers", 64, 576)
    error = {}
    for quantile in (0.999, 1.0):
        back = op.kv_dequantize(*op.kv_quantize(x, 64, quantile, True), 64).float()
        rest = x.float().abs() < 10
        error[quantile] = float((back - x.float())[rest].norm() / x.float()[rest].norm())
    assert error[0.999] < 0.02 < error[1.0]


def test_op_is_known_to_export() -> None:
    for int8 in (False, True):
        torch.library.opcheck(
            op.kv_quantize, (inputs("random", 7, 64), 4, 0.999, int8), test_utils=("test_faketensor", "test_aot_dispatch_dynamic")
        )


@pytest.mark.parametrize(("shape", "chunk", "quantile"), [((4, 12), 2, 0.9), ((4, 576), 200, 0.9), ((4, 576), 4, 0.0)])
def test_what_the_kernel_cannot_take_is_refused(shape: tuple[int, int], chunk: int, quantile: float) -> None:
    with pytest.raises(ConfigError, match=r"multiple of 8|tokens of"):
        op.kv_quantize(torch.zeros(shape).bfloat16(), chunk, quantile)


def test_more_than_the_kernel_counts_is_refused() -> None:
    """As a view that takes no memory."""
    with pytest.raises(ConfigError, match="too many"):
        op.kv_quantize(torch.zeros(1, 64).bfloat16().expand(op.MAX_ELEMENTS // 64, 64), 64)
