"""The router's product in TensorRT, BF16 in and FP32 out without casts, and with BF16 out the way into latent attention (`qkv_a`).

An engine has one kernel for all of its steps, of up to `max_tokens` tokens; TensorRT times it with one and two tiles of 16
experts a CTA, where CTAs share the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from plugins.fused_qkv_a.reference import qkv_a
from plugins.router_gemm import op
from plugins.router_gemm.reference import router_gemm
from plugins.trt import Kernel, Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _shapes(sizes: Sizes, **_: object) -> Sequence[Sequence[Size]]:
    return ((sizes["x"][0], sizes["weight"][0]),)


def _refusal(sizes: Sizes, *, max_tokens: int) -> str:
    experts, hidden = sizes["weight"]
    if op.fits(max_tokens, hidden, experts):
        return ""
    return f"the kernel takes {op.MAX_TOKENS} tokens and multiples of 256 x 32 at most, not {max_tokens} and {hidden} x {experts}"


def _product(name: str, output: str, reference: Callable[[Tensor, Tensor], Tensor]) -> Plugin:
    def kernel(sizes: Sizes, *, max_tokens: int, tactic: int = 0) -> Kernel:
        experts, hidden = sizes["weight"]
        entry, macros, grid, threads = op.variant(max_tokens, hidden, experts, tactic)
        shape = {"HIDDEN": hidden, "EXPERTS": experts, "BF16_OUT": int(output == "BF16")}
        return Kernel(
            source=op.SOURCE.path, name=entry, macros=macros | shape, grid=grid, threads=threads, numbers={"tokens": sizes["x"][0]}
        )

    return Plugin(
        name=name, inputs={"x": "BF16", "weight": "BF16"}, outputs={"logits": output}, attributes={"max_tokens": int},
        shapes=_shapes, reference=lambda x, weight, **_: (reference(x, weight),), kernel=kernel, refusal=_refusal, least_sm=90,
        tactics=op.EXPERT_TILES,
    )  # fmt: skip


PLUGINS = _product("router_gemm", "FLOAT", router_gemm), _product("qkv_a", "BF16", qkv_a)
