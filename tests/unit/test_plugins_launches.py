"""What ops hand to their kernels, without a GPU: the driver is a stand-in, kernels and their parameters are the sources' own.

Each launch must name a kernel of its source and give every parameter a value of its kind: a tensor for a pointer, an int for a
whole number, a float for a float, a TMA descriptor for a `TensorMap`; its grid must not be empty, its macros must be those that
the source reads, and the device of its tensors must be the current one: kernels are compiled for that and go to its stream.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="plugins are torch ops")

from plugins import nvrtc  # noqa: E402
from plugins.fused_qkv_a import op as fused_qkv_a  # noqa: E402
from plugins.kv_quantize import op as kv_quantize  # noqa: E402
from plugins.mla_absorb import op as mla_absorb  # noqa: E402
from plugins.mla_decode import op as mla_decode  # noqa: E402
from plugins.mla_prefill import op as mla_prefill  # noqa: E402
from plugins.moe_grouped_gemm import op as moe  # noqa: E402
from plugins.nvfp4_convert import op as nvfp4_convert  # noqa: E402
from plugins.quantize import op as quantize  # noqa: E402
from plugins.router_gemm import op as router_gemm  # noqa: E402
from plugins.topk_router import op as topk_router  # noqa: E402
from tests._utils.plugin_inputs import signature  # noqa: E402

BF16, F32, FP8, I32, I64, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64, torch.uint8
MOST_SHARED = 227 << 10
KINDS = {"pointer": (torch.Tensor, ctypes.c_void_p), "TensorMap": ctypes.Array, "float": float, "number": int}


def t(*shape: int, dtype: Any = BF16) -> Any:
    return torch.zeros(shape, dtype=dtype)


def kinds_of(source: bytes, name: str) -> list[str]:
    """Of a kernel's parameters."""
    return [kind_of(parameter) for parameter in signature(source, name)]


def kind_of(parameter: str) -> str:
    """One of KINDS."""
    return "pointer" if "*" in parameter else next((kind for kind in KINDS if kind in parameter.split()), "number")


class Launches:
    """Stands for a module of every source."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.grids: list[tuple[int, int, int]] = []
        self.macros: list[dict[str, Any]] = []
        """Of all modules, launched or not."""
        self.boxes: list[tuple[int, int]] = []
        """Columns and rows of what TMA takes at a time."""
        self.swizzles: list[int] = []
        """Of each, as CUtensorMapSwizzle: 0 none, 2 of 64 bytes, 3 of 128."""
        self.current: list[Any] = []
        self.at_once = 7
        """Clusters of sixteen CTAs that fit on the GPU."""

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """`torch.cuda.device`"""
        self.current.append(device)
        yield
        self.current.pop()

    def module(self, source: nvrtc.Source, **macros: int | float) -> Any:
        text = nvrtc.source_text(source.path)
        unread = [name for name in macros if not re.search(rf"\b{name}\b".encode(), text)]
        assert not unread, f"{source.path} does not read {unread}"
        assert self.current, f"{source.path} is compiled for the current device, not for its tensors'"
        self.macros.append(macros)
        at_once = self.at_once if macros.get("SPLIT", 16) == 16 else 2 * self.at_once
        return SimpleNamespace(launch=lambda *args, **more: self.launch(text, *args, **more), clusters=lambda *_: at_once)

    def encode(self, *values: Any) -> int:
        """`cuTensorMapEncodeTiled`"""
        self.boxes.append(tuple(values[6]))
        self.swizzles.append(values[9])
        return 0

    def launch(self, text: bytes, name: str, grid: Any, threads: int, *args: Any, overlap: bool = False, shared: int = 0) -> None:
        kinds = kinds_of(text, name)
        devices = {value.device for value in args if isinstance(value, torch.Tensor)}
        assert devices <= set(self.current[-1:]), f"{name} of {devices} goes to {self.current}"
        assert len(args) == len(kinds), f"{name}: {len(args)} values for {len(kinds)} parameters"
        for place, (value, kind) in enumerate(zip(args, kinds, strict=True)):
            assert isinstance(value, KINDS[kind]), f"{name}: parameter {place} is a {kind}, not {type(value).__name__}"
        assert len(grid) == 3 and all(isinstance(size, int) and size > 0 for size in grid), f"{name}: grid {grid}"
        assert 32 <= threads <= 1024 and threads % 32 == 0 and 0 <= shared <= MOST_SHARED, f"{name}: {threads} threads, {shared} B"
        self.names.append(name)
        self.grids.append(grid)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """An H200 without the GPU."""
    made = Launches()
    monkeypatch.setenv("R1_PIPELINE_KERNELS", "ours")
    monkeypatch.setattr(nvrtc.Source, "module", lambda source, **macros: made.module(source, **macros))
    monkeypatch.setattr(nvrtc, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=made.encode))
    monkeypatch.setattr(nvrtc, "_pointer", lambda tensor: tensor.data_ptr())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    caches = nvrtc.processors, nvrtc._tensor_map, mla_decode.tactics.present, moe.tactics.present
    for cache in caches:
        cache.cache_clear()
    yield made
    for cache in caches:
        cache.cache_clear()


def on_gpu(op: Any) -> Callable[..., Any]:
    """The implementation for CUDA."""
    return op._backend_fns.get("cuda") or op._backend_fns[None]


def experts(count: int, hidden: int, width: int) -> tuple[list[Any], list[Any]]:
    """In FP8 blocks, and in NVFP4."""
    fp8 = [
        t(count, 2 * width, hidden, dtype=FP8), t(count, 2 * width // 128, hidden // 128, dtype=F32),
        t(count, hidden, width, dtype=FP8), t(count, hidden // 128, width // 128, dtype=F32),
    ]  # fmt: skip
    parts = [(2 * width, hidden), (hidden, width)]
    nvfp4 = [
        each for rows, columns in parts
        for each in (t(count, rows, columns // 2, dtype=U8), t(count, rows, columns // 16, dtype=FP8), t(count, dtype=F32))
    ]  # fmt: skip
    return fp8, nvfp4


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("hidden", "count"), [(7168, 256), (7168, 384), (5120, 160)])
def test_router_gemm(launches: Launches, tokens: int, hidden: int, count: int) -> None:
    on_gpu(router_gemm.router_gemm)(t(tokens, hidden), t(count, hidden))
    name = "router_gemm_one" if tokens == 1 else "router_gemm" if tokens <= 16 else "router_gemm_many"
    assert launches.names == [name]


@pytest.mark.parametrize(("tokens", "hidden", "count", "at_once", "form"), [
    (17, 7168, 256, 7, (24, 16, 7, 5)), (32, 7168, 256, 1, (32, 16, 7, 5)), (48, 7168, 256, 7, (48, 16, 7, 5)),
    (49, 7168, 256, 7, (56, 8, 8, 4)), (64, 7168, 384, 7, (64, 8, 12, 4)), (24, 7168, 384, 7, (24, 8, 12, 4)),
    (17, 5120, 160, 7, (24, 16, 4, 5)), (17, 7168, 256, 0, None), (64, 7168, 256, 0, None),
    (17, 7168, 512, 7, None), (17, 5376, 256, 7, None),
])  # fmt: skip
def test_router_gemm_s_form_for_many_tokens(
    launches: Launches, tokens: int, hidden: int, count: int, at_once: int, form: tuple[int, int, int, int] | None
) -> None:
    launches.at_once = at_once
    on_gpu(router_gemm.router_gemm)(t(tokens, hidden), t(count, hidden))
    if form is None:
        assert launches.names == ["router_gemm"]
        return
    rows, cluster, groups, tiles = form
    assert launches.names == ["router_gemm_many"] and launches.grids == [(groups * cluster, 1, 1)]
    assert launches.boxes == [(64, rows), (64, 8 * tiles)]
    sizes = {"HIDDEN": hidden, "EXPERTS": count}
    assert launches.macros[-1] == sizes | {"ROWS": rows, "SPLIT": cluster, "GROUPS": groups, "TILES": tiles}


def test_router_gemm_s_tiles_lie_in_shared_memory() -> None:
    """Its instructions read 64 rows from each tile's first, whatever follows: of the last tile, too."""
    shapes = [(hidden, experts) for hidden in range(1024, 10240, 256) for experts in range(32, 1024, 32)]
    for tokens, (hidden, experts) in product(range(17, 65), shapes):
        for form in router_gemm.many_forms(tokens, hidden, experts):
            macros, _, shared = router_gemm.many_variant(form, tokens, hidden, experts)
            stage, chunks = 128 * (macros["ROWS"] + 8 * form.tiles), hidden // form.cluster // 64
            assert max(stage * chunks, stage * (chunks - 1) + 8192) + 1024 <= shared
            parts, barriers = -(-macros["ROWS"] // 16) * 32 * form.tiles * 16, 8 * (chunks + 1)
            assert shared + parts + barriers <= 227 << 10 and macros["GROUPS"] * form.tiles * 8 >= experts


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 32])
def test_qkv_a(launches: Launches, tokens: int) -> None:
    on_gpu(fused_qkv_a.qkv_a)(t(tokens, 7168), t(2112, 7168))
    assert len(launches.names) == 1


@pytest.mark.parametrize(("cache", "scale"), [(BF16, 1.0), (FP8, 0.5)])
def test_norm_rope_cache(launches: Launches, cache: Any, scale: float) -> None:
    token = t(64, 64, dtype=F32), t(3, dtype=I32), t(3, dtype=I64)
    on_gpu(fused_qkv_a.norm_rope_cache)(t(3, 2112), t(1536), t(512), *token, t(128, 576, dtype=cache), scale, 1e-6)
    assert launches.names == ["norm_rope_cache"]


@pytest.mark.parametrize(("count", "groups", "kept", "top"), [(256, 8, 4, 8), (384, 1, 1, 8), (160, 1, 1, 8)])
@pytest.mark.parametrize("tokens", [1, 300, 5000])
def test_topk_router(launches: Launches, tokens: int, count: int, groups: int, kept: int, top: int) -> None:
    on_gpu(topk_router.topk_router)(t(tokens, count, dtype=F32), t(count, dtype=F32), groups, kept, top, 2.5, True)
    assert launches.names == ["topk_router"]


@pytest.mark.parametrize("tokens", [1, 37, 300, 2000, 9000])
def test_quantisers(launches: Launches, tokens: int) -> None:
    x, rows = t(tokens, 1024), (t(tokens, 512, dtype=U8), t(tokens, 64, dtype=FP8), t(1, dtype=F32))
    on_gpu(quantize.fp8_quantize)(x)
    on_gpu(quantize.fp8_dequantize)(x.to(FP8), t(tokens, 8, dtype=F32))
    for tiled in (False, True):
        on_gpu(quantize.nvfp4_quantize)(x, t(1, dtype=F32), tiled)
    on_gpu(quantize.nvfp4_dequantize)(*rows)
    on_gpu(quantize.tile_nvfp4_scales)(rows[1])
    assert {"fp8_quantize", "fp8_dequantize", "nvfp4_quantize", "nvfp4_dequantize", "tile_scales"} <= set(launches.names)


@pytest.mark.parametrize("int8", [False, True])
def test_kv_quantize(launches: Launches, int8: bool) -> None:
    on_gpu(kv_quantize.kv_quantize)(t(130, 576), 64, 0.999, int8)
    assert launches.names == ["kv_quantize"]


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize(
    ("batch", "queries", "heads", "page"), [(1, 1, 128, 64), (3, 2, 16, 64), (200, 1, 128, 128), (2, 1, 64, 64)]
)
def test_mla_decode(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, cache: Any, batch: int, queries: int, heads: int, page: int
) -> None:
    monkeypatch.delenv("R1_PIPELINE_FP8_QUERIES", raising=False)
    pages = t(4, page, 576, dtype=cache), t(batch, 8, dtype=I32), t(batch, dtype=I32)
    on_gpu(mla_decode.mla_decode)(t(batch, queries, heads, 576), *pages, 0.1, 512, 0.5 if cache == FP8 else 1.0)
    name = "mla_decode_fp8" if cache == FP8 else "mla_decode"
    assert launches.names[0] == name and set(launches.names) <= {name, "mla_combine"}
    maps = list(zip(launches.boxes, launches.swizzles, strict=True))
    assert maps == ([((128, 64), 3), ((64, 64), 2)] if cache == FP8 else [((64, 64), 3)] * 2)
    monkeypatch.setenv("R1_PIPELINE_FP8_QUERIES", "0")
    on_gpu(mla_decode.mla_decode)(t(batch, queries, heads, 576), *pages, 0.1, 512, 0.5 if cache == FP8 else 1.0)
    assert launches.names.count("mla_decode") == (1 if cache == FP8 else 2)


def test_mla_prefill(launches: Launches) -> None:
    q, k, ends = t(70, 16, 192), t(100, 16, 192), (t(3, dtype=I32), t(3, dtype=I32))
    on_gpu(mla_prefill.mla_prefill)(q, k, t(100, 16, 128), *ends, 0.1)
    on_gpu(mla_prefill.mla_prefill_kv)(q, t(100, 16, 256), t(100, 64), *ends, 0.1)
    assert launches.names.count("mla_prefill") == 2


@pytest.mark.parametrize("tokens", [1, 65])
def test_mla_absorb(launches: Launches, tokens: int) -> None:
    on_gpu(mla_absorb.absorb_query)(t(tokens, 16, 192), t(16, 256, 512)[:, :128])
    assert launches.names == ["mla_absorb"]


@pytest.mark.parametrize(("tokens", "top"), [(1, 8), (40, 8), (600, 2)])
def test_experts(launches: Launches, tokens: int, top: int) -> None:
    x, routes = t(tokens, 512), (t(tokens, top, dtype=I64), t(tokens, top, dtype=F32))
    fp8, nvfp4 = experts(8, 512, 256)
    on_gpu(moe.moe_fp8_block)(x, *routes, *fp8)
    assert launches.names == ["moe_permute", "moe_gather_fp8", "moe_product", "moe_product", "moe_finalize"]
    launches.names.clear()
    on_gpu(moe.moe_w4a16_nvfp4)(x, *routes, *nvfp4, 4)
    assert launches.names == ["moe_permute", "moe_gather_bf16", "moe_product", "moe_product", "moe_finalize"]


def test_nvfp4_convert(launches: Launches) -> None:
    codes, scale = t(256, 512, dtype=FP8), t(2, 4, dtype=F32)
    amax = on_gpu(nvfp4_convert.fp8_block_amax)(codes, scale)
    on_gpu(nvfp4_convert.fp8_block_to_nvfp4)(codes, scale, amax)
    assert launches.names == ["fp8_block_amax", "fp8_block_to_nvfp4"]


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, the last two dimensions the other way round in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def described(x: Any) -> Any:
    """A tensor without its numbers; others as they are."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def layout(results: Any) -> list[tuple[Any, ...]]:
    """Types and sizes, and strides where there is a step to take."""
    each = results if isinstance(results, tuple | list) else (results,)
    return [(x.dtype, *((size, step) if size > 1 else size for size, step in zip(x.shape, x.stride(), strict=True))) for x in each]


def lying() -> Iterator[tuple[Any, list[Any]]]:
    """Ops with what they take."""
    ends = torch.tensor([0, 35, 70], dtype=I32), torch.tensor([0, 50, 100], dtype=I32)
    fp8, nvfp4 = experts(8, 512, 256)
    routes = [t(5, 2, dtype=I32), t(5, 2, dtype=F32)]
    pages = t(4, 64, 576), t(3, 8, dtype=I32), t(3, dtype=I32)
    yield router_gemm.router_gemm, [t(5, 7168), t(256, 7168)]
    yield fused_qkv_a.qkv_a, [t(5, 7168), t(2112, 7168)]
    token = t(64, 64, dtype=F32), t(3, dtype=I32), t(3, dtype=I64)
    yield fused_qkv_a.norm_rope_cache, [t(3, 2112), t(1536), t(512), *token, t(128, 576)]
    yield topk_router.topk_router, [t(5, 256), t(256, dtype=F32), 8, 4, 8, 2.5, True]
    yield from ((quantize.fp8_quantize, [t(5, 256), column_major]) for column_major in (False, True))
    yield quantize.fp8_dequantize, [t(5, 256, dtype=FP8), t(5, 2, dtype=F32)]
    yield from ((quantize.nvfp4_quantize, [t(5, 256), t(1, dtype=F32), tiled]) for tiled in (False, True))
    yield quantize.nvfp4_dequantize, [t(5, 128, dtype=U8), t(5, 16, dtype=FP8), t(1, dtype=F32)]
    yield quantize.tile_nvfp4_scales, [t(5, 16, dtype=FP8)]
    yield kv_quantize.kv_quantize, [t(130, 576), 64, 0.999, False]
    yield mla_decode.mla_decode, [t(3, 2, 128, 576), *pages, 0.1, 512, 1.0]
    yield mla_prefill.mla_prefill, [t(70, 16, 192), t(100, 16, 192), t(100, 16, 128), *ends, 0.1]
    yield mla_prefill.mla_prefill_kv, [t(70, 16, 192), t(100, 16, 256), t(100, 64), *ends, 0.1]
    yield mla_absorb.absorb_query, [t(5, 16, 192), t(16, 128, 512)]
    yield mla_absorb.absorb_output, [t(5, 16, 512), t(16, 128, 512)]
    yield moe.moe_fp8_block, [t(5, 512), *routes, *fp8, 0, t(128, 512), t(512, 64)]
    yield moe.moe_w4a16_nvfp4, [t(5, 512), *routes, *nvfp4, 4]
    yield moe.moe_permute, [routes[0], 8, 0]
    yield nvfp4_convert.fp8_block_to_nvfp4, [t(256, 512, dtype=FP8), t(2, 4, dtype=F32), t(dtype=F32), False]


EACH = pytest.mark.parametrize(("op", "given"), [pytest.param(*case, id=f"{case[0]._name}-{i}") for i, case in enumerate(lying())])


@EACH
def test_results_lie_as_export_is_told(launches: Launches, monkeypatch: pytest.MonkeyPatch, op: Any, given: list[Any]) -> None:
    """Compiled engines take results by the strides that the op's shapes promised, whatever lies behind its inputs."""
    monkeypatch.setattr(moe.shared, "beside", lambda *_: lambda: given[0])
    places = [place for place, value in enumerate(given) if isinstance(value, torch.Tensor) and value.dim() > 1]
    for place in (None, *places):
        inputs = [turned(value) if i == place else value for i, value in enumerate(given)]
        if op is fused_qkv_a.norm_rope_cache and place == 6:  # written in place: refused
            continue
        found = on_gpu(op)(*inputs)
        assert layout(found) == layout(op(*map(described, inputs))), f"input {place}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no GPU beside the first one here")
@EACH
def test_ops_on_another_gpu_than_the_current_one(op: Any, given: list[Any]) -> None:
    inputs = [value.to("cuda:1") if isinstance(value, torch.Tensor) else value for value in given]
    pairs = zip(*([each] if isinstance(each, torch.Tensor) else each for each in (op(*inputs), op(*given))), strict=True)
    for found, wanted in pairs:
        assert found.device == inputs[0].device and torch.cuda.current_device() == 0
        if op is not moe.moe_permute:  # whose pairs of an expert come in no order
            torch.testing.assert_close(found.float().cpu(), wanted.float(), equal_nan=True)
