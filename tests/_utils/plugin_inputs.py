"""Inputs of a plugin: random numbers, or those that a case gives; what its kernels take."""

from __future__ import annotations

import re

import torch

from plugins.trt_class import DTYPES

__all__ = ["filled", "signature"]


def filled(values: list[int] | None, shape: list[int], kind: str) -> torch.Tensor:
    """A tensor of one of TensorRT's types; the same numbers for the same shape."""
    if values is not None:
        return torch.tensor(values, dtype=DTYPES[kind]).view(shape)
    random = torch.Generator().manual_seed(len(shape))
    if kind == "INT8":  # codes: of scales in E4M3, too, so none of its NaNs
        return torch.randint(-128, 128, shape, dtype=torch.int8, generator=random) & -2
    return torch.randn(shape, generator=random).abs().clamp(0.01, 2).to(DTYPES[kind])


def signature(source: bytes, name: str) -> list[str]:
    """A kernel's parameters, in order."""
    found = re.search(rf"^{name}\(([^)]*)\) \{{$".encode(), source, re.MULTILINE)
    assert found, f"no kernel {name}"
    return found[1].decode().split(",")
