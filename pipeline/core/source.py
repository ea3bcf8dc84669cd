"""The source checkpoint of a run: where it is, and the digest of its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError

__all__ = ["Source", "find_source"]

EMBEDDED = "embedded:"
LONGEST_HEADER = 100_000_000
"""Bytes; longer ones are no headers (`pipeline/checkpoint/reader.py` refuses them)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint folder, or none (then only `plan` can run)."""

    folder: Path | None
    model: str
    cache: Path
    """File in which digests of large files are remembered by size, time and inode."""

    @property
    def way_out(self) -> str:
        """What to do where there is no folder."""
        return f"model={self.model} names none: give the folder of an R1-layout checkpoint as checkpoint=DIR"

    def digest(self, what: Literal["headers", "all"], stage: str) -> str:
        """Content digest of config.json and the files' headers, or of the whole checkpoint; `stage` is who asks."""
        if self.folder is None:
            if what == "headers":
                return "none"
            raise ConfigError(f"{stage} needs a checkpoint, and {self.way_out}.")
        if what == "headers":
            return _digest_of_headers(self.folder)
        from pipeline.checkpoint.digest import digest

        return digest(self.folder, self.cache)


def find_source(config: Config, store_root: Path) -> Source:
    """The checkpoint that `checkpoint=` names, else the model's own."""
    if config.checkpoint == "":
        raise ConfigError("checkpoint= is empty: give the folder of a checkpoint, or leave it out for the model's own.")
    named = config.checkpoint or config.model.checkpoint
    folder = _locate(named) if named else None
    if folder and not (folder / "config.json").is_file():
        raise ConfigError(f"checkpoint {named} has no config.json: give the folder of a Hugging Face checkpoint as checkpoint=DIR.")
    root = store_root.absolute()
    if folder and root.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"store.root={config.store.root} lies in the checkpoint {named}, which is only read: name another folder."
        )
    return Source(folder, config.model.name, root / "digests.json")


def _digest_of_headers(folder: Path) -> str:
    """Of config.json and the JSON before the tensors of each safetensors file, whatever it is worth."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = min(int.from_bytes(prefix, "little"), LONGEST_HEADER)
            found.update(f"{file.name} {length}".encode() + stream.read(length))
    return found.hexdigest()


def _locate(named: str) -> Path:
    if named.startswith(EMBEDDED):
        return Path(__file__).resolve().parents[1] / "data" / named.removeprefix(EMBEDDED)
    return Path(named).expanduser().absolute()
