"""Collectives as layers of the network: what ranks exchange within a step.

TensorRT checks neither that the ranks of a group differ nor that their number is `num_ranks`, and two ranks that come to different
collectives wait for one another for ever: `checked_group` looks at a group when its layer is made, `refuse_unlike` at the networks
of all ranks, side by side, before anything runs.

TensorRT takes INT8, INT32, INT64, BF16, FP16 and FP32 here, but no FP8 and no FP4 tensors ("is not consumed by ...
IDequantizeLayer", 1.7.1): `payload.py` packs those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import StageError
from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.spec import Spec

__all__ = ["Collective", "all_gather", "all_reduce", "all_to_all", "checked_group", "reduce_scatter", "refuse_unlike"]

KIND = "DIST_COLLECTIVE"


@dataclass(frozen=True, slots=True)
class Collective:
    """What the layer itself does not show; kept as text in its metadata."""

    operation: str
    group: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operation} {','.join(map(str, self.group))}"

    @classmethod
    def parse(cls, text: str) -> Collective:
        """Of a layer's metadata."""
        operation, _, group = text.partition(" ")
        return cls(operation, tuple(map(int, group.split(","))))


def all_gather(net: Graph, spec: Spec, x: Tensor) -> Tensor:
    """[N, …] of each rank -> [ranks * N, …], in the order of ranks."""
    return _collective(net, spec, x, "ALL_GATHER", "NONE")


def reduce_scatter(net: Graph, spec: Spec, x: Tensor) -> Tensor:
    """[ranks * N, …] -> the sum's N rows of this rank."""
    return _collective(net, spec, x, "REDUCE_SCATTER", "SUM")


def all_reduce(net: Graph, spec: Spec, x: Tensor) -> Tensor:
    """The sum over ranks."""
    return _collective(net, spec, x, "ALL_REDUCE", "SUM")


def all_to_all(net: Graph, spec: Spec, x: Tensor) -> Tensor:
    """[ranks * N, …], N rows for each rank -> [ranks * N, …], N rows from each."""
    return _collective(net, spec, x, "ALL_TO_ALL", "NONE")


def _collective(net: Graph, spec: Spec, x: Tensor, operation: str, reduction: str) -> Tensor:
    kinds = getattr(net.trt.CollectiveOperation, operation), getattr(net.trt.ReduceOperation, reduction)
    group = checked_group(range(spec.ranks), spec.rank, spec.ranks)
    layer = net.layer("add_dist_collective", x, *kinds, -1, list(group))
    layer.num_ranks = len(group)
    layer.metadata = str(Collective(operation, group))
    return net.checked(layer)


def checked_group(group: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """The group, if `rank` of `ranks` can exchange with it.

    Raises:
        StageError: a rank twice, one that does not exist, fewer than two, or not this one.
    """
    told = f"The group {list(group)} of a collective of rank {rank}"
    if len(set(group)) < len(group):
        raise StageError(f"{told} has a rank twice: TensorRT would take it, and NCCL wait for ever.")
    if strangers := [member for member in group if not 0 <= member < ranks]:
        raise StageError(f"{told} has rank {strangers[0]}, but there are {ranks}, from 0 to {ranks - 1}.")
    if rank not in group or len(group) < 2:
        raise StageError(f"{told} must have that rank and another.")
    return tuple(group)


def refuse_unlike(ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Compare what networks of different ranks exchange, name -> the list that `builder.describe` makes.

    Raises:
        StageError: they do not come to the same collectives, of the same types and shapes, in the same order.
    """
    (first, ours), *others = ranks.items()
    for name, theirs in others:
        for number in range(max(len(ours), len(theirs))):
            pair = [_told(list(each)[number : number + 1]) for each in (ours, theirs)]
            if pair[0] != pair[1]:
                raise StageError(
                    f"The ranks do not agree: collective {number} of {first} is {pair[0]}, of {name} {pair[1]}. On GPUs they would "
                    "wait for one another for ever: build all ranks with the same parallel and engine settings."
                )


def _told(one: Sequence[Mapping[str, Any]]) -> str:
    return f"{one[0]['collective']} of {one[0]['dtype']}{one[0]['shape']}" if one else "missing"
