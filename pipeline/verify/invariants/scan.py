"""The values of scale tensors, in pieces of bounded size: how many are NaN, zero, negative, or at the top of their type."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

import numpy as np

from pipeline.checkpoint.reader import DTYPES, TensorInfo
from pipeline.core.errors import ConfigError
from pipeline.core.stage import Progress
from pipeline.formats.numerics import Array
from pipeline.inspect.contents import Contents
from pipeline.verify.rows import read_range
from pipeline.verify.weights import in_order, num_threads

__all__ = ["SCALE_TENSORS", "Scan", "scan_scales"]

SCALE_TENSORS = frozenset(
    {"weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale", "scales",
     "pre_quant_scale", "k_scale", "v_scale"}
)  # fmt: skip
PIECE = 1 << 22
"""Elements looked at together."""
TOP_E4M3, NAN_E4M3, NAN_E8M0 = 0x7E, 0x7F, 0xFF


@dataclass(frozen=True, slots=True)
class Scan:
    """Counts over one scale tensor."""

    elements: int = 0
    not_finite: int = 0
    zero: int = 0
    negative: int = 0
    at_top: int = 0
    """E4M3 scales of 448, the largest there is."""

    def __add__(self, other: Scan) -> Scan:
        return Scan(
            self.elements + other.elements, self.not_finite + other.not_finite, self.zero + other.zero,
            self.negative + other.negative, self.at_top + other.at_top,
        )  # fmt: skip


def scan_scales(contents: Contents, modules: Collection[str], progress: Progress) -> dict[str, Scan]:
    """Scans of the modules' scale tensors, by tensor; what cannot be read is left out, its file is told of elsewhere."""
    infos = [
        info
        for module in contents.modules.values()
        if module.name in modules
        for leaf, info in module.tensors.items()
        if leaf in SCALE_TENSORS and info.dtype in ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "U8")
    ]
    progress.start(sum(info.num_bytes for info in infos), "B")
    scans: dict[str, Scan] = {}
    for info, scan in in_order(lambda info: (info, _scan(info)), infos, num_threads()):
        progress.advance(info.num_bytes)
        if scan is not None:
            scans[info.name] = scan
    return scans


def _scan(info: TensorInfo) -> Scan | None:
    total = Scan()
    try:
        for piece in _pieces(info):
            total += _counts(piece)
    except ConfigError:
        return None
    return total


def _pieces(info: TensorInfo) -> Iterable[Array]:
    size, count = DTYPES[info.dtype].itemsize, prod(info.shape)
    for start in range(0, count, PIECE):
        stop = min(start + PIECE, count)
        yield read_range(info, info.start + start * size, (stop - start,))


def _counts(values: Array) -> Scan:
    if values.dtype.itemsize > 1:
        return _of_floats(values.astype(np.float32))
    codes = values.view(np.uint8)
    if values.dtype == DTYPES["F8_E4M3"]:
        magnitude = codes & 0x7F
        nan = magnitude == NAN_E4M3
        negative = int(((codes > 0x80) & ~nan).sum())
        return Scan(codes.size, int(nan.sum()), int((magnitude == 0).sum()), negative, int((codes == TOP_E4M3).sum()))
    return Scan(codes.size, int((codes == NAN_E8M0).sum()))


def _of_floats(values: Array) -> Scan:
    finite = np.isfinite(values)
    return Scan(values.size, int((~finite).sum()), int((values == 0).sum()), int((finite & (values < 0)).sum()))
