"""How tokens come to the ranks that have their experts, and the results back.

    one rank, or tensor parallelism   every rank has all tokens; with several, the sum of their results is reduced
    gather                            all ranks' tokens are gathered on each, results are summed and scattered back
    all_to_all                        a token goes to the ranks that have an expert of its own, and is summed up where it came from

Shapes are fixed before the router has spoken, so `all_to_all` has as many places for each pair of ranks as the share of a step's
tokens says. With 1 every token has a place on every rank: exact, and as many bytes as `gather`. Below 1 it sends that share of
them, which pays where a token's experts lie on few ranks (R1 chooses 4 of 8 groups, so on 8 ranks at most half of them); a token
that finds its places taken misses those experts, is counted, and the count is an output.

Shape legend: N tokens of this rank, R ranks, C places for each pair of ranks, M rows at the experts (R * N or R * C), K experts a
token, E experts of the model, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from pipeline.engines.tensorrt.network.payload import travel
from pipeline.engines.tensorrt.network.spec import Spec

__all__ = ["Experts", "there_and_back"]

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens [M, H], their experts [M, K] and shares [M, K] -> what this rank's experts give of them [M, H]."""


def there_and_back(net: Graph, spec: Spec, x: Tensor, indices: Tensor, shares: Tensor, experts: Experts, scale: Tensor | None,
                   dropped: list[Tensor]) -> Tensor:  # fmt: skip
    """[N, H] -> [N, H], the weighted sum of each token's experts on all ranks. `scale`: see `payload.travel`."""
    if spec.ranks == 1:
        return experts(x, indices, shares)
    if spec.parallel == "tp":
        return all_reduce(net, spec, experts(x, indices, shares))
    routing = net.concat([net.float32(indices), shares], 1)  # one message: float32 holds expert numbers exactly
    if spec.exchange == "gather":
        tokens = travel(net, spec, x, scale, all_gather)
        return reduce_scatter(net, spec, experts(tokens, *_unjoined(net, spec, all_gather(net, spec, routing))))
    if spec.permille == 1000:
        return _everywhere(net, spec, x, routing, experts, scale)
    return _chosen(net, spec, x, routing, indices, experts, scale, dropped)


def _unjoined(net: Graph, spec: Spec, routing: Tensor) -> tuple[Tensor, Tensor]:
    """Experts in INT32, and shares."""
    count = spec.arch.num_experts_per_tok
    return net.cast(net.last(routing, 0, count), net.trt.DataType.INT32), net.last(routing, count, 2 * count)


def _round_trip(net: Graph, spec: Spec, rows: Tensor, routing: Tensor, experts: Experts, scale: Tensor | None) -> Tensor:
    """[R * C, H] sorted by where they go -> what the experts there gave of them, in the same order."""
    tokens = travel(net, spec, rows, scale, all_to_all)
    return all_to_all(net, spec, experts(tokens, *_unjoined(net, spec, all_to_all(net, spec, routing))))


def _everywhere(net: Graph, spec: Spec, x: Tensor, routing: Tensor, experts: Experts, scale: Tensor | None) -> Tensor:
    """A place for each token on each rank: the place is the token's number."""

    def repeated(a: Tensor) -> Tensor:
        return net.reshape(net.expand(net.reshape(a, (1, -1, a.shape[1])), 0, spec.ranks), (-1, a.shape[1]))

    back = _round_trip(net, spec, repeated(x), repeated(routing), experts, scale)
    parts = net.reshape(net.float32(back), (spec.ranks, -1, spec.arch.hidden_size))
    return net.cast(net.reduce(parts, "SUM", 0, keep=False), x.dtype)


def _chosen(net: Graph, spec: Spec, x: Tensor, routing: Tensor, indices: Tensor, experts: Experts, scale: Tensor | None,
            dropped: list[Tensor]) -> Tensor:  # fmt: skip
    """C places for each rank, given away in the order of tokens."""
    with net.scope("places"):
        places, sources = _places(net, spec, x, indices, dropped)
    none = np.zeros((1, 2 * spec.arch.num_experts_per_tok), np.float32)
    none[:, : spec.arch.num_experts_per_tok] = spec.arch.n_routed_experts  # an expert that no rank has
    rows = net.gather(net.concat([_zeros(net, spec, x), x], 0), sources)
    routing = net.gather(net.concat([net.constant(none), routing], 0), sources)
    back = net.concat([_round_trip(net, spec, rows, routing, experts, scale), _zeros(net, spec, x)], 0)
    parts = net.float32(net.gather(back, places))
    return net.cast(net.reduce(parts, "SUM", 1, keep=False), x.dtype)


def _zeros(net: Graph, spec: Spec, x: Tensor) -> Tensor:
    return net.constant(np.zeros((1, spec.arch.hidden_size), net.numpy[x.dtype]))


def _places(net: Graph, spec: Spec, x: Tensor, indices: Tensor, dropped: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The place of each token on each rank, INT32 [N, R], R * C for none; and the token in each place, INT32 [R * C], counted
    from 1, 0 for none."""
    kinds, ranks = net.trt.DataType, spec.ranks
    count = net.cut(net.shape(x), 0, 0, 1)
    room = net.div(net.add(net.scale(count, spec.permille), net.scalar(999, count)), net.scalar(1000, count))
    places_in_all = net.scale(room, ranks)
    room32, none = (net.reshape(net.cast(value, kinds.INT32), (1, 1)) for value in (room, places_in_all))
    owner = net.div(indices, net.constant(np.array([[len(spec.experts)]], np.int32)))
    goes = net.reduce(net.one_hot(owner, ranks, kinds.INT32), "MAX", 1, keep=False)
    earlier, wanted = net.running_count(goes), net.less(net.scalar(0, goes), goes)
    fits = net.both(wanted, net.less(earlier, room32))
    first = net.mul(net.constant(np.arange(ranks, dtype=np.int32).reshape(1, -1)), room32)
    places = net.select(fits, net.add(first, earlier), none)
    lost = net.sub(goes, net.cast(fits, kinds.INT32))
    dropped.append(net.reduce(net.reshape(lost, (-1,)), "SUM", 0))
    most = spec.max_batch * spec.max_tokens
    numbers = net.cut_to(net.constant(np.arange(1, most + 1, dtype=np.int32)), 0, count)
    numbers = net.reshape(net.expand(net.reshape(numbers, (-1, 1)), 1, ranks), (-1,))
    empty = net.cut_to(
        net.constant(np.zeros(ranks * spec.room(most) + 1, np.int32)), 0, net.add(places_in_all, net.scalar(1, places_in_all))
    )
    filled = net.scatter_rows(empty, net.reshape(places, (-1, 1)), numbers)
    return places, net.cut_to(filled, 0, places_in_all)
