"""Gather and exchange rows of hidden states over torch.distributed, in BF16, FP8 or NVFP4.

    hidden = all_gather(x, "nvfp4", input_scale=scale)             # BF16 [rows of all ranks, K]
    codes, scales = views(gather_packed(x, "nvfp4", input_scale=scale), K, "nvfp4")      # to feed on, undecoded
    mine = reduce_scatter(outputs)                                 # BF16 [own rows, K]: the way back
    hidden = torch.ops.r1_pipeline.fp4_allgather(x, scale, group.group_name)             # in NVFP4, for graphs that are exported

A row travels whole, as its codes and then its scales: K bytes * 2 in BF16, 1 + 1/32 in FP8, 1/2 + 1/16 in NVFP4 (3.6 times
fewer than BF16). So one collective carries it, over any number of ranks, any backend, and any rows a rank (`sizes`); scales
travel row by row, because the 128x4 tiles of tensor cores pad each rank's rows (`tile_nvfp4_scales` afterwards).

`input_scale` F32 [1] is NVFP4's scale of the whole tensor, the same on all ranks: a checkpoint's calibrated one, or, where None
is given, the ranks' common largest magnitude / 2688, which costs one more (tiny) collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from pipeline.core.errors import ConfigError
from plugins.nvrtc import aligned
from plugins.quantize import op, reference

__all__ = [
    "PRECISIONS", "Precision", "all_gather", "all_to_all", "common_scale", "exchange_rows", "fp4_allgather", "gather_packed",
    "gather_rows", "pack", "reduce_scatter", "row_bytes", "unpack", "views",
]  # fmt: skip

Precision = Literal["bf16", "fp8", "nvfp4"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8", "nvfp4")
ALIGNMENT = 16
LARGEST = 2688.0
"""6 * 448: the largest code times the largest scale."""
Group = dist.ProcessGroup | None


def row_bytes(columns: int, precision: Precision) -> int:
    """Bytes of a row on the wire."""
    codes, scales = _parts(columns, precision)
    return -(-(codes + scales) // ALIGNMENT) * ALIGNMENT


def views(packed: Tensor, columns: int, precision: Precision) -> tuple[Tensor, Tensor]:
    """Codes and scales within packed rows, as `plugins.quantize` takes them: no copies."""
    codes, scales = _parts(columns, precision)
    if precision == "bf16":
        return packed[:, :codes].view(torch.bfloat16), packed[:, :0]
    inside = packed[:, :codes], packed[:, codes : codes + scales]
    if precision == "fp8":
        return inside[0].view(reference.FP8), inside[1].view(torch.float32)
    return inside[0], inside[1].view(reference.FP8)


def pack(x: Tensor, precision: Precision, input_scale: Tensor | None = None) -> Tensor:
    """x BF16 [N, K] -> U8 [N, row_bytes], quantised straight into place."""
    _check(x, precision)
    if precision == "bf16":
        return x.contiguous().view(torch.uint8)
    packed = x.new_empty((x.shape[0], row_bytes(x.shape[1], precision)), dtype=torch.uint8)
    codes, scales = views(packed, x.shape[1], precision)
    if x.is_cuda:
        if precision == "fp8":
            op.launch_fp8(aligned(x), codes, scales)
        else:
            op.launch_nvfp4(aligned(x), _needed(input_scale), codes, scales)
        return packed
    found = reference.fp8_quantize(x) if precision == "fp8" else reference.nvfp4_quantize(x, _needed(input_scale))
    codes.copy_(found[0])
    scales.copy_(found[1])
    return packed


def unpack(packed: Tensor, columns: int, precision: Precision, input_scale: Tensor | None = None) -> Tensor:
    """-> BF16 [N, K]"""
    codes, scales = views(packed, columns, precision)
    if precision == "bf16":
        return codes
    return op.fp8_dequantize(codes, scales) if precision == "fp8" else op.nvfp4_dequantize(codes, scales, _needed(input_scale))


def gather_packed(
    x: Tensor,
    precision: Precision = "nvfp4",
    *,
    input_scale: Tensor | None,
    sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Packed rows of all ranks in order, U8 [sum(sizes), row_bytes]. `sizes`: rows of each rank, where they differ."""
    ranks = dist.get_world_size(group)
    if sizes is not None and (len(sizes) != ranks or sizes[dist.get_rank(group)] != len(x)):
        raise ConfigError(f"sizes {list(sizes)} must be the rows of each of the {ranks} ranks; here are {len(x)}.")
    return gather_rows(pack(x, precision, input_scale), sizes, group)


def gather_rows(packed: Tensor, sizes: Sequence[int] | None = None, group: Group = None) -> Tensor:
    """Rows [N, B] of all ranks in order, whatever their bytes mean. Ranks with fewer rows than the most send padding, too."""
    ranks = dist.get_world_size(group)
    if sizes is not None:
        packed = _padded(packed, max(sizes))
    out = packed.new_empty((ranks * len(packed), packed.shape[1]))
    dist.all_gather_into_tensor(out, packed, group=group)
    if sizes is None or min(sizes) == max(sizes):
        return out
    return torch.cat([rows[:size] for rows, size in zip(out.chunk(ranks), sizes, strict=True)])


def reduce_scatter(x: Tensor, sizes: Sequence[int] | None = None, group: Group = None) -> Tensor:
    """x [rows of all ranks, K] -> [own rows, K]: the sum of what the ranks hold for them. `sizes` as in `gather_packed`."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [len(x) // ranks] * ranks if sizes is None else list(sizes)
    if len(sizes) != ranks or sum(sizes) != len(x):
        raise ConfigError(f"{len(x)} rows cannot be shared out as {sizes}: sizes must be the rows of each of the {ranks} ranks.")
    if min(sizes) < max(sizes):
        x = torch.cat([_padded(rows, max(sizes)) for rows in x.split(sizes)])
    share = x.new_empty((max(sizes), x.shape[1]))
    dist.reduce_scatter_tensor(share, x.contiguous(), group=group)
    return share[: sizes[rank]]


def all_gather(
    x: Tensor,
    precision: Precision = "nvfp4",
    *,
    input_scale: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Rows of all ranks in order, BF16 [sum(sizes), K]."""
    if precision == "nvfp4" and input_scale is None:
        input_scale = common_scale(x, group)
    packed = gather_packed(x, precision, input_scale=input_scale, sizes=sizes, group=group)
    return unpack(packed, x.shape[1], precision, input_scale)


@torch.library.custom_op("r1_pipeline::fp4_allgather", mutates_args=())
def fp4_allgather(x: Tensor, input_scale: Tensor, group: str, sizes: list[int] | None = None) -> Tensor:
    """`all_gather` in NVFP4 over the process group of this name: BF16 [N, K] -> BF16 [sum(sizes), K]."""
    return all_gather(x, "nvfp4", input_scale=input_scale, sizes=sizes, group=_resolve_process_group(group))


@fp4_allgather.register_fake
def _(x: Tensor, input_scale: Tensor, group: str, sizes: list[int] | None = None) -> Tensor:
    rows = _resolve_process_group(group).size() * x.shape[0] if sizes is None else sum(sizes)
    return x.new_empty((rows, x.shape[1]))


def all_to_all(
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    precision: Precision = "nvfp4",
    *,
    input_scale: Tensor | None = None,
    group: Group = None,
) -> Tensor:
    """Rows to ranks: the first send[0] of x to rank 0, and so on -> BF16 [sum(receive), K], by sender."""
    if precision == "nvfp4" and input_scale is None:
        input_scale = common_scale(x, group)
    return unpack(exchange_rows(pack(x, precision, input_scale), send, receive, group), x.shape[1], precision, input_scale)


def exchange_rows(packed: Tensor, send: Sequence[int], receive: Sequence[int], group: Group = None) -> Tensor:
    """Rows [sum(send), B] to ranks, whatever their bytes mean -> [sum(receive), B], by sender. A token for several ranks is packed
    once and its row repeated."""
    out = packed.new_empty((sum(receive), packed.shape[1]))
    dist.all_to_all_single(out, packed, list(receive), list(send), group=group)
    return out


def common_scale(x: Tensor, group: Group = None) -> Tensor:
    """The ranks' largest magnitude / 2688; 1 where all are zero."""
    amax = x.abs().amax().float().view(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return torch.where(amax > 0, amax / LARGEST, 1.0)


def _parts(columns: int, precision: Precision) -> tuple[int, int]:
    """Bytes of a row's codes and scales."""
    return {"bf16": (2 * columns, 0), "fp8": (columns, columns // 32), "nvfp4": (columns // 2, columns // 16)}[precision]


def _padded(rows: Tensor, count: int) -> Tensor:
    missing = count - len(rows)
    return torch.cat((rows, rows.new_zeros((missing, rows.shape[1])))) if missing else rows


def _needed(input_scale: Tensor | None) -> Tensor:
    if input_scale is None:
        raise ConfigError("NVFP4 needs an input_scale: the tensor's calibrated amax / 2688, the same on all ranks.")
    op.check_whole(input_scale)
    return input_scale


def _check(x: Tensor, precision: Precision) -> None:
    unit = {"bf16": 8, "fp8": reference.FP8_GROUP, "nvfp4": op.NVFP4_COLUMNS}[precision]
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] % unit:
        found = f"{x.dtype} {list(x.shape)}"
        raise ConfigError(f"{found} cannot travel in {precision}: it must be bfloat16 [N, K] with K a multiple of {unit}.")
