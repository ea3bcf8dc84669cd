"""W4A8_AWQ: the weights of W4A16_AWQ with FP8 activations, for Hopper.

To the tensors of `int4_awq` it adds `weight_scale_2` F32 [] = amax / 448 and `input_scale` F32 []: kernels turn each
weight into FP8 as int4 * (weight_scale / weight_scale_2) and multiply the product by weight_scale_2 * input_scale. So
the weight that is meant is the same, and fused layers must have the same weight_scale_2.
"""

from __future__ import annotations

from pipeline.formats.int4_awq import Int4Awq

__all__ = ["W4A8_AWQ"]

W4A8_AWQ = Int4Awq(name="w4a8_awq", quant_algo="W4A8_AWQ", tensor_scale=True)
