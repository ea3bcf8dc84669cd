"""The quantisers beside sgl-kernel, TensorRT-LLM and vLLM, at R1's hidden size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plugins.bench import Bench, Call, compiled, differing, relative
from plugins.quantize import op, reference

__all__ = ["rows"]

HIDDEN, TOKENS = 7168, (1, 8, 64, 256, 1024, 4096)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """FP8 and NVFP4 quantisation, and their inverses, with x not in L2 (cold) too."""
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        yield _fp8(bench, x)
        for tiled in (False, True):
            yield _nvfp4(bench, x, tiled)
        yield from _back(bench, x)


def _fp8(bench: Bench, x: Tensor) -> dict[str, Any]:
    wanted, scales = reference.fp8_quantize(x)
    out = torch.empty_like(wanted).fill_(-1), torch.empty_like(scales).fill_(-1)
    back = reference.fp8_dequantize(wanted, scales)
    return bench.row(
        "fp8_quantize",
        {"tokens": len(x)},
        lambda overlap: op.launch_fp8(x, *out, overlap),
        error=lambda: differing(out, (wanted, scales)),
        eager=lambda: reference.fp8_quantize(x),
        compiled=lambda: compiled(reference.fp8_quantize)(x),
        peers=_fp8_peers(x),
        right=lambda found: relative(reference.fp8_dequantize(found[0][: len(x)], found[1]), back) < 1e-2,
        moved=x.numel() * 3 + x.numel() // 32,
        cold=True,
        why="both are at the rate of a launch or of the memory: either is ahead from run to run",
    )


def _fp8_peers(x: Tensor) -> dict[str, Call]:
    q, s = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(len(x), HIDDEN // 128, device="cuda")

    def sgl() -> tuple[Tensor, Tensor]:
        torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2(x, q, s, 128, 1e-10, -448.0, 448.0, False, False, None)
        return q, s

    def trtllm() -> tuple[Tensor, Tensor]:
        import trtllm_kernel  # noqa: F401  registers torch.ops.trtllm

        codes, scales = torch.ops.trtllm.fp8_quantize_1x128(x, False)
        padded = (len(x) + 3) // 4 * 4
        return codes, scales.flatten()[: HIDDEN // 128 * padded].view(HIDDEN // 128, padded).t()[: len(x)]

    def vllm() -> tuple[Tensor, Tensor]:
        torch.ops._C.per_token_group_fp8_quant(x, q, s, 128, 1e-10, -448.0, 448.0, False, False, False)
        return q, s

    return {"sgl": sgl, "trtllm": trtllm, "vllm": vllm}


def _nvfp4(bench: Bench, x: Tensor, tiled: bool) -> dict[str, Any]:
    input_scale = x.abs().amax().float().view(1) / 2688
    codes, scales = reference.nvfp4_quantize(x, input_scale)
    wanted = codes, reference.tile_scales(scales) if tiled else scales
    out = torch.full_like(codes, 0xA5), torch.empty_like(wanted[1]).fill_(-1)
    return bench.row(
        "nvfp4_quantize",
        {"tokens": len(x), "scales": "tiled" if tiled else "rows"},
        lambda overlap: op.launch_nvfp4(x, input_scale, *out, tiled, overlap),
        error=lambda: differing(out, wanted),
        eager=lambda: reference.nvfp4_quantize(x, input_scale),
        compiled=None if tiled else lambda: compiled(reference.nvfp4_quantize)(x, input_scale),
        peers={},
        right=lambda _: True,
        moved=x.numel() * 2 + x.numel() // 2 + wanted[1].numel(),
        cold=True,
    )


def _back(bench: Bench, x: Tensor) -> Iterator[dict[str, Any]]:
    """Codes to BF16."""
    input_scale = x.abs().amax().float().view(1) / 2688
    cases = {
        "fp8_dequantize": (op.fp8_dequantize, reference.fp8_dequantize, reference.fp8_quantize(x)),
        "nvfp4_dequantize": (
            op.nvfp4_dequantize,
            reference.nvfp4_dequantize,
            (*reference.nvfp4_quantize(x, input_scale), input_scale),
        ),
    }
    for name, (call, plain, inputs) in cases.items():
        wanted = plain(*inputs)
        yield bench.row(
            name,
            {"tokens": len(x)},
            lambda overlap, call=call, inputs=inputs: call(*inputs),
            error=lambda call=call, inputs=inputs, wanted=wanted: differing((call(*inputs),), (wanted,)),
            eager=lambda plain=plain, inputs=inputs: plain(*inputs),
            compiled=lambda plain=plain, inputs=inputs: compiled(plain)(*inputs),
            peers={},
            right=lambda _: True,
            moved=sum(tensor.numel() * tensor.element_size() for tensor in inputs) + x.numel() * 2,
            cold=True,
            overlaps=False,
        )
