"""What can be read from a TensorRT-RTX engine without a GPU: its header, and the program that lies in it as text.

Both are observed (1.7.1), not documented: the header is checked after a build, the text is for people.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import StageError

__all__ = ["Header", "check_header", "kernels", "read_header"]

MAGIC, HEADER_BYTES = b"vtrt", 64
TARGET_BITS = {75: 1, 80: 2, 86: 4, 89: 8, 120: 16, 121: 32}


@dataclass(frozen=True, slots=True)
class Header:
    """The first 64 bytes."""

    version: str
    size: int
    """Of the whole file, in bytes."""
    targets: tuple[int, ...]


def read_header(file: Path) -> Header:
    """Version, size and targets of an engine.

    Raises:
        StageError: it is not a TensorRT-RTX engine, or cut off.
    """
    with file.open("rb") as stream:
        head = stream.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or head[:4] != MAGIC:
        raise StageError(f"{file} is not an engine of TensorRT-RTX: it does not begin with {MAGIC.decode()!r}.")
    size = struct.unpack_from("<Q", head, 16)[0]
    if size != file.stat().st_size:
        raise StageError(
            f"{file} was cut off: its header says {size:,} bytes, the file has {file.stat().st_size:,}. Build it again."
        )
    return Header(".".join(map(str, head[24:28])), size, tuple(sm for sm, bit in TARGET_BITS.items() if head[32] & bit))


def check_header(file: Path, targets: Sequence[int]) -> None:
    """The engine must be for the targets that were asked for: with default ones header and kernels may disagree."""
    found = read_header(file).targets
    if sorted(found) != sorted(targets):
        asked = ", ".join(f"SM{sm}" for sm in targets)
        built = ", ".join(f"SM{sm}" for sm in found)
        raise StageError(f"{file.name} was asked for {asked}, but is for {built}: report it with the library's version.")


def kernels(file: Path) -> dict[str, int]:
    """Kernel names in the engine's text -> how often they occur; names are TensorRT's own."""
    counts: dict[str, int] = {}
    for match in re.finditer(rb"function:([A-Za-z_][\w.]{3,120})", file.read_bytes()):
        name = match[1].decode()
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))
