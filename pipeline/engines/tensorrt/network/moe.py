"""The mixture of experts: router, three ways to compute the routed experts, and their spread over ranks.

    layer      TensorRT's own MoE layer; it builds for SM100, SM103 and SM110 only
    dense      every expert of the rank on every token, then a weighted sum: E/K times the products, exact
    dispatch   tokens are copied to `capacity` places of each expert, then batched products. With fewer places than tokens
               an expert may get more than it has room for: those are left out, counted, and the count is an output

With several ranks, `exchange.py` brings tokens to the experts and their results back.

Shape legend: N tokens, E experts of this rank, K experts a token, I expert width, H hidden, C capacity.
"""

from __future__ import annotations

import numpy as np

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.exchange import there_and_back
from pipeline.engines.tensorrt.network.linear import Named
from pipeline.engines.tensorrt.network.moe_layer import moe_layer
from pipeline.engines.tensorrt.network.norm import swiglu
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.plugins import offered
from pipeline.engines.tensorrt.weights import Weights
from pipeline.formats.numerics import BF16

__all__ = ["moe", "route"]


def moe(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, dropped: list[Tensor]) -> Tensor:
    """[N, H] -> [N, H]; the count of tokens left out, if any can be, is appended to `dropped`."""
    with net.scope("router"):
        indices, shares = route(net, spec, weights, prefix, x)
    lowering = {"dense": _dense, "dispatch": _dispatch, "layer": _layer}[spec.moe]

    def experts(tokens: Tensor, indices: Tensor, shares: Tensor) -> Tensor:
        with net.scope("experts"):
            if ours := _one_call(net, spec, weights, prefix, tokens, indices, shares):
                return ours
            return lowering(net, spec, weights, prefix, tokens, indices, shares, dropped)

    scale = _travel_scale(net, spec, weights, prefix)
    routed = there_and_back(net, spec, x, indices, shares, experts, scale, dropped)
    with net.scope("shared"):
        gate, up, down = (weights.matrix(f"{prefix}.shared_experts.{name}_proj") for name in ("gate", "up", "down"))
        return net.add(routed, swiglu(net, x, gate, up, down))


def route(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H] -> experts [N, K] in INT32 and their shares [N, K] in float32, as `plugins.topk_router.reference` has it."""
    arch = spec.arch
    groups, experts = arch.n_group, arch.n_routed_experts
    logits = _logits(net, spec, weights.vector(f"{prefix}.gate"), x)
    named = weights.vector(f"{prefix}.gate", "e_score_correction_bias")
    bias = net.constant(named.value.astype(np.float32).reshape(1, -1), named.name)
    one_kernel = offered(
        net, "topk_router", [(-1, experts), (1, experts)], n_group=groups, topk_group=arch.topk_group,
        top_k=arch.num_experts_per_tok, scale=float(arch.routed_scaling_factor), norm_topk_prob=bool(arch.norm_topk_prob),
    )  # fmt: skip
    if one_kernel:
        shares, indices = one_kernel(logits, bias)
        return indices, shares
    scores = net.sigmoid(logits)
    choice = net.add(scores, bias)
    if arch.topk_group < groups:
        choice = _keep_best_groups(net, choice, groups, arch.topk_group, experts)
    _, indices = net.topk(choice, arch.num_experts_per_tok, 1)
    shares = net.pick(scores, indices, 1)
    if arch.norm_topk_prob:
        total = net.reduce(shares, "SUM", 1)
        shares = net.div(shares, net.add(total, net.scalar(1e-20, total)))
    return indices, net.scale(shares, arch.routed_scaling_factor)


def _logits(net: Graph, spec: Spec, gate: Named, x: Tensor) -> Tensor:
    """[N, H] -> [N, experts] in float32. The gate in BF16 has a name of its own, as one that is an input may have one type."""
    if gate.value.dtype == BF16 and spec.dtype == "bfloat16":
        product = offered(net, "router_gemm", [tuple(x.shape), gate.value.shape], max_tokens=spec.max_batch * spec.max_tokens)
        if product:
            return product(x, net.constant(gate.value, f"{gate.name}.bf16"))[0]
    return net.matmul(net.float32(x), net.constant(gate.value.astype(np.float32), gate.name), transpose=True)


def _keep_best_groups(net: Graph, choice: Tensor, groups: int, kept: int, experts: int) -> Tensor:
    """[N, experts], with -1e30 outside the `kept` groups whose two best choices sum highest."""
    grouped = net.reshape(choice, (-1, groups, experts // groups))
    best, _ = net.topk(grouped, min(2, experts // groups), 2)
    _, chosen = net.topk(net.reduce(best, "SUM", 2, keep=False), kept, 1)
    mask = net.reduce(net.one_hot(chosen, groups, net.trt.DataType.FLOAT), "SUM", 1, keep=False)
    mask = net.reshape(mask, (-1, groups, 1))
    masked = net.select(net.less(net.scalar(0, mask), mask), grouped, net.scalar(-1e30, grouped))
    return net.reshape(masked, (-1, experts))


def _travel_scale(net: Graph, spec: Spec, weights: Weights, prefix: str) -> Tensor | None:
    """Of hidden states that travel in FP4."""
    if spec.ranks == 1 or spec.gather != "fp4":
        return None
    scale = weights.travel_scale(prefix)
    return net.constant(scale.value.reshape(1, 1, 1), scale.name)


def _own(net: Graph, spec: Spec, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each choice is an expert of this rank, and its number among them, their count for others."""
    count = len(spec.experts)
    local = net.sub(indices, net.scalar(spec.experts.start, indices))
    here = net.both(net.less(net.scalar(-1, local), local), net.less(local, net.scalar(count, local)))
    return here, net.select(here, local, net.scalar(count, local))


def _one_call(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, indices: Tensor, shares: Tensor) -> Tensor | None:
    """The same by a plugin, on experts in FP8 blocks as they are stored; choices of other ranks' experts add nothing."""
    if spec.dtype != "bfloat16" or weights.format_of_experts(prefix, spec.experts) != "fp8_block":
        return None
    count, hidden, width = len(spec.experts), spec.arch.hidden_size, spec.arch.moe_intermediate_size
    routed, both = (-1, spec.arch.num_experts_per_tok), (count, 2 * width, hidden)
    down = count, hidden, width
    scales = [(count, -(-rows // 128), -(-columns // 128)) for _, rows, columns in (both, down)]
    shapes = (-1, hidden), routed, routed, both, scales[0], down, scales[1]
    made = offered(net, "moe_fp8_block", shapes, first_expert=spec.experts.start)
    if made is None:
        return None
    parts = (weights.gate_up(prefix, spec.experts), next(weights.experts(prefix, spec.experts, ("down",))))
    leaves = [net.constant(part.tensors[leaf], f"{part.name}.{leaf}") for part in parts for leaf in ("weight", "weight_scale_inv")]
    return made(x, indices, shares, *leaves)[0]


def _dense(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, indices: Tensor, shares: Tensor,
           dropped: list[Tensor]) -> Tensor:  # fmt: skip
    """[N, H] -> [N, H], partial where other ranks have experts too."""
    arch, count = spec.arch, len(spec.experts)
    expert = indices if spec.ranks == 1 else _own(net, spec, indices)[1]
    hot = net.one_hot(expert, count if spec.ranks == 1 else count + 1, net.trt.DataType.FLOAT)
    combine = net.reduce(net.mul(hot, net.reshape(shares, (-1, arch.num_experts_per_tok, 1))), "SUM", 1, keep=False)
    combine = net.last(combine, 0, count)
    y = swiglu(net, net.reshape(x, (1, -1, arch.hidden_size)), *weights.experts(prefix, spec.experts))
    combine = net.reshape(combine, (count, -1, 1), before=(1, 0))
    return net.cast(net.reduce(net.mul(net.float32(y), combine), "SUM", 0, keep=False), x.dtype)


def _dispatch(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, indices: Tensor, shares: Tensor,
              dropped: list[Tensor]) -> Tensor:  # fmt: skip
    """The same; a (token, expert) pair's place is expert * C plus the number of earlier pairs of that expert."""
    arch, kinds = spec.arch, net.trt.DataType
    count, per_token = len(spec.experts), arch.num_experts_per_tok
    capacity = spec.moe_capacity or spec.most_tokens_at_experts
    here, expert = _own(net, spec, net.reshape(indices, (-1,)))
    hot = net.one_hot(expert, count + 1, kinds.INT32)
    earlier = net.reduce(net.mul(net.running_count(hot), hot), "SUM", 1, keep=False)
    fits = net.both(here, net.less(earlier, net.scalar(capacity, earlier)))
    place = net.select(fits, net.add(net.scale(expert, capacity), earlier), net.scalar(count * capacity, earlier))
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


def _layer(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, indices: Tensor, shares: Tensor,
           dropped: list[Tensor]) -> Tensor:  # fmt: skip
    """The same. TensorRT's layer must choose among its own experts: a choice of another rank's is its first with a share of 0."""
    if spec.ranks > 1:
        here, expert = _own(net, spec, indices)
        indices, shares = net.select(here, expert, net.scalar(0, expert)), net.select(here, shares, net.scalar(0, shares))
    return moe_layer(net, spec, weights, prefix, x, indices, shares)
