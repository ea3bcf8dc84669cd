"""W4A16_NVFP4: NVFP4 weights with activations in 16 bits.

The tensors of `nvfp4` without `input_scale`. A checkpoint that lacks it must say W4A16_NVFP4, and one that says NVFP4
must have it: loaders that expect the scale and find none multiply by whatever memory holds.
"""

from __future__ import annotations

from pipeline.formats.nvfp4 import Nvfp4

__all__ = ["W4A16_NVFP4"]

W4A16_NVFP4 = Nvfp4(name="w4a16_nvfp4", quant_algo="W4A16_NVFP4", static_input=False)
