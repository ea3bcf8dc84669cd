"""The quantiser as a torch op: CUDA runs the kernel, CPU the reference, and shapes are known to `torch.export`.

    codes, scales = torch.ops.r1_pipeline.kv_quantize(x, 64, 0.999, False)

x BF16 [N, D] (the latent cache's rows: D = 576), a scale for each 64 tokens, FP8 (or INT8 with the last argument). The kernel
is compiled for each (chunk, D); it holds a chunk in registers, at most 65536 values of which D a multiple of 8 make a row.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from plugins.kv_quantize import reference
from plugins.nvrtc import Source, aligned

__all__ = ["kv_dequantize", "kv_quantize"]

SOURCE = Source(Path(__file__).with_name("kernel.cu"))
MAX_CHUNK, VALUES_A_THREAD = 65536, 96
MAX_ELEMENTS = 8 << 31
"""Of all chunks: pieces of 8 are counted in 31 bits."""


@torch.library.custom_op("r1_pipeline::kv_quantize", mutates_args=(), device_types="cuda")
def kv_quantize(x: Tensor, chunk: int, quantile: float = 0.999, int8: bool = False) -> tuple[Tensor, Tensor]:
    """x BF16 [N, D] -> codes [N, D] in E4M3 or INT8, scales F32 [ceil(N / chunk)]"""
    _check(x, chunk, quantile)
    out = _outputs(x, chunk, int8)
    if x.numel():
        launch(aligned(x), *out, chunk, quantile)
    return out


def launch(x: Tensor, codes: Tensor, scales: Tensor, chunk: int, quantile: float, overlap: bool = False) -> None:
    """The kernel alone. `overlap`: let it start while the kernel before it on the stream still runs."""
    tokens, dim = x.shape
    threads = next(count for count in (128, 256, 384, 512, 768) if chunk * dim <= count * VALUES_A_THREAD)
    counts = chunk * dim, ((tokens - 1) % chunk + 1) * dim
    over = [count - reference.place(quantile, count) for count in counts]
    with torch.cuda.device(x.device):
        module = SOURCE.module(CHUNK=chunk, DIM=dim, THREADS=threads, INT8=int(codes.dtype == torch.int8))
        module.launch("kv_quantize", (len(scales), 1, 1), threads, x, codes, scales, tokens, *over, overlap=overlap)


def kv_dequantize(codes: Tensor, scales: Tensor, chunk: int) -> Tensor:
    """codes [N, D], scales F32 [ceil(N / chunk)] -> BF16 [N, D], in plain torch"""
    return reference.kv_dequantize(codes, scales, chunk)


@kv_quantize.register_fake
def _(x: Tensor, chunk: int, quantile: float = 0.999, int8: bool = False) -> tuple[Tensor, Tensor]:
    return _outputs(x, chunk, int8)


@kv_quantize.register_kernel("cpu")
def _(x: Tensor, chunk: int, quantile: float = 0.999, int8: bool = False) -> tuple[Tensor, Tensor]:
    _check(x, chunk, quantile)
    return reference.kv_quantize(x, chunk, quantile, _dtype(int8))


def _check(x: Tensor, chunk: int, quantile: float) -> None:
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] % 8:
        raise ConfigError(f"x is {x.dtype} {list(x.shape)}: it must be bfloat16 [N, D] with D a multiple of 8.")
    if chunk < 1 or chunk * x.shape[1] > MAX_CHUNK or not 0 < quantile <= 1:
        found = f"{chunk} tokens of {x.shape[1]} values and quantile {quantile}"
        raise ConfigError(f"{found}: a chunk has 1 to {MAX_CHUNK // x.shape[1]} tokens here, and the quantile is in (0, 1].")
    if x.numel() >= MAX_ELEMENTS:
        raise ConfigError(f"{x.numel()} elements in one call are too many: the kernel takes fewer than {MAX_ELEMENTS}.")


def _dtype(int8: bool) -> torch.dtype:
    return torch.int8 if int8 else torch.float8_e4m3fn


def _outputs(x: Tensor, chunk: int, int8: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=_dtype(int8), memory_format=torch.contiguous_format)
    return codes, x.new_empty((x.shape[0] + chunk - 1) // chunk, dtype=torch.float32)
