"""The quantisers against their reference, to the bit: their own source run on the CPU, the ops everywhere, on a GPU if any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from pipeline.formats import get_format
from tests._utils.cuda_on_cpu import CudaOnCpu

torch = pytest.importorskip("torch", reason="the ops are torch's")

from plugins.quantize import op, reference  # noqa: E402
from tests._utils.peers import poison  # noqa: E402

SIGNATURES = {
    "fp8_quantize": "const uint4*, uint2*, float*, u32, u32, u32, u32",
    "fp8_dequantize": "const uint2*, const float*, uint4*, u32, u32, u32",
    "nvfp4_quantize": "const uint4*, const float*, u32*, u32*, u32, u32, u32, u32",
    "nvfp4_dequantize": "const u32*, const u8*, const float*, uint4*, u32, u32, u32",
    "tile_scales": "const u32*, u32*, u32, u32, u32",
}
ROWS = (1, 3, 131)
SHAPES = [(1, 128), (3, 384), (131, 128), (37, 640), (0, 128), (1, 7168), (61, 2048)]
Kernels = tuple[int, int, CudaOnCpu]
"""Pieces of a lane, columns, and the kernels that were compiled for them."""
KINDS = ("random", "wide", "steps", "tops", "zeros", "nan", "inf")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")),
]


def inputs(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """BF16 activations that tell roundings, ranges and bad values apart."""
    x = torch.randn(shape)
    if kind == "wide":
        x *= 10.0 ** torch.randint(-20, 20, shape)
    if kind == "steps":  # every tie of E2M1 and many of E4M3, with a block's largest value at 6
        x = torch.randint(-24, 25, shape) / 4.0
        x[:, ::16] = 6.0
    if kind == "tops":  # a group's largest value is any BF16: in some 400 groups all mantissas, in 32,640 all values
        top = (torch.arange(shape[0] * shape[1] // 128) * 331 % 0x7F80).to(torch.int16).view(torch.bfloat16).view(shape[0], -1)
        x = (torch.rand(shape) * 2 - 1) * top.float().repeat_interleave(128, 1)
        x[:, ::128] = top.float()
    if kind == "zeros":
        x[:, :128] = 0
    if kind in ("nan", "inf"):
        x[0, 5] = -float(kind)
    return x.bfloat16()


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bytes, but any NaN for a NaN."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.to(found.device).float(), rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module", params=[(1, 384), (2, 384), (2, 512)], ids=["one piece", "two pieces", "whole warps"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    unroll, columns = request.param
    defines = {"UNROLL": unroll, "THREADS": 64, "COLUMNS": columns}
    return unroll, columns, CudaOnCpu(Path(op.__file__).with_name("kernel.cu"), SIGNATURES, defines, tmp_path_factory.mktemp("q"))


def run(kernels: Kernels, name: str, elements: int, *arguments: torch.Tensor | int) -> None:
    """A kernel on the CPU over `elements` values."""
    unroll, _, source = kernels
    arrays = [value.view(torch.uint8).numpy() if isinstance(value, torch.Tensor) else value for value in arguments]
    source.launch(name, (-(-elements // (8 * 64 * unroll)), 1, 1), 64, *arrays)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_kernels_vs_reference(kernels: Kernels, kind: str, rows: int) -> None:
    columns = kernels[1]
    x = inputs(kind, (rows, columns))
    wanted, scales = reference.fp8_quantize(x)
    codes, found, back = torch.full_like(wanted, -1), torch.full_like(scales, -1), torch.full_like(x, -1)
    run(kernels, "fp8_quantize", x.numel(), x, codes, found, x.numel() // 8, columns // 8, *found.stride())
    same(codes, wanted)
    same(found, scales)
    run(kernels, "fp8_dequantize", x.numel(), wanted, scales, back, x.numel() // 8, columns // 8, scales.stride(0))
    same(back, reference.fp8_dequantize(wanted, scales))


@pytest.mark.parametrize("tiled", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_kernels_vs_reference(kernels: Kernels, kind: str, rows: int, tiled: bool) -> None:
    columns = kernels[1]
    x, input_scale = inputs(kind, (rows, columns)), torch.tensor([4.0 / 2688 if kind != "steps" else 6.0 / 2688])
    codes, scales = reference.nvfp4_quantize(x, input_scale)
    wanted = reference.tile_scales(scales) if tiled else scales
    found, found_scales = torch.full_like(codes, 0xA5), torch.full_like(wanted, -1)
    pieces, stride = x.numel() // 8, columns // 64
    padding = (len(wanted) - rows) * stride
    arguments = x, input_scale, found, found_scales, pieces, padding, columns // 8, 0 if tiled else stride
    run(kernels, "nvfp4_quantize", x.numel() + padding * 8, *arguments)
    same(found_scales, wanted)
    same(found, codes)
    back, again = torch.full_like(x, -1), torch.full_like(reference.tile_scales(scales), -1)
    run(kernels, "nvfp4_dequantize", x.numel(), codes, scales, input_scale, back, pieces, columns // 8, stride * 4)
    same(back, reference.nvfp4_dequantize(codes, scales, input_scale))
    run(kernels, "tile_scales", again.numel() * 4, scales, again, rows, len(again), stride)
    same(again, reference.tile_scales(scales))


def results(call: Callable, device: str, *arguments: torch.Tensor | bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What an op gives, on a GPU in memory that held NaN."""
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in arguments]
    poison(device)
    return call(*moved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_ops_vs_reference(device: str, kind: str) -> None:
    ops = torch.ops.r1_pipeline
    input_scale = torch.tensor([4.0 / 2688])
    for shape in SHAPES + ([(605, 7168)] if device == "cuda" else []):
        x = inputs(kind, shape) if shape[0] else torch.empty(shape).bfloat16()
        codes, scales = reference.fp8_quantize(x)
        for column_major in (False, True):
            found = results(ops.fp8_quantize, device, x, column_major)
            same(found[0], codes)
            same(found[1], scales)
            assert not column_major or found[1].stride(0) == 1
        same(results(ops.fp8_dequantize, device, codes, scales), reference.fp8_dequantize(codes, scales))
        codes, scales = reference.nvfp4_quantize(x, input_scale)
        for tiled in (False, True):
            found = results(ops.nvfp4_quantize, device, x, input_scale, tiled)
            same(found[0], codes)
            same(found[1], reference.tile_scales(scales) if tiled else scales)
        same(results(ops.tile_nvfp4_scales, device, scales), reference.tile_scales(scales))
        back = results(ops.nvfp4_dequantize, device, codes, scales, input_scale)
        same(back, reference.nvfp4_dequantize(codes, scales, input_scale))


def test_nvfp4_agrees_with_the_weight_format_but_for_ties() -> None:
    x, amax = inputs("random", (64, 1024)), 4.7
    stored = get_format("nvfp4").quantize(x.float().numpy(), amax=amax, input_scale=1.0)
    codes, scales = reference.nvfp4_quantize(x, torch.tensor([np.float32(amax) / np.float32(2688)]))
    assert (scales.view(torch.uint8).numpy() != stored["weight_scale"].view(np.uint8)).mean() < 1e-3
    assert (codes.numpy() != stored["weight"]).mean() < 1e-3


def test_tiles_are_where_tensor_cores_look() -> None:
    rows, columns = 200, 8
    scales = (torch.arange(rows * columns) % 251).byte().view(rows, columns)
    flat = reference.tile_scales(scales).flatten()
    for row, column in ((0, 0), (33, 1), (127, 7), (128, 4), (199, 5)):
        tile = row // 128 * (columns // 4) + column // 4
        assert flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] == scales[row, column]


def test_ops_are_known_to_export() -> None:
    x, scale = inputs("random", (3, 128)), torch.tensor([0.002])
    codes, scales = reference.nvfp4_quantize(x, scale)
    calls = [(op.fp8_quantize, (x, False)), (op.fp8_quantize, (x, True)), (op.nvfp4_quantize, (x, scale, True))]
    calls += [(op.nvfp4_quantize, (x, scale, False)), (op.fp8_dequantize, reference.fp8_quantize(x))]
    calls += [(op.nvfp4_dequantize, (codes, scales, scale)), (op.tile_nvfp4_scales, (scales,))]
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # the schema's check cannot compare FP8 tensors
    for call, arguments in calls:
        torch.library.opcheck(call, arguments, test_utils=checks)


def test_what_kernels_cannot_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 128"):
        op.fp8_quantize(torch.zeros(2, 96).bfloat16())
    with pytest.raises(ConfigError, match=r"must be torch\.bfloat16"):
        op.nvfp4_quantize(torch.zeros(2, 64), torch.ones(1))
    codes, scales = reference.fp8_quantize(torch.zeros(2, 256).bfloat16())
    with pytest.raises(ConfigError, match=r"float32 \[2, 2\]"):
        op.fp8_dequantize(codes, scales.bfloat16())
    with pytest.raises(ConfigError, match=r"float32 \[2, 2\]"):
        op.fp8_dequantize(codes, scales[:1])
    one, small = torch.ones(1), torch.zeros(2, 64).bfloat16()
    codes, scales = reference.nvfp4_quantize(small, one)
    for scale in (one.double(), one.bfloat16(), torch.ones(2)):
        with pytest.raises(ConfigError, match=r"float32 \[1\]"):
            op.nvfp4_quantize(small, scale)
        with pytest.raises(ConfigError, match=r"float32 \[1\]"):
            op.nvfp4_dequantize(codes, scales, scale)
    with pytest.raises(ConfigError, match=r"float8_e4m3fn \[2, 4\]"):
        op.nvfp4_dequantize(codes, scales.float(), one)


@pytest.mark.parametrize("device", DEVICES)
def test_results_lie_as_export_is_told_whatever_the_input_s_strides(device: str) -> None:
    """A compiled engine reads results by the strides that shapes alone gave."""
    x = inputs("random", (256, 128)).t()
    codes, scales = reference.fp8_quantize(x.contiguous())
    turned = codes.view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    fake = op.fp8_dequantize(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (turned, scales)))
    found = results(op.fp8_dequantize, device, turned, scales)
    assert turned.stride(0) == 1 and found.stride() == fake.stride() == (256, 1)
    same(found, reference.fp8_dequantize(codes, scales))
    for given in (x, x.contiguous()):
        assert all(each.is_contiguous() for each in results(op.fp8_quantize, device, given))
