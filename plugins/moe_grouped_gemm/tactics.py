"""Which implementation of the FP8 experts is fastest where (`tactics.json`; see `plugins.tactics`), and those of others.

"deep_gemm": DeepGEMM's grouped products in its contiguous layout, between our kernels. Each expert begins at a multiple of 128
slots, and the products find on the device where they end, so that nothing is asked of it. gate and up go through memory there. It
compiles a kernel at the first call of a size, which takes seconds and cannot be captured in a CUDA graph: call it once before.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from plugins.moe_grouped_gemm import launch
from plugins.moe_grouped_gemm.reference import Weights
from plugins.tactics import OURS, Table, importable, ours_alone

__all__ = ["DEEP_GEMM", "TABLE", "present"]

TABLE = Table(Path(__file__).with_name("tactics.json"), "moe_fp8_block", ("device",), ("experts", "tokens"), ("deep_gemm",))


@functools.cache
def present() -> tuple[str, ...]:
    """Implementations that can be used in this process."""
    return (OURS, "deep_gemm") if not ours_alone() and _has_layout() else (OURS,)


def _has_layout() -> bool:
    """Whether there is a DeepGEMM that takes experts' ends; older ones, which are in other packages, too, say that they do not."""
    product = getattr(importable("deep_gemm"), "m_grouped_fp8_gemm_nt_contiguous", None)
    signature = getattr(product, "__doc__", None) or ""
    return product is not None and ("use_psum_layout" in signature or "(" not in signature)


def _both(gathered: launch.Rows, gate_up: Weights, down: Weights, route: launch.Route) -> Tensor:
    return _product(launch.swiglu(_product(gathered, gate_up, route), route), down, route)


def _product(rows: launch.Rows, weights: Weights, route: launch.Route) -> Tensor:
    """-> BF16 [slots, height of the weights]; scales of rows lie as DeepGEMM wants them, a column after the other."""
    import deep_gemm as library

    values, scales = rows
    out = values.new_empty((len(values), weights[0].shape[1]), dtype=torch.bfloat16)
    library.m_grouped_fp8_gemm_nt_contiguous((values, scales.t()), weights, out, route.ends, use_psum_layout=True)
    return out


ALIGN = 128
"""Rows of a block of DeepGEMM's, which are one expert's."""
DEEP_GEMM = launch.Products(ALIGN, ALIGN, _both)
