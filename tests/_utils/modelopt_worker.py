"""Runs nvidia-modelopt's own quantisers in a process of their own, which tests must not share: it patches torch and transformers.

    python -m tests._utils.modelopt_worker IN.npz OUT.npz

IN holds `weight/KIND` float32 [N, K], which BF16 holds exactly, and for to_quantized_weight `scale/FORMAT/KIND`. OUT holds
`FORMAT/KIND/codes`, and `scales` and `scale_2` where the quantiser chooses them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

LARGEST = {"w4a16_nvfp4": (16, 2688.0), "w4a8_nvfp4_fp8": (32, 448.0)}
GIVEN = {"fp8_channel": ("fp8_pc_pt", None), "int4_awq": ("int4_awq", 128)}


def _bytes(tensor: Any) -> np.ndarray:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy()


def quantised(kind: str, weight: Any, scales: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that is compared, for one weight."""
    import torch
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    if weight.any():
        codes, scale, scale_2 = NVFP4QTensor.quantize(weight, 16)
        yield f"nvfp4/{kind}/codes", codes._quantized_data.numpy()
        yield f"nvfp4/{kind}/scales", _bytes(scale)
        yield f"nvfp4/{kind}/scale_2", scale_2.numpy()
        for name, (group, largest) in LARGEST.items():
            given = weight.abs().max().float() / largest
            codes, scale, _ = NVFP4QTensor.quantize(weight, group, weights_scaling_factor_2=given)
            yield f"{name}/{kind}/codes", codes._quantized_data.numpy()
            yield f"{name}/{kind}/scales", _bytes(scale)
        codes, scale = MXFP4QTensor.quantize(weight, 32)
        yield f"mxfp4/{kind}/codes", codes._quantized_data.numpy()
        yield f"mxfp4/{kind}/scales", scale.numpy()
    codes, scale = MXFP8QTensor.quantize(weight)
    yield f"mxfp8/{kind}/codes", _bytes(codes._quantized_data)
    yield f"mxfp8/{kind}/scales", scale.numpy()
    for name, (algorithm, block) in GIVEN.items():
        given = torch.from_numpy(scales[name])
        yield f"{name}/{kind}/codes", _bytes(to_quantized_weight(weight, given, algorithm, block_size=block))


def main(source: str, target: str) -> None:
    """All kinds of weight in one process: the import alone takes nine seconds."""
    import torch

    torch.set_num_threads(1)
    with np.load(source) as given:
        arrays = dict(given)
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name.startswith("weight/"):
            kind = name.partition("/")[2]
            scales = {item: arrays[f"scale/{item}/{kind}"] for item in GIVEN}
            found |= dict(quantised(kind, torch.from_numpy(array).to(torch.bfloat16), scales))
    np.savez(target, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
