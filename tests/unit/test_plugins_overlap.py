"""Programmatic dependent launch: a kernel that begins early reads what the one before it writes only when that is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="kernels run on torch's device")

from torch import Tensor  # noqa: E402

from plugins.fused_qkv_a import op as qkv  # noqa: E402
from plugins.kv_quantize import op as kv  # noqa: E402
from plugins.nvrtc import Source  # noqa: E402
from plugins.quantize import op as quantize  # noqa: E402
from plugins.router_gemm import op as gemm  # noqa: E402
from plugins.topk_router import op as router  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no GPU of sm_90 or later here"
)

SLOW = """
extern "C" __global__ void slow(const uint4* from, uint4* to, int count) {
  asm volatile("griddepcontrol.launch_dependents;");
  const long long begin = clock64();
  while (clock64() - begin < 300000) {}
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""
Launch = Callable[[Tensor, bool], object]


def _product(experts: int, tokens: int) -> tuple[Tensor, list[Tensor], Launch]:
    weight = torch.randn(experts, 7168, device="cuda").bfloat16()
    out = torch.empty(tokens, experts, device="cuda", dtype=torch.float32 if experts == 256 else torch.bfloat16)
    return torch.randn(tokens, 7168, device="cuda").bfloat16(), [out], lambda x, overlap: gemm.launch(x, weight, out, overlap)


def _topk() -> tuple[Tensor, list[Tensor], Launch]:
    bias, weights = torch.randn(256, device="cuda"), torch.empty(64, 8, device="cuda")
    out = [weights, torch.empty_like(weights, dtype=torch.int32)]
    return torch.randn(64, 256, device="cuda"), out, lambda x, overlap: router.launch(x, bias, *out, 8, 4, 8, 2.5, overlap=overlap)


def _tail() -> tuple[Tensor, list[Tensor], Launch]:
    norms = [torch.randn(size, device="cuda").bfloat16() for size in (1536, 512)]
    positions, slots = torch.arange(64, device="cuda", dtype=torch.int32), torch.arange(64, device="cuda")
    cos_sin, q_a = torch.randn(64, 64, device="cuda"), torch.empty(64, 1536, device="cuda").bfloat16()
    cache = torch.empty(64, 576, device="cuda").bfloat16()
    inputs = *norms, cos_sin, positions, slots, cache, q_a, 1.0, 1e-6
    return torch.randn(64, 2112, device="cuda").bfloat16(), [q_a, cache], lambda x, overlap: qkv.launch(x, *inputs, overlap)


def _fp8() -> tuple[Tensor, list[Tensor], Launch]:
    x = torch.randn(64, 7168, device="cuda").bfloat16()
    out = list(quantize.fp8_quantize(x))
    return x, out, lambda x, overlap: quantize.launch_fp8(x, *out, overlap)


def _nvfp4() -> tuple[Tensor, list[Tensor], Launch]:
    x, scale = torch.randn(64, 7168, device="cuda").bfloat16(), torch.full((1,), 0.002, device="cuda")
    out = list(quantize.nvfp4_quantize(x, scale))
    return x, out, lambda x, overlap: quantize.launch_nvfp4(x, scale, *out, overlap=overlap)


def _kv(int8: bool) -> tuple[Tensor, list[Tensor], Launch]:
    x = torch.randn(128, 576, device="cuda").bfloat16()
    out = list(kv.kv_quantize(x, 64, 0.999, int8))
    return x, out, lambda x, overlap: kv.launch(x, *out, 64, 0.999, overlap)


CASES = {
    **{f"router_gemm {tokens}": lambda tokens=tokens: _product(256, tokens) for tokens in (1, 2, 8, 16, 17, 32, 64)},
    **{f"qkv_a {tokens}": lambda tokens=tokens: _product(2112, tokens) for tokens in (1, 16, 32)},
    "topk_router": _topk,
    "norm_rope_cache": _tail,
    "fp8_quantize": _fp8,
    "nvfp4_quantize": _nvfp4,
    "kv_quantize fp8": lambda: _kv(False),
    "kv_quantize int8": lambda: _kv(True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_written_late_is_waited_for(case: Callable[[], tuple[Tensor, list[Tensor], Launch]], tmp_path: Path) -> None:
    file = tmp_path / "slow.cu"
    file.write_text(SLOW, encoding="utf-8")
    written, out, launch = case()
    launch(written, False)
    wanted = [tensor.clone() for tensor in out]
    late, slow = torch.zeros_like(written), Source(file).module()
    for _ in range(5):
        for tensor in (late, *out):
            tensor.view(torch.uint8).zero_()
        torch.cuda.synchronize()
        slow.launch("slow", (8, 1, 1), 256, written, late, written.nbytes // 16)
        launch(late, True)
        assert all(torch.equal(found.view(torch.uint8), each.view(torch.uint8)) for found, each in zip(out, wanted, strict=True))
