"""FP8 blocks to NVFP4 on a GPU: `amax` and `requantize` of `fast`, with the same bytes, for what this `takes`.

They run the ops of `plugins/nvfp4_convert`, whose kernels were measured on an H200; converting a whole checkpoint through
them was not run there. torch is imported by the first call. Safe to call from several threads: their work queues up in one
stream, and each waits for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.formats import fast
from pipeline.formats.base import Format
from pipeline.formats.fp8_block import Fp8Block
from pipeline.formats.numerics import E4M3, Array
from pipeline.formats.nvfp4 import NVFP4, Nvfp4

__all__ = ["amax", "requantize", "takes"]

DEVICE = "cuda"
"""As torch calls it."""


def takes(source: Format, target: Format) -> bool:
    """Whether there are ops for it: FP8 blocks to NVFP4 with or without input_scale, its block scales by amax."""
    if not (isinstance(source, Fp8Block) and isinstance(target, Nvfp4)):
        return False
    return (target.group_size, target.largest, target.search) == (NVFP4.group_size, NVFP4.largest, "amax")


def amax(source: Format, tensors: Mapping[str, Array], *, exact: bool = False, quick: bool = False) -> float:
    """See `fast.amax`, which computes it here if `exact`: the op rounds to BF16. It looks at every block."""
    if exact:
        return fast.amax(source, tensors, exact=True)
    from plugins.nvfp4_convert.op import fp8_block_amax

    return float(fp8_block_amax(*_sent(tensors)))


def requantize(
    source: Format,
    tensors: Mapping[str, Array],
    target: Nvfp4,
    *,
    amax: float,
    input_scale: float,
    exact: bool = False,
    out: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """See `fast.requantize`."""
    import torch

    from plugins.nvfp4_convert.op import fp8_block_to_nvfp4

    top = torch.tensor(amax, dtype=torch.float32, device=DEVICE)
    weight, scales, scale_2 = (tensor.cpu() for tensor in fp8_block_to_nvfp4(*_sent(tensors), top, exact))
    codes = {"weight": weight.numpy(), "weight_scale": scales.view(torch.uint8).numpy().view(E4M3)}
    made = codes | {"weight_scale_2": scale_2.numpy()}
    if target.static_input:
        made["input_scale"] = np.array(input_scale, np.float32)
    return fast.filled(out or {}, made)


def _sent(tensors: Mapping[str, Array]) -> tuple[Any, Any]:
    """Codes and block scales as tensors on the device."""
    import torch

    arrays = (tensors["weight"].view(np.uint8), tensors["weight_scale_inv"])
    codes, scales = (torch.from_numpy(np.require(array, requirements="CAW")).to(DEVICE) for array in arrays)
    return codes, scales
