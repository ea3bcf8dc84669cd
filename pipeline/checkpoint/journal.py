"""Which shards are finished, so that a killed conversion goes on where it was.

A record is written after its shard is on disk under its name. A shard is taken over if it comes from the very same inputs,
and is still the file that was recorded, by size, times and inode; otherwise its bytes are hashed and must be
those of the record. So starting again after 400 GB takes no time, and a shard that somebody touched is looked at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.checkpoint.conversion import OutputShard
from pipeline.core.filehash import Facts, describe_file, stamp
from pipeline.core.jsonio import read_json, write_json

__all__ = ["Journal"]


class Journal:
    """Records of finished shards of the folder `out`, kept in `folder`."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out, self.folder = out, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in self.folder.glob(".*.part*"):
            part.unlink()

    def holds(self, shard: OutputShard, key: str) -> bool:
        """Whether the shard is there, from these very inputs, with the bytes that were written."""
        try:
            path, record = self.out / shard.name, self._read(shard.name)
            if record["key"] != key or path.stat().st_size != record["facts"]["size"]:
                return False
            if record["stamp"] == stamp(path):
                return True
            if describe_file(path) != record["facts"]:
                return False
            self.record(shard.name, key, record["facts"])
            return True
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def record(self, name: str, key: str, facts: Facts) -> None:
        """Remember a published shard."""
        write_json(self.folder / f"{name}.json", {"key": key, "facts": facts, "stamp": stamp(self.out / name)})

    def digests(self, names: list[str]) -> dict[str, Any]:
        """For the store: {name: {stamp, facts}}."""
        return {name: {field: self._read(name)[field] for field in ("stamp", "facts")} for name in names}

    def _read(self, name: str) -> dict[str, Any]:
        record = read_json(self.folder / f"{name}.json")
        if not isinstance(record, dict):
            raise ValueError(json.dumps(record))
        return record
