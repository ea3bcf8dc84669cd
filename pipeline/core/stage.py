"""What a stage is: declared inputs, config fields, code and toolchain, and one function that fills a folder.

A stage never sees the store or the graph. It gets a `StageContext`, writes into `ctx.out`, and returns.
Everything that can change the bytes it writes is declared on `Stage` and enters its key (see `key.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from pipeline.config.schema import Config

__all__ = ["Determinism", "Need", "Progress", "Stage", "StageContext"]

Determinism = Literal["bitwise", "numeric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A data edge: `path` inside the output of `stage` (the whole output when empty).

    Only the digest of that path enters the key, so a stage that reads `plan/precision.json`
    is not rebuilt when another part of the plan changes.
    """

    stage: str
    path: str = ""


class Progress(Protocol):
    """Where a stage reports to. Implemented by `pipeline.core.events`."""

    def start(self, total: int, unit: str) -> None:
        """Announce `total` units of work (`unit`: "B", "tensors", "tokens", ...)."""

    def advance(self, amount: int = 1) -> None:
        """Report `amount` more units done."""

    def note(self, text: str) -> None:
        """Say one line that the user should read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a running stage may use.

    `inputs` maps each needed stage to its output folder; `checkpoint` is the source checkpoint folder
    (None only for a stage that does not need one).
    `out` is a folder of its own; of a resumable stage it still holds what a killed run left there, and so does `state`,
    beside it, which is not part of the result. `earlier` are results of the same stage, of a stage that reuses their parts.
    """

    config: Config
    inputs: dict[str, Path]
    checkpoint: Path | None
    out: Path
    progress: Progress
    earlier: tuple[Path, ...] = ()

    @property
    def state(self) -> Path:
        """What a resumable stage must remember to go on; `digests.json` in it spares the store from hashing again
        ({path: {"stamp", "facts"}}, see `core/filehash.py`)."""
        return self.out.with_name("state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One node of the build graph."""

    name: str
    version: int
    """Raised by hand when the meaning of the output changes without its code changing."""
    needs: tuple[Need, ...] = ()
    after: tuple[str, ...] = ()
    """Stages that must have succeeded first although nothing of theirs is read (a gate)."""
    config: tuple[str, ...] = ()
    """Dotted config fields or sections that enter the key."""
    reads_checkpoint: Literal["", "headers", "all"] = ""
    """What of the source checkpoint enters the key: nothing, its config.json and the headers of its weights, or all of it."""
    code: tuple[str, ...] = ()
    """Files or folders, relative to the project's code, whose source digest enters the key."""
    code_of: Callable[[Config], tuple[str, ...]] = field(default=lambda config: ())
    """Further ones, by what is configured."""
    toolchain: Callable[[Config], dict[str, str]] = field(default=lambda config: {})
    """Name -> version of what shapes the output. Must not import torch."""
    run: str = ""
    """`module:function`, imported only where the stage runs; called with one `StageContext`."""
    resumable: bool = False
    light: bool = False
    """Takes well under a second and no torch: `explain` runs it in a folder of its own to see what would follow."""
    reuses: bool = False
    """Whether it may take parts that are the same from earlier results of its own (`StageContext.earlier`)."""
    requires: Callable[[Config, Path | None], None] = field(default=lambda config, checkpoint: None)
    """Raises `MissingToolError` where this machine lacks what the stage will need; asked before any stage of a build starts.
    Gets the source checkpoint's folder. Must not import torch."""
    gate: Callable[[Path], None] = field(default=lambda out: None)
    """Raises `GateError` where the stage's own result, in this folder, says that the build must not go on. The result is kept."""
    determinism: Callable[[Config], Determinism] = field(default=lambda config: "bitwise")
    """bitwise: the same key gives the same bytes on the same machine; numeric: the same up to rounding."""
