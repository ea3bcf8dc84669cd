"""How others spell TensorRT-LLM's arguments: its own older versions and command lines, its TensorRT backend, vLLM, SGLang.

One file a dialect; `before_1_0.yaml` explains the rows. A new dialect is a new file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.engines.trtllm.tables import read_table, table_names

__all__ = ["OWN", "Dialect", "Spelling", "dialect", "dialect_of", "dialects"]

Args = Mapping[str, Any]
OWN = ("before_1_0", "trtllm_serve", "tensorrt")
"""Dialects of TensorRT-LLM itself: a file may mix them, and `how` needs no other argument there."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """What one name means."""

    to: str | None
    """Path on the newest line; None: there is no equivalent."""
    note: str = ""
    """What to know, or why there is none."""
    how: str = ""
    also: Spelling | None = None
    """What else the name says."""

    def value(self, value: Any, args: Args) -> Any:
        """The value under the new name; `args` is the whole file.

        Raises:
            LookupError: if the value has no equivalent.
        """
        return _CHANGES[self.how](value, args) if self.how else value


@dataclass(frozen=True, slots=True)
class Dialect:
    """One file."""

    name: str
    title: str
    names: Mapping[str, Spelling]
    """Path -> what it means."""
    marks: tuple[str, ...] = ()
    """Names that only this dialect has."""


def dialects() -> tuple[str, ...]:
    """Their names."""
    return table_names(__name__)


@cache
def dialect(name: str) -> Dialect:
    """Read one file."""
    table = read_table(__name__, name)
    names = {key: _spelling(row) for key, row in table["names"].items()}
    return Dialect(name, table["title"], names, tuple(table.get("marks", ())))


def dialect_of(args: Args) -> str | None:
    """The foreign dialect whose own names `args` has most of; None where it is TensorRT-LLM's."""
    found = {name: len(args.keys() & set(dialect(name).marks)) for name in dialects() if name not in OWN}
    best = max(found, key=lambda name: found[name])
    return best if found[best] else None


def _spelling(row: str | Mapping[str, Any]) -> Spelling:
    if isinstance(row, str):
        return Spelling(row)
    also = _spelling(row["also"]) if "also" in row else None
    return Spelling(row.get("to"), row.get("note") or row.get("none", ""), row.get("how", ""), also)


def _ranks(value: Any, args: Args) -> Any:
    """As many as there are ranks of a stage: vLLM's expert parallelism spans tensor and data parallelism."""
    return _all_ranks(value, args) if value else 1


def _all_ranks(value: Any, args: Args) -> int:
    """TensorRT-LLM counts data-parallel ranks of attention as tensor-parallel ones."""
    return _count(args, "tensor_parallel_size") * _count(args, "data_parallel_size")


def _count(args: Args, name: str) -> int:
    value = args.get(name, 1)
    return value if isinstance(value, int) and value > 0 else 1


_METHODS = {"mtp": "MTP", "deepseek_mtp": "MTP", "nextn": "MTP", "eagle": "MTP", "eagle3": "Eagle3", "ngram": "NGram"}
_RUNNERS = {"flashinfer_trtllm": "TRTLLM", "flashinfer_cutlass": "CUTLASS", "cutlass": "CUTLASS", "deep_gemm": "DEEPGEMM",
            "triton": "TRITON", "flashinfer_cutedsl": "CUTEDSL", "auto": "AUTO"}  # fmt: skip
_CHANGES: dict[str, Callable[[Any, Args], Any]] = {
    "opposite": lambda value, args: not value,
    "table": lambda value, args: {} if value else None,
    "no_table": lambda value, args: None if value else {},
    "lower": lambda value, args: str(value).lower(),
    "upper": lambda value, args: str(value).upper(),
    "hyphens": lambda value, args: str(value).replace("_", "-"),
    "slow_or_auto": lambda value, args: value if value in ("auto", "slow") else "auto",
    "cache": lambda value, args: "fp8" if str(value).startswith("fp8") else "auto" if value != "nvfp4" else value,
    "guided": lambda value, args: {"xgrammar": "xgrammar", "guidance": "llguidance", "llguidance": "llguidance"}[value],
    "method": lambda value, args: _METHODS[str(value).lower()],
    "runner": lambda value, args: _RUNNERS[str(value).lower()],
    "ranks": _ranks,
    "all_ranks": _all_ranks,
    "above_one": lambda value, args: _count({"value": value}, "value") > 1,
}
