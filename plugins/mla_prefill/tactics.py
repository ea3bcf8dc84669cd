"""Which implementation of the prompt's attention is fastest where (`tactics.json`; see `plugins.tactics`), and those of others.

"fa3": FlashAttention-3 of vLLM, where its library is loaded. "cudnn": torch's cuDNN attention, for one sequence from its beginning
of a multiple of 128 tokens. flashinfer's needs a plan made on the host for every batch: an op cannot take it. On kv_b's product as
it is ours is always taken: what joins keys for the others takes longer than they can gain, at every size that was measured.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from plugins.tactics import OURS, Table, ours_alone, takes

__all__ = ["TABLE", "THEIRS", "cudnn", "fa3", "present"]

SIZES = "heads", "batch", "tokens", "context"
TABLE = Table(Path(__file__).with_name("tactics.json"), "mla_prefill", ("device",), SIZES, ("fa3", "cudnn"))
FA3_ARGUMENTS = 37


def present(alone: bool) -> tuple[str, ...]:
    """Implementations that can be used in this process; `alone`: for one sequence from its beginning, in whole blocks."""
    if ours_alone():
        return (OURS,)
    return OURS, *(("fa3",) if takes(torch.ops._vllm_fa3_C, "fwd", FA3_ARGUMENTS) else ()), *(("cudnn",) if alone else ())


def fa3(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-3 as the op's results."""
    new_and_out, ends, sizes = (None,) * 4, (cu_q, cu_k, None, None, None), (len(q), len(k))
    pages_and_rotary, fp8_scales, causal, no_window = (None,) * 6, (None,) * 3, True, (-1, -1)
    softcap, interleaved, schedule, splits, pack, margin, sink, context_parallel = 0.0, True, None, 0, None, 0, None, (1, 0, None)
    rest = softcap, interleaved, schedule, splits, pack, margin, sink, *context_parallel
    inputs = q, k, v, *new_and_out, *ends, *sizes, *pages_and_rotary, *fp8_scales, scale, causal, *no_window
    out, lse, *_ = torch.ops._vllm_fa3_C.fwd(*inputs, *rest)
    return out, lse


def cudnn(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN's attention through torch, as the op's results."""
    inputs = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(*inputs, None, True, 0.0, True, False, scale=scale)
    return out[0].transpose(0, 1).contiguous(), lse.view(q.shape[1], len(q))


THEIRS = {"fa3": fa3, "cudnn": cudnn}
