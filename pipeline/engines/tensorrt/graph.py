"""The operations that a decoder's network is written in; see `definition.py` for what every one of them checks.

Nothing here knows about models: shapes are those of the arguments, letters are used where a layer fixes them. A layer is added
after those that it reads, so that who walks the network (the interpreter) may take it in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.engines.tensorrt.definition import Definition, Tensor

__all__ = ["Graph", "Tensor"]


class Graph(Definition):
    """A network under construction."""

    # Arithmetic

    def _binary(self, operation: str, a: Tensor, b: Tensor) -> Tensor:
        return self.one("add_elementwise", a, b, getattr(self.trt.ElementWiseOperation, operation))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, broadcast over dimensions of 1."""
        return self._binary("SUM", a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b"""
        return self._binary("SUB", a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b"""
        return self._binary("PROD", a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b"""
        return self._binary("DIV", a, b)

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        """max(a, b)"""
        return self._binary("MAX", a, b)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        """min(a, b)"""
        return self._binary("MIN", a, b)

    def less(self, a: Tensor, b: Tensor) -> Tensor:
        """a < b"""
        return self._binary("LESS", a, b)

    def both(self, a: Tensor, b: Tensor) -> Tensor:
        """a and b"""
        return self._binary("AND", a, b)

    def invert(self, a: Tensor) -> Tensor:
        """not a"""
        return self.one("add_unary", a, self.trt.UnaryOperation.NOT)

    def scalar(self, value: float, like: Tensor) -> Tensor:
        """A constant of the type of `like`, broadcast to it."""
        return self.constant(np.full((1,) * len(like.shape), value, self.numpy[like.dtype]))

    def scale(self, a: Tensor, factor: float) -> Tensor:
        """a * factor"""
        return self.mul(a, self.scalar(factor, a))

    def rsqrt(self, a: Tensor) -> Tensor:
        """1 / sqrt(a)"""
        operations = self.trt.UnaryOperation
        return self.one("add_unary", self.one("add_unary", a, operations.SQRT), operations.RECIP)

    def abs(self, a: Tensor) -> Tensor:
        """|a|"""
        return self.one("add_unary", a, self.trt.UnaryOperation.ABS)

    def round(self, a: Tensor) -> Tensor:
        """To the nearest whole number, ties to the even one."""
        return self.one("add_unary", a, self.trt.UnaryOperation.ROUND)

    def sigmoid(self, a: Tensor) -> Tensor:
        """1 / (1 + exp(-a))"""
        return self.one("add_activation", a, self.trt.ActivationType.SIGMOID)

    def cast(self, a: Tensor, dtype: Any) -> Tensor:
        """a in another type."""
        return a if a.dtype == dtype else self.one("add_cast", a, dtype)

    def float32(self, a: Tensor) -> Tensor:
        """a in float32."""
        return self.cast(a, self.trt.DataType.FLOAT)

    def matmul(self, a: Tensor, b: Tensor, *, transpose: bool = False) -> Tensor:
        """a @ b, or a @ b^T; leading dimensions broadcast."""
        kinds = self.trt.MatrixOperation
        return self.one("add_matrix_multiply", a, kinds.NONE, b, kinds.TRANSPOSE if transpose else kinds.NONE)

    def reduce(self, a: Tensor, operation: str, axis: int, *, keep: bool = True) -> Tensor:
        """SUM, AVG or MAX over one axis."""
        return self.one("add_reduce", a, getattr(self.trt.ReduceOperation, operation), 1 << axis, keep)

    # Shapes

    def reshape(self, a: Tensor, shape: Sequence[int], *, before: Sequence[int] = (), after: Sequence[int] = ()) -> Tensor:
        """Transpose by `before`, reshape (0 keeps a dimension, -1 is inferred), transpose by `after`."""
        layer = self.layer("add_shuffle", a)
        if before:
            layer.first_transpose = self.trt.Permutation(list(before))
        layer.reshape_dims = self.trt.Dims(list(shape))
        if after:
            layer.second_transpose = self.trt.Permutation(list(after))
        return self.checked(layer)

    def reshape_like(self, a: Tensor, other: Tensor) -> Tensor:
        """a with the dimensions that `other` has at run time."""
        shape = self.shape(other)
        layer = self.layer("add_shuffle", a)
        layer.set_input(1, shape)
        return self.checked(layer)

    def transpose(self, a: Tensor, order: Sequence[int]) -> Tensor:
        """Dimensions in another order."""
        layer = self.layer("add_shuffle", a)
        layer.first_transpose = self.trt.Permutation(list(order))
        return self.checked(layer)

    def shape(self, a: Tensor) -> Tensor:
        """Dimensions at run time, INT64 [rank]"""
        return self.one("add_shape", a)

    def last(self, a: Tensor, start: int, stop: int) -> Tensor:
        """a[..., start:stop]"""
        return self.cut(a, len(a.shape) - 1, start, stop)

    def cut(self, a: Tensor, axis: int, start: int, stop: int) -> Tensor:
        """a[start:stop] along `axis`."""
        layer = self._slice(a, axis, start, stop - start)
        return self.checked(layer)

    def cut_to(self, a: Tensor, axis: int, size: Tensor) -> Tensor:
        """a[:size] along `axis`; `size` is an INT64 [1] shape tensor."""
        layer = self._slice(a, axis, 0, 1)
        layer.set_input(2, size)
        return self.checked(layer)

    def pad_last(self, a: Tensor, size: int) -> Tensor:
        """Zeros after the last dimension, up to `size`."""
        layer = self._slice(a, len(a.shape) - 1, 0, size)
        layer.mode = self.trt.SampleMode.FILL
        return self.checked(layer)

    def _slice(self, a: Tensor, axis: int, start: int, size: int) -> Any:
        dims, axes = self.trt.Dims, self.constant(np.array([axis], np.int32))
        layer = self.layer("add_slice", a, dims([start]), dims([size]), dims([1]))
        layer.set_input(5, axes)
        return layer

    def expand(self, a: Tensor, axis: int, count: int) -> Tensor:
        """Repeat a dimension of 1."""
        factors = np.ones(len(a.shape), np.int64)
        factors[axis] = count
        stride = [1] * len(a.shape)
        stride[axis] = 0
        dims, size = self.trt.Dims, self.mul(self.shape(a), self.constant(factors))
        layer = self.layer("add_slice", a, dims([0] * len(stride)), dims([1] * len(stride)), dims(stride))
        layer.set_input(2, size)
        return self.checked(layer)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Along `axis`."""
        layer = self.layer("add_concatenation", list(parts))
        layer.axis = axis
        return self.checked(layer)

    # Indices

    def topk(self, a: Tensor, count: int, axis: int) -> tuple[Tensor, Tensor]:
        """The largest values and their INT32 indices, ties by lowest index."""
        layer = self.layer("add_topk", a, self.trt.TopKOperation.MAX, count, 1 << axis)
        return self.checked(layer), self.checked(layer, 1)

    def gather(self, a: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
        """Slices of `a` along `axis`."""
        return self._gather(a, indices, axis, self.trt.GatherMode.DEFAULT)

    def pick(self, a: Tensor, indices: Tensor, axis: int) -> Tensor:
        """One element an index, as numpy's take_along_axis."""
        return self._gather(a, indices, axis, self.trt.GatherMode.ELEMENT)

    def _gather(self, a: Tensor, indices: Tensor, axis: int, mode: Any) -> Tensor:
        layer = self.layer("add_gather_v2", a, indices, mode)
        layer.axis = axis
        return self.checked(layer)

    def one_hot(self, indices: Tensor, depth: int, dtype: Any) -> Tensor:
        """[...] -> [..., depth], 1 at the index and 0 elsewhere."""
        values = self.constant(np.array([0, 1], self.numpy[dtype]))
        return self.one("add_one_hot", indices, values, self.constant(np.array(depth, np.int32)), -1)

    def select(self, condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        """yes where `condition`, else no."""
        return self.one("add_select", condition, yes, no)

    def scatter_rows(self, a: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """a with `values` [N, …] at the rows [N, 1]."""
        return self.one("add_scatter", a, rows, values, self.trt.ScatterMode.ND)

    def running_count(self, a: Tensor) -> Tensor:
        """Sum of all earlier rows."""
        axis = self.constant(np.array(0, np.int32))
        return self.one("add_cumulative", a, axis, self.trt.CumulativeOperation.SUM, True, False)

    # What language models need

    def rope(self, a: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        """Rotate interleaved pairs of [B, A, S, R] by cos and sin [P, R/2] at `positions` [B, S]."""
        layer = self.layer("add_rotary_embedding", a, cos, sin, True, a.shape[3])
        layer.set_input(3, positions)
        return self.checked(layer)

    def update_cache(self, cache: Tensor, new: Tensor, starts: Tensor) -> Tensor:
        """The cache [B, 1, M, D] with `new` [B, 1, S, D] written from row starts[b] on; input and output share memory."""
        return self.one("add_kv_cache_update", cache, new, starts, self.trt.KVCacheMode.LINEAR)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *, lengths: Tensor | None, mask: Tensor | None = None,
                  causal: bool = False, fused: bool = False) -> Tensor:  # fmt: skip
        """softmax(query @ key^T) @ value, each [B, A, S, D]; the caller scales the query.

        `lengths` [B]: keys of each row that exist; `causal`: query i of S sees keys up to i + length - S; `mask`: true where
        a query sees a key. `fused` demands one kernel, which TensorRT has for D up to 256; else it may take the layer apart.
        """
        kinds = self.trt.CausalMaskKind
        arguments = (query, key, value, self.trt.AttentionNormalizationOp.SOFTMAX, kinds.LOWER_RIGHT if causal else kinds.NONE)
        layer = self.layer("add_attention_v2", *arguments)
        layer.decomposable = not fused
        if lengths is not None:
            layer.key_value_lengths = lengths
        if mask is not None:
            layer.mask = mask
        return self.checked(layer)

    def quantize(self, a: Tensor, scale: Tensor, dtype: Any) -> Tensor:
        """a / scale in an 8-bit type; one scale a tensor."""
        return self.one("add_quantize", a, scale, dtype)

    def dequantize(self, a: Tensor, scale: Tensor, dtype: Any, *, block: Sequence[int] = (), axis: int | None = None) -> Tensor:
        """a * scale in `dtype`: one scale a tensor, one for each place along `axis`, or one a block of the shape `block`."""
        layer = self.layer("add_dequantize", a, scale, dtype)
        if axis is not None:
            layer.axis = axis
        if block:
            layer.block_shape = self.trt.Dims(list(block))
        return self.checked(layer)

    def quantize_fp4(self, a: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """E2M1 codes and the E4M3 scale of every 16 of them, found at run time; `scale` is the tensor's own."""
        kinds = self.trt.DataType
        layer = self.layer("add_dynamic_quantize", a, len(a.shape) - 1, 16, kinds.FP4, kinds.FP8)
        layer.set_input(1, scale)
        return self.checked(layer), self.checked(layer, 1)
