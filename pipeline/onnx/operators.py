"""ONNX forms of torch operators that torch's exporter has none for, and that mixtures of experts use.

onnxruntime and TensorRT both take the lowest index among equals in TopK, as ONNX says, so that it is a stable sort.
"""

from __future__ import annotations

from typing import Any

import torch
from onnx import TensorProto
from onnxscript import opset23 as op

__all__ = ["TRANSLATIONS"]


def _stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Values and indices; TensorRT takes up to 3,840 of them."""
    size = op.Shape(self, start=dim, end=dim + 1 if dim != -1 else None)
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def _grouped_mm(mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """[N, K] in groups of rows that end at `offs` [G], by [G, K, M] -> [N, M]. Each row takes a copy of its group's matrix: right
    for decode, where few tokens need as many experts; for thousands of rows take a native network."""
    if offs is None or bias is not None:
        raise NotImplementedError("grouped_mm without offs, or with a bias")
    axis = op.Constant(value_ints=[1])
    rows = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(mat_a, start=0, end=1)), op.Constant(value_int=1))
    ends = op.Unsqueeze(op.Cast(offs, to=TensorProto.INT64), op.Constant(value_ints=[0]))
    group = op.ReduceSum(op.Cast(op.LessOrEqual(ends, op.Unsqueeze(rows, axis)), to=TensorProto.INT64), axis, keepdims=0)
    return op.Squeeze(op.MatMul(op.Unsqueeze(mat_a, axis), op.Gather(mat_b, group)), axis)


TRANSLATIONS = {torch.ops.aten.sort.stable: _stable_sort, torch.ops.aten._grouped_mm.default: _grouped_mm}
"""For `torch.onnx.export(custom_translation_table=…)`."""
