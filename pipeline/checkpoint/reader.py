"""Reads safetensors files without torch: validated headers, tensors mapped by offset.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without holes or overlaps.
Every deviation is a `ConfigError` that names the file, found before any weight is read.
"""

from __future__ import annotations

import gc
import json
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pipeline.checkpoint.problems import Problem, Report, refuse
from pipeline.core.errors import ConfigError
from pipeline.formats.numerics import Array

__all__ = ["DTYPES", "TensorInfo", "raw_header", "read_header", "read_tensor", "uncollected"]

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
MAX_HEADER_BYTES = 100_000_000
LFS = b"version https://git-lfs.github.com/spec/"
"""Begins a file that stands for one that was not downloaded."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: bytes [start, stop) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self.stop - self.start


@contextmanager
def uncollected() -> Iterator[None]:
    """Headers become a million small objects without cycles; the collector would walk them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_header(file: Path, report: Report = refuse) -> dict[str, TensorInfo]:
    """The tensors of one file, in the order of their bytes. Holes and overlaps are told to `report`."""
    size = _size(file)
    base, header = _parse(file, size)
    infos = [_info(file, base, name, entry) for name, entry in header.items() if name != "__metadata__"]
    infos.sort(key=lambda info: (info.start, info.stop))
    for problem in _coverage_faults(file, infos, base, size):
        report(problem)
    return {info.name: info for info in infos}


def raw_header(file: Path) -> dict[str, Any]:
    """The header as it stands in the file: quick, and its entries are not checked."""
    return _parse(file, _size(file))[1]


def read_tensor(info: TensorInfo) -> Array:
    """A read-only view of one tensor; its pages are dropped with the last reference to it."""
    if info.num_bytes == 0:
        return np.empty(info.shape, DTYPES[info.dtype])
    try:
        raw = np.memmap(str(info.file), np.uint8, "r", info.start, (info.num_bytes,))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{info.file} cannot be read at {info.name}: {error}. Copy the file again.") from error
    return np.asarray(raw).view(DTYPES[info.dtype]).reshape(info.shape)


def _size(file: Path) -> int:
    try:
        if not stat.S_ISREG((facts := file.stat()).st_mode):
            raise ConfigError(f"{file} is not a file: the checkpoint is incomplete, download it again.")
        return facts.st_size
    except OSError as error:
        raise ConfigError(f"{file} is missing: the checkpoint is incomplete, download it again.") from error


def _parse(file: Path, size: int) -> tuple[int, dict[str, Any]]:
    """Offset of the first tensor byte, and the JSON header."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == LFS[:8] and stream.read(len(LFS) - 8) == LFS[8:]:
            raise ConfigError(f"{file} is a Git LFS pointer instead of the file: run `git lfs pull` in {file.parent}.")
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size or length > MAX_HEADER_BYTES:
            raise ConfigError(
                f"{file} is not a safetensors file or was cut off: its header would take {length} of {size} bytes "
                f"(limit {MAX_HEADER_BYTES}). Copy the file again."
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ConfigError(f"{file} has an unreadable header ({error}): copy the file again.") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file} has a header that is not a table of tensors: copy the file again.")
    return 8 + length, header


def _info(file: Path, base: int, name: str, entry: Any) -> TensorInfo:
    """One header entry, checked."""
    try:
        dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
        start, stop = map(int, entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{file} describes {name} wrongly (needs dtype, shape, data_offsets): {entry!r}.") from error
    if dtype not in DTYPES:
        raise ConfigError(f"{file} stores {name} as {dtype}, which is not known here: {', '.join(DTYPES)} are.")
    wanted = prod(shape) * DTYPES[dtype].itemsize
    if min(shape, default=0) < 0 or start < 0 or stop - start != wanted:
        raise ConfigError(f"{file} gives {name} {stop - start} bytes, but {dtype}{list(shape)} takes {wanted}.")
    return TensorInfo(name, dtype, shape, file, base + start, base + stop)


def _coverage_faults(file: Path, infos: list[TensorInfo], base: int, size: int) -> Iterator[Problem]:
    """Tensors must fill the file without holes and without sharing bytes."""
    end = base
    for info in infos:
        if info.start != end:
            kind = "shares bytes with the tensor before it" if info.start < end else "leaves a hole before it"
            text = f"{file}: {info.name} {kind}; write the checkpoint again with safetensors."
            yield Problem("byte ranges", info.name, text)
        end = max(end, info.stop)
    if end != size:
        fault = "was cut off" if end > size else "has bytes that belong to no tensor"
        text = f"{file} {fault}: its header describes {end} bytes, the file has {size}. Copy it again."
        yield Problem("file size", "", text)
