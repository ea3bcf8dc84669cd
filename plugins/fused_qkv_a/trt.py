"""Norms, rotary embedding and the write into the latent cache in TensorRT: one kernel, the cache written in place.

With an E4M3 cache (`norm_rope_cache_fp8`) it is the way to write one: TensorRT's own cache layer takes none. The product before
it is `qkv_a` of `plugins/router_gemm/trt.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.fused_qkv_a import op, reference
from plugins.trt import Kernel, Plugin, Size, Sizes

__all__ = ["PLUGINS"]


def _shapes(sizes: Sizes, **_: object) -> Sequence[Sequence[Size]]:
    return (sizes["qkv"][0], sizes["q_norm"][0]), sizes["cache"]


def _refusal(sizes: Sizes, **_: object) -> str:
    q, latent, row = sizes["q_norm"][0], sizes["kv_norm"][0], sizes["cache"][1]
    if op.fits(q, latent, row - latent):
        return ""
    return f"the kernel does not split {q}, {latent} and {row - latent} values into warps"


def _reference(qkv: Tensor, q_norm: Tensor, kv_norm: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, cache: Tensor,
               **attributes: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    written = cache.clone()
    return reference.tail(qkv, q_norm, kv_norm, cos_sin, positions, slots, written, **attributes), written


def _tail(name: str, cache: str) -> Plugin:
    def kernel(sizes: Sizes, *, kv_scale: float, eps: float) -> Kernel:
        q, latent, row = sizes["q_norm"][0], sizes["kv_norm"][0], sizes["cache"][1]
        return Kernel(
            source=op.SOURCE.path, name="norm_rope_cache", macros=op.macros(q, latent, row - latent, cache == "FP8"),
            grid=(sizes["qkv"][0], 1, 1), threads=op.threads(q, latent), constants={"eps": eps, "inverse": 1 / kv_scale},
        )  # fmt: skip

    return Plugin(
        name=name,
        inputs={
            "qkv": "BF16", "q_norm": "BF16", "kv_norm": "BF16", "cos_sin": "FLOAT", "positions": "INT32", "slots": "INT64",
            "cache": cache,
        },
        outputs={"q_a": "BF16", "written": cache}, aliases={"written": "cache"}, attributes={"kv_scale": float, "eps": float},
        shapes=_shapes, reference=_reference, kernel=kernel, refusal=_refusal, least_sm=80 if cache == "BF16" else 89,
    )  # fmt: skip


PLUGINS = _tail("norm_rope_cache", "BF16"), _tail("norm_rope_cache_fp8", "FP8")
