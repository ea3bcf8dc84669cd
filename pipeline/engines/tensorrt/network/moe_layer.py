"""TensorRT's own layer of experts: in BF16, or in FP8 with static scales. It builds with `tensorrt` for SM100, SM103 and SM110.

In FP8, tokens are quantised before the layer and the argument of the down projection inside it, by the largest input scale of the
experts; weights stay as they are stored, with a scale an expert. TensorRT reads that as FP8 products: TensorRT-RTX, which has no
kernel for the layer, names the operation that it cannot take apart, and its types (`tests/unit/test_tensorrt_network.py`).

Shape legend: N tokens, E experts of this rank, K experts a token, I expert width, H hidden.
"""

from __future__ import annotations

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.linear import Stored, shared_scale
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.weights import Weights

__all__ = ["moe_layer"]


def moe_layer(net: Graph, spec: Spec, weights: Weights, prefix: str, x: Tensor, indices: Tensor, shares: Tensor) -> Tensor:
    """[N, H], experts of this rank [N, K] and their shares [N, K] -> [N, H]."""
    arch, kinds = spec.arch, net.trt.DataType
    gate, up, down = weights.layer_experts(prefix, spec.experts)
    batch = net.reshape(x, (1, -1, arch.hidden_size))
    turned, inner = [_turned(net, part, x) for part in (gate, up, down)], None
    if gate.format == "fp8":
        scale, inner = shared_scale(net, gate, up), shared_scale(net, down)
        batch = net.dequantize(net.quantize(batch, scale, kinds.FP8), scale, x.dtype)
    per_token = (1, -1, arch.num_experts_per_tok)
    layer = net.layer("add_moe", batch, net.reshape(indices, per_token), net.reshape(net.cast(shares, x.dtype), per_token))
    layer.set_gated_weights(*turned, net.trt.MoEActType.SILU)
    if inner is not None:
        layer.set_quantization_static(inner, kinds.FP8)
    return net.reshape(net.checked(layer), (-1, arch.hidden_size))


def _turned(net: Graph, weight: Stored, x: Tensor) -> Tensor:
    """[E, N, K] as stored -> [E, K, N], in the type of x."""
    codes = net.constant(weight.tensors["weight"].swapaxes(1, 2), f"{weight.name}.weight")
    if weight.format != "fp8":
        return codes
    return net.dequantize(codes, net.constant(weight.tensors["weight_scale"], f"{weight.name}.weight_scale"), x.dtype, axis=0)
