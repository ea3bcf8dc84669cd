"""What `inspect` shows: what the checkpoint is, its parts with sizes, and what is odd about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.dry_run import size_of, table
from pipeline.checkpoint.layout import CLASSES
from pipeline.checkpoint.problems import Problem, sentences
from pipeline.checkpoint.reader import TensorInfo, uncollected
from pipeline.inspect.contents import Contents
from pipeline.inspect.declared import declarations
from pipeline.inspect.ranks import RankOptions, rank_bytes

__all__ = ["Inspection", "inspect"]

SAMPLE = 4096
"""Bytes at either end of two tensors that are compared before they count as copies of one another."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found."""

    contents: Contents
    oddities: tuple[Problem, ...]
    copies: dict[str, str]
    """Module -> the module of which it is, as far as was sampled, a copy."""
    options: RankOptions | None

    def rows(self) -> list[dict[str, Any]]:
        """Sums by class and format, in the order of a model."""
        sums: dict[tuple[str, str], dict[str, Any]] = {}
        for module in self.contents.modules.values():
            key = (module.place.kind, module.format)
            row = sums.setdefault(key, {"modules": 0, "tensors": 0, "parameters": 0, "bytes": 0})
            row["modules"] += 1
            row["tensors"] += len(module.tensors)
            row["parameters"] += module.num_parameters
            row["bytes"] += module.num_bytes
        ranks = rank_bytes(self.contents, self.options, set(self.copies)) if self.options else {}
        ordered = sorted(sums, key=lambda key: (CLASSES.index(key[0]), key[1]))
        return [
            {"class": kind, "format": name} | sums[kind, name] | ({"rank_bytes": ranks[kind, name]} if ranks else {})
            for kind, name in ordered
        ]

    def lines(self) -> list[str]:
        """For people."""
        rows = self.rows()
        columns = [name for name in (rows or [{}])[0] if name not in ("class", "format")]
        total = {"class": "total", "format": ""} | {name: sum(row[name] for row in rows) for name in columns}
        head = ("class", "format", *(name.replace("rank_bytes", f"a rank, {self._layout()}") for name in columns))
        cells = [tuple(_cell(name, row[name]) for name in ("class", "format", *columns)) for row in (*rows, total)]
        faults = [problem for problem in self.oddities if not problem.note]
        notes = [problem for problem in self.oddities if problem.note]
        return [
            *self._subject(), "", *table(cells, head, 2), "",
            *(f"{name} is a copy of {other} where sampled: engines share one" for name, other in self.copies.items()),
            *(f"note: {text}" for text in sentences(notes, most=2)),
            *(f"! {text}" for text in sentences(faults)),
            f"{len(faults):,} oddities" if faults else "nothing odd",
        ]  # fmt: skip

    def plain(self) -> dict[str, Any]:
        """For machines."""
        contents = self.contents
        layout = self.options.layout if self.options else None
        return {
            "checkpoint": str(contents.folder),
            "model_type": contents.config.get("model_type"),
            "files": len(contents.shards),
            "tensors": len(contents.tensors),
            "bytes": contents.num_bytes,
            "rows": self.rows(),
            "declared": {item.file: {"algorithm": item.algorithm, "kv_cache": item.kv_cache} for item in declarations(contents)},
            "mtp": {"announced": contents.num_mtp_layers, "stored": contents.mtp_layers},
            "tied": bool(contents.config.get("tie_word_embeddings")),
            "copies": self.copies,
            "rank": {"tp": layout.tp, "ep": layout.ep, "attention_dp": layout.attention_dp} if layout else None,
            "oddities": [
                {"kind": p.kind, "tensor": p.tensor, "text": p.text, "note": p.note} for p in self.oddities
            ],
        }  # fmt: skip

    def _layout(self) -> str:
        return str(self.options.layout) if self.options else ""

    def _subject(self) -> list[str]:
        contents = self.contents
        kind = contents.config.get("model_type") or "no model_type"
        declared = "; ".join(f"{item.file} says {item.algorithm}" for item in declarations(contents)) or "none declared"
        caches = {item.kv_cache for item in declarations(contents)} - {None}
        return [
            f"{contents.folder}: {kind}, {len(contents.shards)} files, {len(contents.tensors):,} tensors, "
            f"{size_of(contents.num_bytes)}",
            f"quantisation: {declared}{f'; KV cache {min(map(str, caches))}' if caches else ''}",
            f"MTP: {self._mtp()}",
        ]

    def _mtp(self) -> str:
        stored = self.contents.mtp_layers
        if stored:
            size = sum(module.num_bytes for module in self.contents.modules.values() if module.place.kind == "mtp")
            return f"layer {', '.join(map(str, stored))}, {size_of(size)}"
        return "dropped" if self.contents.num_mtp_layers else "none"


@uncollected()
def inspect(folder: Path, options: RankOptions | None = None) -> Inspection:
    """Look at a checkpoint folder."""
    contents = Contents.open(folder)
    from pipeline.verify.invariants import problems  # it looks at contents as well

    return Inspection(contents, tuple(problems(contents)), dict(_copies(contents)), options)


def _copies(contents: Contents) -> Iterator[tuple[str, str]]:
    """An MTP layer's embedding and head that repeat the main model's; the first and last bytes are compared."""
    for layer in contents.mtp_layers:
        for leaf, other in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            name = f"model.layers.{layer}.{leaf}"
            one, two = (contents.tensors.get(f"{module}.weight") for module in (name, other))
            if one and two and (one.dtype, one.shape) == (two.dtype, two.shape) and _ends(one) == _ends(two):
                yield name, other


def _ends(info: TensorInfo) -> tuple[bytes, bytes]:
    size = min(SAMPLE, info.num_bytes)
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        first = stream.read(size)
        stream.seek(info.stop - size)
        return first, stream.read(size)


def _cell(name: str, value: Any) -> str:
    if name.endswith("bytes"):
        return size_of(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
