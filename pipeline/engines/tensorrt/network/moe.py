"""The mixture of experts: router, three ways to compute the routed experts, and their spread over ranks.

    layer      TensorRT's own MoE layer; it builds for SM100, SM103 and SM110 only
    dense      every expert of the rank on every token, then a weighted sum: E/K times the products, exact
    dispatch   tokens are copied to `capacity` places of each expert, then batched products. With fewer places than tokens
               an expert may get more than it has room for: those are left out, counted, and the count is an output

With several ranks, tokens and their routing are gathered, every rank computes its experts for all of them, and the sum is
scattered back (attention data parallelism) or reduced (tensor parallelism, where all ranks have the same tokens).

Shape legend: N tokens, E experts of this rank, K experts a token, I expert width, H hidden, C capacity.
"""

from __future__ import annotations

import numpy as np

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.collectives import all_gather, all_reduce, reduce_scatter
from pipeline.engines.tensorrt.network.norm import swiglu
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.weights import Weights

__all__ = ["moe", "route"]


def moe(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, dropped: list[Tensor]) -> Tensor:
    """[N, H] -> [N, H]; the count of tokens left out, if any can be, is appended to `dropped`."""
    with net.scope("router"):
        indices, shares = route(net, spec, weights, prefix, x)
    tokens = x
    if spec.ranks > 1 and spec.parallel == "adp":
        tokens = all_gather(net, spec, x)
        indices, shares = _gather_routing(net, spec, indices, shares)
    with net.scope("experts"):
        lowering = {"dense": _dense, "dispatch": _dispatch, "layer": _layer}[spec.moe]
        routed = lowering(net, spec, weights, prefix, tokens, indices, shares, dropped)
    if spec.ranks > 1:
        routed = reduce_scatter(net, spec, routed) if spec.parallel == "adp" else all_reduce(net, spec, routed)
    with net.scope("shared"):
        gate, up, down = (weights.matrix(f"{prefix}.shared_experts.{name}_proj") for name in ("gate", "up", "down"))
        return net.add(routed, swiglu(net, x, gate, up, down))


def route(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H] -> experts [N, K] in INT32 and their shares [N, K] in float32, as `plugins.topk_router.reference` has it."""
    arch = spec.arch
    groups, experts = arch.n_group, arch.n_routed_experts
    gate, bias = weights.vector(f"{prefix}.gate"), weights.vector(f"{prefix}.gate", "e_score_correction_bias")
    scores = net.sigmoid(net.matmul(net.float32(x), net.constant(gate.value.astype(np.float32), gate.name), transpose=True))
    choice = net.add(scores, net.constant(bias.value.astype(np.float32).reshape(1, -1), bias.name))
    if arch.topk_group < groups:
        choice = _keep_best_groups(net, choice, groups, arch.topk_group, experts)
    _, indices = net.topk(choice, arch.num_experts_per_tok, 1)
    shares = net.pick(scores, indices, 1)
    if arch.norm_topk_prob:
        total = net.reduce(shares, "SUM", 1)
        shares = net.div(shares, net.add(total, net.scalar(1e-20, total)))
    return indices, net.scale(shares, arch.routed_scaling_factor)


def _keep_best_groups(net: Graph, choice: Tensor, groups: int, kept: int, experts: int) -> Tensor:
    """[N, experts], with -1e30 outside the `kept` groups whose two best choices sum highest."""
    grouped = net.reshape(choice, (-1, groups, experts // groups))
    best, _ = net.topk(grouped, min(2, experts // groups), 2)
    _, chosen = net.topk(net.reduce(best, "SUM", 2, keep=False), kept, 1)
    mask = net.reduce(net.one_hot(chosen, groups, net.trt.DataType.FLOAT), "SUM", 1, keep=False)
    mask = net.reshape(mask, (-1, groups, 1))
    masked = net.select(net.less(net.scalar(0, mask), mask), grouped, net.scalar(-1e30, grouped))
    return net.reshape(masked, (-1, experts))


def _gather_routing(net: Graph, spec: Spec, indices: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Of all ranks' tokens, in one message: float32 holds expert numbers exactly."""
    per_token = spec.arch.num_experts_per_tok
    both = all_gather(net, spec, net.concat([net.float32(indices), shares], 1))
    return net.cast(net.last(both, 0, per_token), net.trt.DataType.INT32), net.last(both, per_token, 2 * per_token)


def _dense(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, indices: Tensor, shares: Tensor,
           dropped: list[Tensor]) -> Tensor:  # fmt: skip
    """[N, H] -> [N, H], partial where other ranks have experts too."""
    arch = spec.arch
    hot = net.one_hot(indices, arch.n_routed_experts, net.trt.DataType.FLOAT)
    combine = net.reduce(net.mul(hot, net.reshape(shares, (-1, arch.num_experts_per_tok, 1))), "SUM", 1, keep=False)
    combine = net.last(combine, spec.experts.start, spec.experts.stop)
    y = swiglu(net, net.reshape(x, (1, -1, arch.hidden_size)), *weights.experts(prefix, spec.experts))
    combine = net.reshape(combine, (len(spec.experts), -1, 1), before=(1, 0))
    return net.cast(net.reduce(net.mul(net.float32(y), combine), "SUM", 0, keep=False), x.dtype)


def _dispatch(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, indices: Tensor, shares: Tensor,
              dropped: list[Tensor]) -> Tensor:  # fmt: skip
    """The same; a (token, expert) pair's place is expert * C plus the number of earlier pairs of that expert."""
    arch, kinds = spec.arch, net.trt.DataType
    count, per_token = len(spec.experts), arch.num_experts_per_tok
    capacity = spec.moe_capacity or spec.max_batch * spec.max_tokens * (spec.ranks if spec.parallel == "adp" else 1)
    local = net.sub(net.reshape(indices, (-1,)), net.constant(np.array([spec.experts.start], np.int32)))
    here = net.both(net.less(net.constant(np.array([-1], np.int32)), local), net.less(local, _int(net, count)))
    expert = net.select(here, local, _int(net, count))
    hot = net.one_hot(expert, count + 1, kinds.INT32)
    earlier = net.reduce(net.mul(net.running_count(hot), hot), "SUM", 1, keep=False)
    fits = net.both(here, net.less(earlier, _int(net, capacity)))
    place = net.select(fits, net.add(net.mul(expert, _int(net, capacity)), earlier), _int(net, count * capacity))
    if spec.moe_capacity:
        lost = net.sub(net.cast(here, kinds.INT32), net.cast(fits, kinds.INT32))
        dropped.append(net.reduce(lost, "SUM", 0))
    copies = net.reshape(net.expand(net.reshape(x, (-1, 1, arch.hidden_size)), 1, per_token), (-1, arch.hidden_size))
    empty = net.constant(np.zeros((count * capacity + 1, arch.hidden_size), net.numpy[x.dtype]))
    filled = net.scatter_rows(empty, net.reshape(place, (-1, 1)), copies)
    batches = net.reshape(net.cut(filled, 0, 0, count * capacity), (count, capacity, arch.hidden_size))
    y = net.reshape(swiglu(net, batches, *weights.experts(prefix, spec.experts)), (count * capacity, arch.hidden_size))
    y = net.concat([y, net.constant(np.zeros((1, arch.hidden_size), net.numpy[x.dtype]))], 0)
    back = net.reshape(net.float32(net.gather(y, place)), (-1, per_token, arch.hidden_size))
    return net.cast(net.reduce(net.mul(back, net.reshape(shares, (-1, per_token, 1))), "SUM", 1, keep=False), x.dtype)


def _int(net: Graph, value: int) -> Tensor:
    return net.constant(np.array([value], np.int32))


def _layer(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, indices: Tensor, shares: Tensor,
           dropped: list[Tensor]) -> Tensor:  # fmt: skip
    """TensorRT's MoE layer, on BF16 weights [E, H, I] and [E, I, H]; it takes a batch dimension."""
    arch, per_token = spec.arch, spec.arch.num_experts_per_tok
    stacks = (weights.dequantized_experts(prefix, name, spec.experts) for name in ("gate", "up", "down"))
    gate, up, down = (net.constant(stack.value.swapaxes(1, 2), stack.name) for stack in stacks)
    batch = net.reshape(x, (1, -1, arch.hidden_size))
    routing = net.reshape(indices, (1, -1, per_token)), net.reshape(net.cast(shares, x.dtype), (1, -1, per_token))
    layer = net.layer("add_moe", batch, *routing)
    layer.set_gated_weights(gate, up, down, net.trt.MoEActType.SILU)
    return net.reshape(net.checked(layer), (-1, arch.hidden_size))
