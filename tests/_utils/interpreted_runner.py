"""STAND-IN for GPUs: runners for `triton_repo/tensorrt/1` that interpret the networks instead of running engines.

`InterpretedRanks` has all ranks in this process, a thread each. `write_runner` writes a `tensorrt_runner.py` that interprets, so
that a packaged repository is served with a process a rank, which meet through gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint import Checkpoint
from pipeline.engines.tensorrt.interpreter import Exchange, Interpreter, exchanged
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.worker import network

ROOT = Path(__file__).parents[2]
MODEL_CODE = ROOT / "triton_repo" / "tensorrt" / "1"
if str(MODEL_CODE) not in sys.path:
    sys.path.append(str(MODEL_CODE))

from runner import Runner, Step  # noqa: E402

__all__ = ["InterpretedRanks", "InterpretedRunner", "write_runner"]

Meet = Callable[[Exchange], Sequence[Exchange]]
OF_SPEC = [field.name for field in fields(Spec) if field.name != "arch"]


class InterpretedRunner(Runner):
    """The caches of all rows, and an interpreter for each network of the rank; `info` is engine.json."""

    def __init__(self, info: dict[str, Any], checkpoint: Path, scratch: Path, rank: int = 0, meet: Meet | None = None) -> None:
        super().__init__(info, "cpu")
        opened = Checkpoint.open(checkpoint)
        tables = [
            {name: each[name] for name in OF_SPEC} for each in info["engines"].values() if each["rank"] == rank
        ]  # fmt: skip
        self._nets = {
            (table["form"], table["first_layer"] > 0): Interpreter(network(opened, "tensorrt_rtx", table, scratch)[0])
            for table in tables
        }  # fmt: skip
        shape = (self.cache_rows, 1, info["max_seq_len"], info["latent_dim"])
        self._caches = {f"cache.{number}": np.zeros(shape, np.float32) for number in range(info["num_layers"] + self.drafts)}
        self._rank, self.meet = rank, meet
        self.steps: list[tuple[str, tuple[int, ...]]] = []

    def compute(self, form: str, rows: slice, tokens: Tensor, starts: Tensor, wanted: Tensor, hidden: Tensor | None = None
                ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """See `Runner`; writes the caches in place, as an engine does."""
        assert {tokens.dtype, starts.dtype, wanted.dtype} == {torch.int32}
        self.steps.append((form, tuple(tokens.shape)))
        positions = (starts[:, None] + torch.arange(tokens.shape[1])).to(torch.int32)
        feeds = {name: cache[rows] for name, cache in self._caches.items()} | {
            "tokens": tokens.numpy(), "starts": starts.numpy(), "positions": positions.numpy(), "logit_rows": wanted.numpy(),
            "keys": np.array([int(starts.max()) + tokens.shape[1]]), "hidden": None if hidden is None else hidden.numpy(),
        }  # fmt: skip
        outputs = self._run(self._nets[form, hidden is not None], feeds)
        for name, value in outputs.items():
            if name.startswith("present."):
                self._caches[name.replace("present", "cache")][rows] = value
        if "dropped" in outputs:
            self.limited = True
            self.dropped += torch.from_numpy(outputs["dropped"])
        return torch.from_numpy(outputs["logits"]), torch.from_numpy(outputs["states"]) if "states" in outputs else None

    def _run(self, network: Interpreter, feeds: dict[str, Any]) -> dict[str, Any]:
        running, answer = network.steps(feeds), None
        while True:
            try:
                asked = running.send(answer)  # type: ignore[arg-type]
            except StopIteration as stop:
                return stop.value
            assert self.meet is not None
            answer = exchanged(self.meet(asked), self._rank)


class InterpretedRanks:
    """All ranks, a thread each."""

    def __init__(self, info: dict[str, Any], checkpoint: Path, scratch: Path) -> None:
        count = info["ranks"]
        barrier, asked = Barrier(count), [None] * count

        def meeting(rank: int) -> Meet:
            def meet(mine: Exchange) -> Sequence[Exchange]:
                asked[rank] = mine  # type: ignore[call-overload]
                barrier.wait(300)
                together = list(asked)
                barrier.wait(300)  # nobody writes the next one before all have read
                return together  # type: ignore[return-value]

            return meet

        self.runners = [InterpretedRunner(info, checkpoint, scratch, rank, meeting(rank)) for rank in range(count)]
        self._pool = ThreadPoolExecutor(count)

    def run(self, steps: list[Step]) -> list[tuple[Tensor, ...]]:
        """See `runtime.Ranks`."""
        return list(self._pool.map(lambda each: each[0].run(each[1]), zip(self.runners, steps, strict=True)))


def gloo_runner(info: dict[str, Any], checkpoint: str, rank: int) -> Any:
    """A rank in a process of its own."""
    import tempfile

    import torch.distributed as dist

    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp())

    class GlooRunner(InterpretedRunner):
        def join(self, meeting: Path) -> None:
            dist.init_process_group("gloo", init_method=f"file://{meeting / 'store'}", rank=rank, world_size=info["ranks"])
            dist.barrier()
            self.meet = together

    def together(mine: Exchange) -> Sequence[Exchange]:
        everyone: list[Any] = [None] * info["ranks"]
        dist.all_gather_object(everyone, mine)
        return everyone

    return GlooRunner(info, Path(checkpoint), scratch, rank)


def write_runner(version: Path, checkpoint: Path) -> None:
    """Put the stand-in into a packaged model's version folder."""
    (version / "tensorrt_runner.py").unlink()
    (version / "tensorrt_runner.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from tests._utils.interpreted_runner import gloo_runner\n\n"
        "def TensorrtRunner(info, folder, rank):\n"
        f"    return gloo_runner(info, {str(checkpoint)!r}, rank)\n\n"
        "def check_machine(info):\n    pass\n"
    )
