"""The plain reference model with the activations that the engine quantises quantised, too, by `pipeline.formats`.

What is left between it and the network is then rounding: in the types of activations, and where that moves a value across a step
of its format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint import Checkpoint
from pipeline.engines.tensorrt.weights import travel_scale
from pipeline.formats import FORMATS
from pipeline.formats.fp8_channel import FP8_CHANNEL
from pipeline.formats.numerics import Float32, decode_e4m3, encode_e4m3
from pipeline.formats.nvfp4 import NVFP4
from pipeline.models import deepseek_v3

__all__ = ["reference"]

Rounding = Callable[[Float32, float], Float32]


def _nvfp4(values: Float32, scale: float) -> Float32:
    return NVFP4.dequantize(NVFP4.quantize(values, amax=scale * NVFP4.largest, input_scale=1.0))


def _fp8(values: Float32, scale: float) -> Float32:
    return decode_e4m3(encode_e4m3(values / np.float32(scale))) * np.float32(scale)


def _fp8_token(values: Float32, scale: float) -> Float32:
    return FP8_CHANNEL.dequantize(FP8_CHANNEL.quantize(values, amax=0.0, input_scale=1.0))


ROUNDINGS: dict[str, Rounding] = {"nvfp4": _nvfp4, "fp8": _fp8, "fp8_channel": _fp8_token}
"""Format of the weights -> what becomes of the activations [N, K]; not listed: nothing."""


def reference(checkpoint: Checkpoint, *, travel: str = "bf16") -> deepseek_v3.DeepseekV3:
    """The model of a checkpoint, in float32. With `travel="fp4"` tokens are rounded on their way to the experts, too."""
    state = {name: torch.from_numpy(np.array(entry.dequantized())) for name, entry in checkpoint.entries.items()}
    model = deepseek_v3.build(checkpoint.arch, state)
    scales = _input_scales(checkpoint)
    for name, module in model.named_modules():
        entry = checkpoint.entries.get(f"{name}.weight")
        folded = name.endswith("kv_b_proj")  # both of its factors are dequantised in the engine
        if travel == "fp4" and (expert := re.fullmatch(r"(.*)\.experts\.\d+\.(gate|up)_proj", name)):
            module.register_forward_pre_hook(_hook(_nvfp4, travel_scale(checkpoint.entries, expert[1])))
        if entry is not None and isinstance(module, torch.nn.Linear) and entry.format.name in ROUNDINGS and not folded:
            module.register_forward_pre_hook(_hook(ROUNDINGS[FORMATS[entry.format.name].name], scales.get(_stack(name), 1.0)))
    return model


def _stack(module: str) -> str:
    """Experts of a layer see the same activations and share their scale."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", module)


def _input_scales(checkpoint: Checkpoint) -> dict[str, float]:
    scales: dict[str, float] = {}
    for name, entry in checkpoint.entries.items():
        if "input_scale" in entry.tensors:
            key = _stack(name.removesuffix(".weight"))
            scales[key] = max(scales.get(key, 0.0), float(entry.load()["input_scale"].reshape(())))
    return scales


def _hook(rounding: Rounding, scale: float) -> Callable[[Any, tuple[Tensor]], tuple[Tensor]]:
    def before(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = inputs
        if not x.numel():  # an expert that nobody chose
            return inputs
        return (torch.from_numpy(rounding(x.flatten(0, -2).numpy(), scale)).view_as(x),)

    return before
