"""W4A8_NVFP4_FP8: E2M1 weights in groups of 32, FP8 activations.

The tensors of `nvfp4` with [N, K/32] block scales, and weight_scale_2 = amax / 448 instead of amax / 2688: kernels turn
e2m1 * weight_scale into FP8, which must not exceed 448, so block scales go up to 448 / 6. `input_scale` = amax / 448 of
the activations.
"""

from __future__ import annotations

from pipeline.formats.nvfp4 import Nvfp4

__all__ = ["W4A8_NVFP4_FP8"]

W4A8_NVFP4_FP8 = Nvfp4(name="w4a8_nvfp4_fp8", quant_algo="W4A8_NVFP4_FP8", group_size=32, bits_per_weight=4 + 8 / 32, largest=448.0)
