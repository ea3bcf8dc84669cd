"""The product that the kernel must reproduce, up to the order of float32 sums."""

from __future__ import annotations

from torch import Tensor

__all__ = ["router_gemm"]


def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """BF16 x [N, H] and weight [E, H] -> logits F32 [N, E]; products of BF16 are exact in float32."""
    return x.float() @ weight.float().t()
