"""The digest of a file, made of pieces: whoever writes the file can compute it on the way, on several threads.

It is the SHA-256 of the file; of a file larger than a piece, the SHA-256 over the SHA-256 digests of its 8 MiB pieces,
in order, named `pieces_sha256`. A digest may be handed from a stage to the store with the file's stamp, which must not
have changed since for it to be believed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

__all__ = ["PIECE_BYTES", "Facts", "describe_file", "facts_of", "load_digests", "stamp", "trusted"]

PIECE_BYTES = 8 << 20
READ_BYTES = 1 << 20
MAX_THREADS = 8

Facts = dict[str, Any]
"""`size`, and `sha256` or `pieces_sha256`."""


def facts_of(pieces: Iterable[bytes], size: int) -> Facts:
    """From the digests of all pieces, in order."""
    pieces = list(pieces)
    if len(pieces) == 1:
        return {"sha256": pieces[0].hex(), "size": size}
    return {"pieces_sha256": sha256(b"".join(pieces)).hexdigest(), "size": size}


def describe_file(path: Path) -> Facts:
    """Read and hash a file, its pieces side by side."""
    size = path.stat().st_size
    starts = range(0, max(1, size), PIECE_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if len(starts) == 1:
            return facts_of([_piece(descriptor, 0)], size)
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            return facts_of(pool.map(lambda start: _piece(descriptor, start), starts), size)
    finally:
        os.close(descriptor)


def stamp(path: Path) -> list[int]:
    """What must not change for a remembered digest to hold. The change time is the kernel's own: nobody can set it back."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def trusted(path: Path, record: Mapping[str, Any]) -> Facts | None:
    """The facts of a record {stamp, facts}, if the file is still the one that was recorded."""
    return record["facts"] if record.get("stamp") == stamp(path) else None


def load_digests(file: Path) -> dict[str, dict[str, Any]]:
    """{relative path: record} that a stage handed over; empty where there is none or it cannot be read."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _piece(descriptor: int, start: int) -> bytes:
    """Digest of up to a piece of bytes from `start`."""
    digest, stop = sha256(), start + PIECE_BYTES
    while start < stop and (data := os.pread(descriptor, min(READ_BYTES, stop - start), start)):
        digest.update(data)
        start += len(data)
    return digest.digest()
