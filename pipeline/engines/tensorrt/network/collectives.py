"""Collectives as layers of the network: what ranks exchange within a step.

TensorRT checks neither that the ranks of a group differ nor that their number is `num_ranks`; here both follow from `Spec`. Tokens
travel in BF16: TensorRT refuses FP8 and FP4 tensors in a collective ("is not consumed by ... IDequantizeLayer", 1.7.1).
"""

from __future__ import annotations

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.spec import Spec

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_gather(net: Graph, spec: Spec, x: Tensor) -> Tensor:
    """[N, …] of each rank -> [ranks * N, …], in the order of ranks."""
    return _collective(net, spec, x, "ALL_GATHER", "NONE")


def reduce_scatter(net: Graph, spec: Spec, x: Tensor) -> Tensor:
    """[ranks * N, …] -> the sum's N rows of this rank."""
    return _collective(net, spec, x, "REDUCE_SCATTER", "SUM")


def all_reduce(net: Graph, spec: Spec, x: Tensor) -> Tensor:
    """The sum over ranks."""
    return _collective(net, spec, x, "ALL_REDUCE", "SUM")


def _collective(net: Graph, spec: Spec, x: Tensor, operation: str, reduction: str) -> Tensor:
    kinds = getattr(net.trt.CollectiveOperation, operation), getattr(net.trt.ReduceOperation, reduction)
    layer = net.layer("add_dist_collective", x, *kinds, -1, list(range(spec.ranks)))
    layer.num_ranks = spec.ranks
    layer.metadata = operation  # the layer itself does not show it
    return net.checked(layer)
