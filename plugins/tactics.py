"""Which implementation of an op is fastest where: measured, kept beside the plugin in `tactics.json`, looked up by the op.

A row of the file is one measured shape: what must be the same (`device` and the like), sizes, and the microseconds of each
implementation. A shape that was not measured takes the nearest one's order. For a new GPU, every plugin's is written anew by

    python scripts/bench_plugins.py --json FILE --peers DIR         # those that are installed can be chosen
    python -m plugins.tactics FILE
    python scripts/bench_mla_forms.py --json FILE                   # when to decompress the cache of latents
    python -m plugins.mla_prefill.crossover FILE

`R1_PIPELINE_KERNELS=ours` takes ours alone. What fails when it is called is not called again (`Table.attempt`).
`plugins.gemm_tactics` is about something else: algorithms inside one library.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["OURS", "Table", "importable", "ours_alone", "takes"]

OURS = "ours"
Result = TypeVar("Result")


class Table:
    """The file of one plugin: `same` and `sizes` are a row's keys beside `us`, `names` the implementations that an op can take."""

    def __init__(self, file: Path, plugin: str, same: tuple[str, ...], sizes: tuple[str, ...], names: tuple[str, ...]) -> None:
        self.file, self.plugin, self.same, self.sizes, self.names = file, plugin, same, sizes, names
        self.choose = functools.lru_cache(maxsize=4096)(self._choose)
        self.failed: set[str] = set()
        """Of `names`: those that failed in this process."""

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """All that was measured."""
        return json.loads(self.file.read_text(encoding="utf-8"))["rows"]

    def _choose(self, same: tuple[str, ...], sizes: tuple[int, ...], names: tuple[str, ...]) -> str:
        """The fastest of `names` at the nearest size by the logarithms; ours where nothing of that kind was measured."""
        rows = [row for row in self.rows if tuple(row[key] for key in self.same) == same]
        names = tuple(name for name in names if name not in self.failed)
        if not rows or len(names) == 1:
            return OURS

        def distance(row: Mapping[str, Any]) -> float:
            return sum(abs(math.log(row[key] / size)) for key, size in zip(self.sizes, sizes, strict=True))

        times = min(rows, key=distance)["us"]
        return min((name for name in names if name in times), key=times.__getitem__, default=OURS)

    def attempt(self, name: str, theirs: Callable[[], Result], ours: Callable[[], Result]) -> Result:
        """Ours if that is the choice, else theirs; where that fails, ours, and no second attempt in this process, with a warning.

        What they lack may show at the first call alone: a compiler, a header, a kernel for these shapes. Want of memory is raised:
        it says nothing about them.
        """
        if name == OURS:
            return ours()
        import torch

        try:
            return theirs()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.failed.add(name)
            self.choose.cache_clear()
            warnings.warn(f"{self.plugin}: {name} failed, so our kernel is used from now on ({error})", stacklevel=2)
        return ours()

    def write(self, result: Path) -> None:
        """The file, from a benchmark's result, without kinds that have nothing to choose."""
        measured = json.loads(result.read_text(encoding="utf-8"))
        rows = [
            {key: (measured | row)[key] for key in (*self.same, *self.sizes)} | {"us": self._times(row)}
            for row in measured["rows"]
            if row["plugin"] == self.plugin
        ]
        choices = {tuple(row[key] for key in self.same) for row in rows if len(row["us"]) > 1}
        rows = [row for row in rows if tuple(row[key] for key in self.same) in choices]
        text = json.dumps({"version": 1, "torch": measured["torch"], "rows": rows}, indent=1)
        self.file.write_text(text + "\n", encoding="utf-8")

    def _times(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Cold ones if there are: a layer's weights are not in the L2 when its turn comes."""
        ours, peers = (row["cold_us"], row["peers_cold"]) if "cold_us" in row else (row["ours_us"], row["peers"])
        return {OURS: ours} | {name: peers[name] for name in self.names if name in peers}


def ours_alone() -> bool:
    """Whether the user wants no other implementation than ours."""
    return os.environ.get("R1_PIPELINE_KERNELS") == OURS


@functools.cache
def importable(library: str) -> Any | None:
    """Another library's module, or None: what it needs beside, such as a CUDA toolkit, may not be here."""
    try:
        return importlib.import_module(library) if importlib.util.find_spec(library) else None
    except Exception:  # any: ours does the work then
        return None


def takes(namespace: Any, name: str, count: int) -> bool:
    """Whether there is such an op in `torch.ops.NAMESPACE`, of exactly so many arguments: other versions' have others."""
    op = getattr(namespace, name, None)
    return op is not None and any(len(getattr(op, form)._schema.arguments) == count for form in op.overloads())


def _write(result: Path) -> None:
    """All tables that the result has rows of. (Their class is that of the module `plugins.tactics`, not of `__main__`.)"""
    measured = {row["plugin"] for row in json.loads(result.read_text(encoding="utf-8"))["rows"]}
    for file in sorted(Path(__file__).parent.glob("*/tactics.py")):
        for table in vars(importlib.import_module(f"plugins.{file.parent.name}.tactics")).values():
            if type(table).__name__ == Table.__name__ and table.plugin in measured:
                table.write(result)
                unmeasured = [name for name in table.names if not any(name in row["us"] for row in table.rows)]
                kept = table.file.relative_to(Path(__file__).parent)
                print(f"{kept}: {len(table.rows)} rows", *(f"without {name}" for name in unmeasured), sep=", ")


if __name__ == "__main__":
    _write(Path(sys.argv[1])) if len(sys.argv) == 2 else sys.exit(__doc__)
