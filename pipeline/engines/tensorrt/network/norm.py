"""RMSNorm and SwiGLU. TensorRT's normalisation layer subtracts the mean, so the norm is written in primitives, which it fuses."""

from __future__ import annotations

from pipeline.engines.tensorrt.graph import Graph, Tensor
from pipeline.engines.tensorrt.network.linear import Named, Stored, linear
from pipeline.models.arch import Arch

__all__ = ["rms_norm", "swiglu"]


def rms_norm(net: Graph, x: Tensor, weight: Named, arch: Arch) -> Tensor:
    """[..., size] -> [..., size], the mean in float32."""
    wide = net.float32(x)
    mean = net.reduce(net.mul(wide, wide), "AVG", len(x.shape) - 1)
    unit = net.cast(net.mul(wide, net.rsqrt(net.add(mean, net.scalar(arch.rms_norm_eps, mean)))), x.dtype)
    values = weight.value.astype(net.numpy[x.dtype]).reshape(*(1,) * (len(x.shape) - 1), -1)
    return net.mul(unit, net.constant(values, weight.name))


def swiglu(net: Graph, x: Tensor, gate: Stored, up: Stored, down: Stored) -> Tensor:
    """down(silu(gate(x)) * up(x))"""
    gated = linear(net, x, gate)
    return linear(net, net.mul(net.mul(gated, net.sigmoid(gated)), linear(net, x, up)), down)
