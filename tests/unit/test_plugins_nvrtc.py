"""Compiling kernels at first use: the cache, and the sentences where a GPU, a driver or NVRTC is missing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import MissingToolError, StageError

torch = pytest.importorskip("torch", reason="kernels run on torch's device")

from plugins import nvrtc  # noqa: E402
from plugins.moe_grouped_gemm import launch as moe  # noqa: E402
from plugins.router_gemm import op as gemm  # noqa: E402
from plugins.topk_router import op as router  # noqa: E402

SOURCES = sorted(Path(nvrtc.__file__).parent.glob("**/*.cu"))
BUILDS = {
    "plugins": [{"THREADS": 256, "TURNS": turns} for turns in (1, 4)],
    "fused_qkv_a": [{"Q": 1536, "LATENT": 512, "ROPE": 64, "FP8": fp8} for fp8 in (0, 1)],
    "mla_decode": [
        {"HEADS": 128, "PAGE": 64, "FP8": 0, "AT_ONCE": 4, "GROUPS": 1},
        {"HEADS": 16, "PAGE": 64, "FP8": 1, "AT_ONCE": 8, "GROUPS": 4},
    ],
    "mla_decode/sm90_fp8.cu": [{"HEADS": heads, "PAGE": 64} for heads in (128, 16)],
    "moe_grouped_gemm": [
        moe.variant(nvfp4, swiglu, *((7168, 2048) if swiglu else (2048, 7168)), most) | {"HIDDEN": 7168, "TOP_K": 8}
        for nvfp4 in (False, True)
        for most in moe.STAGES_AND_RESIDENT[nvfp4]
        for swiglu in (True, False)
    ],
    "mla_prefill": [{"L2_BYTES": 32 << 20}],
    "mla_absorb": [{}],
    "kv_quantize": [{"CHUNK": 64, "DIM": 576, "THREADS": 384, "INT8": int8} for int8 in (0, 1)],
    "quantize": [{"COLUMNS": 7168, "UNROLL": count, "THREADS": 256} for count in (1, 2)],
    "nvfp4_convert": [{"EXACT": 0}, {"EXACT": 1}],
    "topk_router": [router.macros(*form, True) for form in (router.RANKED_FORM, (384, 1, 1, 8))],
    "topk_router/ranked.cu": [router.macros(*router.RANKED_FORM, True)],
    "router_gemm": [
        {"HIDDEN": 7168, "EXPERTS": 256, "THREADS": 224, "BF16_OUT": 0},
        {"HIDDEN": 7168, "EXPERTS": 2112, **gemm.variant(16, 7168, 2112)[1], "BF16_OUT": 1},
        {"HIDDEN": 7168, "EXPERTS": 256, **gemm.variant(64, 7168, 256)[1], "BF16_OUT": 0},
        {"HIDDEN": 1536, "EXPERTS": 24576, **gemm.variant(64, 1536, 24576, 1)[1], "BF16_OUT": 1},
        {"HIDDEN": 16384, "EXPERTS": 7168, **gemm.variant(1, 16384, 7168, 2)[1], "BF16_OUT": 1},
        {"HIDDEN": 18432, "EXPERTS": 7168, **gemm.variant(16, 18432, 7168, 1)[1], "BF16_OUT": 1},
    ],
    "router_gemm/sm90_many.cu": [
        gemm.many_variant(form, rows, 7168, 256)[0] for rows in range(24, 65, 8) for form in gemm.many_forms(rows, 7168, 256)
    ],
}
"""Macros of each plugin's kernels, or of one file's."""


def has_nvrtc() -> bool:
    try:
        nvrtc._compiler()
    except MissingToolError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_kernels_are_refused_in_a_sentence() -> None:
    with pytest.raises(MissingToolError, match="needs an NVIDIA GPU"):
        nvrtc.Source(SOURCES[0]).module()


def test_a_compiled_kernel_is_kept_and_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bytes] = []

    class Compiler:
        @staticmethod
        def nvrtcVersion(*_: object) -> int:  # noqa: N802
            return 0

    monkeypatch.setenv("R1_PIPELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_compiler", Compiler)
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, options: compiled.append(source) or b"cubin of " + source)
    assert [nvrtc._cached(b"a", ("-DX=1",)), nvrtc._cached(b"a", ("-DX=1",))] == [b"cubin of a"] * 2
    assert nvrtc._cached(b"a", ("-DX=2",)) == b"cubin of a"
    assert len(compiled) == 2
    kept, plain = list((tmp_path / "kernels").iterdir()), tmp_path / "plain"
    plain.touch()
    assert [file.suffix for file in kept] == [".cubin"] * 2
    assert {file.stat().st_mode for file in kept} == {plain.stat().st_mode}  # another user may serve them


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.parent.name}/{source.name}")
def test_kernels_compile(source: Path, architecture: str) -> None:
    file = f"{source.parent.name}/{source.name}"
    name = file if file in BUILDS else source.parent.name
    if nvrtc.BOUND.match(source.name) and not source.name.startswith(architecture.replace("_", "")):
        pytest.skip(f"{file} is for another chip alone")
    target = f"--gpu-architecture={architecture}{nvrtc.Source(source).suffix}"
    for defines in BUILDS[name]:
        options = (target, *nvrtc.FLAGS, *(f"-D{name}={value}" for name, value in defines.items()))
        assert nvrtc.compile_source(nvrtc.source_text(source), options).startswith(b"\x7fELF")


def test_much_shared_memory_is_allowed_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[int, int]] = []

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: allowed.append(args[1::2]) or 0 if name == "cuKernelSetAttribute" else 0

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    module = nvrtc.Module(b"a cubin")
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        module.launch("kernel", (1, 1, 1), 32, 3, shared=100_000)
    assert allowed == [(100_000, 0), (100_000, 1)]


@pytest.mark.parametrize(("width", "allowed"), [(0, []), (8, []), (16, [(nvrtc.ANY_CLUSTER, 1)])])
def test_wide_clusters_are_allowed_and_counted(width: int, allowed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    given, asked, answer = list[tuple[int, int]](), list[tuple[int, int, int]](), [0]

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 0

        def cuKernelGetAttribute(self, found: Any, attribute: int, *_: Any) -> int:  # noqa: N802
            assert attribute == nvrtc.CLUSTER_WIDTH
            found._obj.value = width
            return 0

        def cuKernelSetAttribute(self, attribute: int, value: int, *_: Any) -> int:  # noqa: N802
            given.append((attribute, value))
            return 0

        def cuOccupancyMaxActiveClusters(self, found: Any, _: Any, config: Any) -> int:  # noqa: N802
            asked.append((config._obj.grid_x, config._obj.block_x, config._obj.shared))
            found._obj.value = 0 if answer[0] else 7
            return answer[0]

        def cuGetErrorString(self, *_: Any) -> int:  # noqa: N802
            return 0

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    module = nvrtc.Module(b"a cubin")
    assert [module.clusters("kernel", 224, 1000) for _ in range(2)] == [7, 7] and given == allowed
    assert asked == [(max(1, width), 224, 1000)], "once"
    answer[0] = nvrtc.INVALID_CLUSTER
    assert module.clusters("kernel", 224, 2000) == 0
    answer[0] = 700
    with pytest.raises(StageError, match="could not count clusters of other"):
        module.clusters("other", 224, 1000)


def test_tensors_of_the_host_are_refused() -> None:
    with pytest.raises(StageError, match=r"a \[2, 8\] tensor on cpu"):
        nvrtc.tensor_map(torch.zeros(2, 8, dtype=torch.bfloat16), 2)


@needs_nvrtc
def test_a_kernel_that_does_not_compile_says_why() -> None:
    with pytest.raises(StageError, match="expected a"):
        nvrtc.compile_source(b"int;;x(", ("--gpu-architecture=sm_90",))
