"""Routed experts of one rank in TensorRT, launched from the host: five kernels in a row, their descriptors made there.

Codes of NVFP4 come as INT8, two a byte: TensorRT has no unsigned bytes inside a network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.moe_grouped_gemm import launch
from plugins.moe_grouped_gemm.op import moe_fp8_block, moe_w4a16_nvfp4
from plugins.trt import Plugin, Size, Sizes

__all__ = ["PLUGINS"]

ROUTED = {"x": "BF16", "indices": "INT32", "weights": "FLOAT"}


def _shapes(sizes: Sizes, **_: object) -> Sequence[Sequence[Size]]:
    return (sizes["x"],)


def _refusal(sizes: Sizes, **_: object) -> str:
    nvfp4 = "gate_up_scale_2" in sizes
    hidden, (experts, both, _), unit, chosen = sizes["x"][1], sizes["gate_up"], launch.COLUMNS[nvfp4], sizes["indices"][1]
    few = experts <= launch.PERMUTE_THREADS and 0 < chosen <= launch.MOST_CHOSEN
    if hidden % unit == 0 and both // 2 % unit == 0 and few:
        return ""
    most = f"up to {launch.PERMUTE_THREADS} experts of multiples of {unit}, {launch.MOST_CHOSEN} a token"
    return f"the kernels take {most}, not {experts} of {hidden} x {both // 2}, {chosen} a token"


def _fp8(*tensors: Tensor, first_expert: int) -> Sequence[Tensor]:
    return (moe_fp8_block(*tensors, first_expert),)


def _nvfp4(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, scale: Tensor, scale_2: Tensor, down: Tensor,
           *rest: Tensor, first_expert: int) -> Sequence[Tensor]:  # fmt: skip
    codes, more = (each.view(torch.uint8) for each in (gate_up, down))
    return (moe_w4a16_nvfp4(x, indices, weights, codes, scale, scale_2, more, *rest, first_expert),)


PLUGINS = (
    Plugin(
        name="moe_fp8_block",
        inputs=ROUTED | {"gate_up": "FP8", "gate_up_scale": "FLOAT", "down": "FP8", "down_scale": "FLOAT"},
        outputs={"out": "BF16"}, attributes={"first_expert": int}, shapes=_shapes, reference=_fp8, kernel=None, refusal=_refusal,
        least_sm=90, only_sm=90,
    ),
    Plugin(
        name="moe_w4a16_nvfp4",
        inputs=ROUTED | {
            "gate_up": "INT8", "gate_up_scale": "FP8", "gate_up_scale_2": "FLOAT", "down": "INT8", "down_scale": "FP8",
            "down_scale_2": "FLOAT",
        },
        outputs={"out": "BF16"}, attributes={"first_expert": int}, shapes=_shapes, reference=_nvfp4, kernel=None, refusal=_refusal,
        least_sm=90, only_sm=90,
    ),
)  # fmt: skip
