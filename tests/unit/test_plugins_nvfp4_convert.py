"""The GPU conversion from FP8 blocks to NVFP4 against the formats' numpy reference, to the bit.

The kernels' own source runs here on the CPU (`tests/_utils/cuda_on_cpu.h`); on a machine with a GPU the op is tested too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from pipeline.formats import get_format
from pipeline.formats.fast import requantize
from pipeline.formats.numerics import BF16, E4M3
from tests._utils.cuda_on_cpu import CudaOnCpu

torch = pytest.importorskip("torch", reason="the op is torch's")

from plugins.nvfp4_convert import op  # noqa: E402

KERNEL = Path(op.__file__).with_name("kernel.cu")
SIGNATURES = {
    "fp8_block_amax": "const u8*, const float*, u32*, int, int",
    "fp8_block_to_nvfp4": "const u8*, const float*, const float*, u8*, u8*, float*, int, int",
}
SCALES = {
    "ordinary": lambda rng, shape: rng.uniform(1e-4, 3e-4, shape),
    "wide": lambda rng, shape: 10.0 ** rng.uniform(-12, 6, shape),
    "powers": lambda rng, shape: 2.0 ** rng.integers(-20, 4, shape),
    "subnormal": lambda rng, shape: rng.uniform(1, 99, shape) * 1e-42,
    "signed": lambda rng, shape: rng.normal(0, 1e-3, shape) * rng.integers(0, 2, shape),
}


def pairs(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Each largest code with each smaller one: a block's first weight is its row's, the others count up."""
    rows, columns = np.indices(shape)
    top = rows % 127
    size = np.where(columns % 16, np.minimum((columns - columns // 16 - 1) % 127, top), top)
    return size | rng.integers(0, 2, shape) << 7


CODES = {
    "uniform": lambda rng, shape: rng.integers(0, 127, shape) | rng.integers(0, 2, shape) << 7,
    "normal": lambda rng, shape: (rng.normal(0, 90, shape)).clip(-448, 448).astype(E4M3).view(np.uint8),
    "sparse": lambda rng, shape: rng.choice([0, 0x80, 1, 0x81, 0x7E, 0xFE], shape, p=[0.5, 0.4, 0.03, 0.03, 0.02, 0.02]),
    "zero": lambda rng, shape: np.full(shape, 0x80),
    "pairs": pairs,
}
SHAPES = ((1, 16), (130, 272))


def case(codes: str, scales: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes and block scales of one matrix."""
    rng = np.random.default_rng(len(codes) * 31 + len(scales))
    tiles = (-(-shape[0] // 128), -(-shape[1] // 128))
    return CODES[codes](rng, shape).astype(np.uint8), SCALES[scales](rng, tiles).astype(np.float32)


def reference(codes: np.ndarray, scales: np.ndarray, exact: bool) -> tuple[float, dict[str, np.ndarray]]:
    """amax, and what the formats make of it."""
    tensors = {"weight": codes.view(E4M3), "weight_scale_inv": scales}
    amax = get_format("fp8_block").amax(tensors)
    weight = get_format("fp8_block").dequantize(tensors)
    return amax, get_format("nvfp4").quantize(weight if exact else weight.astype(BF16), amax=amax, input_scale=1.0)


@pytest.fixture(scope="module", params=[False, True], ids=["modelopt", "exact"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, CudaOnCpu]:
    defines = {"EXACT": int(request.param)}
    return request.param, CudaOnCpu(KERNEL, SIGNATURES, defines, tmp_path_factory.mktemp("nvfp4"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scales", SCALES)
def test_kernels_vs_reference(kernels: tuple[bool, CudaOnCpu], scales: str, shape: tuple[int, int]) -> None:
    exact, source = kernels
    cases = [case(codes, scales, shape) for codes in CODES]
    codes, scale_inv = (np.stack(arrays) for arrays in zip(*cases, strict=True))
    (matrices, n, k), (_, rows, columns) = codes.shape, scale_inv.shape
    amax = np.zeros(matrices, np.float32)
    grid = (columns, rows, matrices)
    source.launch("fp8_block_amax", grid, op.THREADS, codes, scale_inv, amax, n, k)
    weight, weight_scale = (np.full((matrices, n, k // share), 0xA5, np.uint8) for share in (2, 16))
    weight_scale_2 = np.zeros(matrices, np.float32)
    arrays = (codes, scale_inv, amax, weight, weight_scale, weight_scale_2)
    source.launch("fp8_block_to_nvfp4", grid, op.THREADS, *arrays, n, k)
    for index, (top, wanted) in enumerate(reference(*matrix, exact) for matrix in cases):
        assert amax[index] == np.float32(top)
        assert weight_scale_2[index] == wanted["weight_scale_2"]
        np.testing.assert_array_equal(weight_scale[index], wanted["weight_scale"].view(np.uint8))
        np.testing.assert_array_equal(weight[index], wanted["weight"])


@pytest.mark.parametrize("factor", [1.0037, 3.7], ids=["not in BF16", "of a fused layer"])
def test_kernel_with_the_amax_of_others(kernels: tuple[bool, CudaOnCpu], factor: float) -> None:
    exact, source = kernels
    codes, scale_inv = case("normal", "ordinary", (130, 272))
    tensors = {"weight": codes.view(E4M3), "weight_scale_inv": scale_inv}
    amax = np.full(1, get_format("fp8_block").amax(tensors) * factor, np.float32)
    target = get_format("nvfp4")
    wanted = requantize(get_format("fp8_block"), tensors, target, amax=float(amax[0]), input_scale=1.0, exact=exact)
    made = np.zeros((130, 136), np.uint8), np.zeros((130, 17), np.uint8), np.zeros(1, np.float32)
    source.launch("fp8_block_to_nvfp4", (3, 2, 1), op.THREADS, codes, scale_inv, amax, *made, 130, 272)
    for suffix, array in zip(("weight", "weight_scale", "weight_scale_2"), made, strict=True):
        assert array.tobytes() == wanted[suffix].tobytes(), suffix


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [False, True], ids=["modelopt", "exact"])
@pytest.mark.parametrize("scales", SCALES)
def test_op_vs_reference(device: str, scales: str, exact: bool) -> None:
    shape = (576, 272) if device == "cuda" else (130, 48)
    cases = [case(codes, scales, shape) for codes in CODES]
    codes, scale_inv = (torch.from_numpy(np.stack(arrays)).to(device) for arrays in zip(*cases, strict=True))
    amax = torch.ops.r1_pipeline.fp8_block_amax(codes.view(torch.float8_e4m3fn), scale_inv)
    weight, weight_scale, weight_scale_2 = torch.ops.r1_pipeline.fp8_block_to_nvfp4(codes, scale_inv, amax, exact)
    for index, arrays in enumerate(cases):
        top, wanted = reference(*arrays, exact)
        assert amax[index].item() == top
        assert weight_scale_2[index].item() == wanted["weight_scale_2"]
        np.testing.assert_array_equal(weight_scale[index].view(torch.uint8).cpu().numpy(), wanted["weight_scale"].view(np.uint8))
        np.testing.assert_array_equal(weight[index].cpu().numpy(), wanted["weight"])


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_lie_oddly_are_taken(device: str) -> None:
    codes, scale_inv = (torch.from_numpy(array).to(device) for array in case("normal", "ordinary", (160, 64)))
    amax = op.fp8_block_amax(codes, scale_inv)
    shifted = torch.cat([codes.new_zeros(3), codes.flatten()])[3:].view(160, 64)
    strided = torch.stack([codes, codes], dim=-1)[..., 0]
    wanted = op.fp8_block_to_nvfp4(codes, scale_inv, amax)
    for odd in (shifted, strided):
        assert torch.equal(op.fp8_block_amax(odd, scale_inv), amax)
        assert all(map(torch.equal, op.fp8_block_to_nvfp4(odd, scale_inv, amax)[::2], wanted[::2]))


@pytest.mark.parametrize("device", DEVICES)
def test_amax_of_nan_or_infinite_weights_is_nan(device: str) -> None:
    codes, scale_inv = torch.zeros(2, 128, 128, dtype=torch.uint8), torch.ones(2, 1, 1)
    codes[0, 5, 7], codes[1, 100, 3], scale_inv[1] = 0xFF, 0x7E, torch.inf
    amax = op.fp8_block_amax(codes.to(device), scale_inv.to(device))
    assert not amax.isfinite().any()


def test_op_is_known_to_export() -> None:
    codes, scale_inv = (torch.from_numpy(array) for array in case("uniform", "ordinary", (130, 48)))
    torch.library.opcheck(op.fp8_block_amax, (codes, scale_inv))
    torch.library.opcheck(op.fp8_block_to_nvfp4, (codes, scale_inv, torch.ones(()), True))


@pytest.mark.parametrize(
    ("codes", "scale_inv", "word"),
    [
        (torch.zeros(128, 24, dtype=torch.uint8), torch.ones(1, 1), "multiple of 16"),
        (torch.zeros(128, 32), torch.ones(1, 1), "one byte"),
        (torch.zeros(129, 32, dtype=torch.uint8), torch.ones(1, 1), r"need float32 \[2, 1\]"),
        (torch.zeros(128, dtype=torch.uint8), torch.ones(1), "k a multiple"),
    ],
)
def test_shapes_that_no_kernel_takes_are_refused(codes: torch.Tensor, scale_inv: torch.Tensor, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        op.fp8_block_amax(codes, scale_inv)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")
def test_tensors_of_another_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="on cuda"):
        op.fp8_block_amax(torch.zeros(128, 32, dtype=torch.uint8, device="cuda"), torch.ones(1, 1))
