"""Reads the PNG files that browsers write: 8-bit RGB or RGBA, not interlaced."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

__all__ = ["read_png"]


def read_png(file: Path) -> np.ndarray:
    """[height, width, 3], uint8"""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, packed, width, height, channels = 8, b"", 0, 0, 3
    while place < len(data):
        (size,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + size]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", body)
            assert (depth, interlace) == (8, 0) and colour in (2, 6)
            channels = 4 if colour == 6 else 3
        elif kind == b"IDAT":
            packed += body
        place += 12 + size
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    return _unfiltered(lines, channels).reshape(height, width, channels)[..., :3]


def _unfiltered(lines: np.ndarray, channels: int) -> np.ndarray:
    out = np.zeros((lines.shape[0] + 1, lines.shape[1] - 1), np.uint8)
    for number, line in enumerate(lines):
        out[number + 1] = _FILTERS[line[0]](line[1:], out[number], channels)
    return out[1:]


def _sub(line: np.ndarray, above: np.ndarray, channels: int) -> np.ndarray:
    return np.add.accumulate(line.reshape(-1, channels), axis=0, dtype=np.uint8).reshape(-1)


def _average(line: np.ndarray, above: np.ndarray, channels: int) -> list[int]:
    out, up = [0] * channels + line.tolist(), [0] * channels + above.tolist()
    for place in range(channels, len(out)):
        out[place] = (out[place] + (out[place - channels] + up[place]) // 2) & 255
    return out[channels:]


def _paeth(line: np.ndarray, above: np.ndarray, channels: int) -> list[int]:
    out, ups = [0] * channels + line.tolist(), [0] * channels + above.tolist()
    for place in range(channels, len(out)):
        left, up, corner = out[place - channels], ups[place], ups[place - channels]
        guess = left + up - corner
        nearest = min((left, up, corner), key=lambda value: abs(guess - value))  # the first of those that are as near
        out[place] = (out[place] + nearest) & 255
    return out[channels:]


_FILTERS = [
    lambda line, above, channels: line,
    _sub,
    lambda line, above, channels: line + above,
    _average,
    _paeth,
]
