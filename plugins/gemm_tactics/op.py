"""A linear layer by what the tactic file holds for its shape, as a torch op; elsewhere torch's own product.

    y = torch.ops.r1_pipeline.tuned_linear(x, weight)

x BF16 [N, K], weight BF16 [O, K] -> BF16 [N, O]. On another GPU or library than the file's, and for shapes that it does not hold,
this is `torch.nn.functional.linear`; CPU runs the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from pipeline.core.errors import ConfigError
from plugins.gemm_tactics import cublaslt, reference, tactics
from plugins.nvrtc import aligned

__all__ = ["tuned_linear"]


@torch.library.custom_op("r1_pipeline::tuned_linear", mutates_args=(), device_types="cuda")
def tuned_linear(x: Tensor, weight: Tensor) -> Tensor:
    """BF16 [N, K] and [O, K] -> [N, O]"""
    _check(x, weight)
    tactic = tactics.find(len(x), *weight.shape, torch.cuda.get_device_name(x.device), cublaslt.version())
    if tactic is None:
        return linear(x, weight)
    out = _output(x, weight)
    with torch.cuda.device(x.device):
        tactics.multiply(aligned(x), aligned(weight), out, tactic)
    return out


@tuned_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _output(x, weight)


@tuned_linear.register_kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    _check(x, weight)
    return reference.linear(x, weight)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or {x.dtype, weight.dtype} != {torch.bfloat16}:
        found = f"x is {x.dtype} {list(x.shape)} and weight {weight.dtype} {list(weight.shape)}"
        raise ConfigError(f"{found}: they must be bfloat16 [N, K] and [O, K].")


def _output(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
