"""What can be read from a TensorRT-RTX engine without a GPU: its header, and the program that lies in it as text.

Both are observed (1.7.1), not documented: the header is checked after a build, the text is for people.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import StageError
from pipeline.engines.tensorrt.library import listed

__all__ = ["Header", "Launch", "check_header", "kernels", "launches", "read_header"]

MAGIC, HEADER_BYTES = b"vtrt", 64
BEGIN = rb"(?:function|runtime_fusion|fully_connected)=\{"
LAUNCH = re.compile(
    rb'fully_connected=\{ name="([\w.+]{1,200})"'
    rb"|(?:function|runtime_fusion)=\{ name=([\w.]{1,120})(?: (?:(?!" + BEGIN + rb')[^\0])*?layers="([^"\0]*)")?'
)
"""A product, or a kernel and the layers that it was made from."""
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
        raise StageError(
            f"{file.name} was asked for {listed(targets)}, but is for {listed(found)}: report it with the library's version."
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of the program."""

    kernel: str
    """TensorRT's name; `gemm` is a library product, whose kernel is chosen when the engine is loaded."""
    layers: tuple[str, ...]
    """Ours, where it noted them."""


def launches(file: Path) -> list[Launch]:
    """What the engine launches, in its order."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return [_launch(match) for match in LAUNCH.finditer(text)]


def _launch(match: re.Match[bytes]) -> Launch:
    product, kernel, layers = (group.decode(errors="replace") if group else "" for group in match.groups())
    names = tuple(name.removeprefix("[ONNX Layer: ").removesuffix("]") for name in layers.split("\x1f")) if layers else ()
    return Launch("gemm", (product,)) if product else Launch(kernel, names)


def kernels(file: Path) -> dict[str, int]:
    """Kernel -> how often it is launched; `_gemm_mha` is fused attention."""
    return dict(sorted(Counter(launch.kernel for launch in launches(file)).items()))
