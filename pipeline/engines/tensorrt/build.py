"""Builds the engines of `engine=tensorrt`: compares the networks with the reference, builds each in a process of its own.

Files: `engines/NAME.engine`, one a rank, form and segment, and `engines/NAME.layers.txt`, its network; `weights/rankN.safetensors`
where weights are inputs; `engine.json` with all that a runtime has to bind; the tokenizer's and generation's files.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Checkpoint
from pipeline.core.errors import ConfigError, StageError
from pipeline.core.jsonio import read_json, write_json
from pipeline.core.stage import StageContext
from pipeline.engines.companions import copy_companions, eos_token_ids
from pipeline.engines.tensorrt.library import installed_version
from pipeline.engines.tensorrt.memory import peak, refuse_small, stored_in, too_large_to_compare
from pipeline.engines.tensorrt.network.collectives import refuse_unlike
from pipeline.engines.tensorrt.network.linear import BUILT_AS
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.networks import name_of, networks
from pipeline.engines.tensorrt.plan_file import check_header
from pipeline.engines.tensorrt.process import run_task, short_name
from pipeline.engines.tensorrt.targets import resolve, unsupported
from pipeline.engines.tensorrt.worker import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.schema import TensorrtEngineConfig

__all__ = ["build"]


def build(ctx: StageContext) -> None:
    """Fill `ctx.out` from convert's checkpoint and `engine.tensorrt`."""
    source = ctx.inputs["convert"]
    with tempfile.TemporaryDirectory(prefix=".build-", dir=ctx.out.absolute()) as folder, short_name(Path(folder)) as scratch:
        (scratch / "checkpoint").symlink_to(source.absolute())
        work = _Work.of(ctx, scratch)
        if tight := refuse_small(work.stored, work.specs, work.settings.weights):
            ctx.progress.note(tight)
        compared = work.compare()
        engines = work.engines(compared["fingerprints"])
        weights = work.weights() if work.settings.weights == "inputs" else {}
    write_json(ctx.out / "engine.json", _describe(work, engines, weights, compared))
    copy_companions(source, ctx.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One build."""

    ctx: StageContext
    checkpoint: Checkpoint
    library: str
    targets: tuple[int, ...]
    specs: dict[str, Spec]
    """By the names of their engines."""
    stored: dict[str, dict[str, float]]
    """Bytes of each one's weights, by what they are held as."""
    scratch: Path

    @classmethod
    def of(cls, ctx: StageContext, scratch: Path) -> _Work:
        """Refuse what the checkpoint's formats rule out, before anything is built."""
        checkpoint = Checkpoint.open(ctx.inputs["convert"])
        library, targets = resolve(ctx.config)
        specs = {name_of(spec): spec for spec in networks(ctx.config, checkpoint.arch)}
        formats = {entry.format.name for entry in checkpoint.entries.values()}
        if problems := unsupported(targets, formats, next(iter(specs.values())).dtype):
            raise ConfigError("\n".join(problems))
        stored = stored_in(checkpoint.entries.values(), specs)
        return cls(
            ctx=ctx, checkpoint=checkpoint, library=library, targets=targets, specs=specs, stored=stored, scratch=scratch
        )  # fmt: skip

    @property
    def settings(self) -> TensorrtEngineConfig:
        assert self.ctx.config.engine.tensorrt is not None
        return self.ctx.config.engine.tensorrt

    def run(self, module: str, name: str, **task: Any) -> dict[str, Any]:
        """A task of `worker.py` or `agreement.py`."""
        request = {
            "name": name, "checkpoint": "checkpoint", "library": self.library, "targets": list(self.targets),
            "weights": self.settings.weights, **task,
        }  # fmt: skip
        return run_task(module, request, self.scratch, self.ctx.progress)

    def compare(self) -> dict[str, Any]:
        """The agreement table; empty, with the reason, where there is none."""
        if why := self._not_compared():
            self.ctx.progress.note(f"networks not compared with the reference: {why}")
            return {"agreement": [], "fingerprints": {}, "not_compared": why}
        self.ctx.progress.note(f"interpreting {len(self.specs)} networks")
        count = min(self.settings.check_tokens, self.settings.max_seq_len, 2 * self.settings.prefill_chunk)
        found = self.run("agreement", "agreement", specs={name: spec.plain() for name, spec in self.specs.items()}, tokens=count)
        for row in found["agreement"]:
            self.ctx.progress.note(
                f"{row['what']}, {row['activations']}: KL {row['mean_kl']:.1e} nats, top-1 {row['top1']:.1%}, "
                f"logits within {row['max_abs']:.1e}"
            )
        return found

    def _not_compared(self) -> str:
        size = sum(prod(entry.shape) for entry in self.checkpoint.entries.values())
        if self.settings.check_tokens < 4:
            return f"engine.tensorrt.check_tokens={self.settings.check_tokens}"
        if why := too_large_to_compare(size):
            return why
        return "" if find_spec("torch") else "torch, which the reference needs, is not installed"

    def engines(self, fingerprints: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Every engine, one after the other: two would need twice the memory. In one process where weights are inputs, which takes
        little; else each in its own."""
        (self.ctx.out / "engines").mkdir()
        self.ctx.progress.start(100 * len(self.specs), "steps")
        built: dict[str, dict[str, Any]] = {}
        for names in [list(self.specs)] if self.settings.weights == "inputs" else [[name] for name in self.specs]:
            tables = {name: self.specs[name].plain() for name in names}
            made = self.run("worker", names[0], task="build", specs=tables, earlier=self._earlier())["built"]
            built |= {name: self._placed(name, made[name], fingerprints.get(name)) for name in names}
            self._refuse_unlike_ranks(built)
        return built

    def _earlier(self) -> dict[str, str]:
        """Network -> its engine among earlier results: without weights inside, the same serves another checkpoint of this shape."""
        if self.settings.weights != "inputs":
            return {}
        same = {"kind": "tensorrt", "weights": "inputs", "library": self.library, "version": installed_version(self.library),
                "targets": [f"SM{sm}" for sm in self.targets]}  # fmt: skip
        found = {}
        for folder in reversed(self.ctx.earlier):
            info = read_json(folder / "engine.json")
            if all(info.get(key) == value for key, value in same.items()):
                found |= {engine["network"]: str(folder / engine["file"]) for engine in info["engines"].values()}
        return found

    def _refuse_unlike_ranks(self, built: Mapping[str, Mapping[str, Any]]) -> None:
        """What ranks exchange in networks of the same part must be the same; TensorRT does not look."""
        parts: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name, facts in built.items():
            parts.setdefault(name.partition("_")[2], {})[name] = facts["collectives"]
        for ranks in parts.values():
            refuse_unlike(ranks)

    def _placed(self, name: str, made: dict[str, Any], fingerprint: str | None) -> dict[str, Any]:
        """Put a built engine where it belongs; what engine.json says of it."""
        facts, file = made["facts"], f"engines/{made['engine']}.engine"
        if fingerprint and self.settings.weights != "inputs" and facts["network"] != fingerprint:
            raise StageError(f"{name} was interpreted as another network than was built: report it with the checkpoint's formats.")
        if made["engine"] == name:
            for suffix in (".engine", ".layers.txt"):
                os.replace(self.scratch / f"{name}{suffix}", self.ctx.out / "engines" / f"{name}{suffix}")
            if self.library == "tensorrt_rtx":
                check_header(self.ctx.out / file, self.targets)
        how = f"{facts['bytes'] / 1e6:,.1f} MB in {made['seconds']:.1f} s" if made["engine"] == name else f"as {made['engine']}"
        how = f"{facts['bytes'] / 1e6:,.1f} MB, as built before" if made["reused"] else how
        spec, sent = self.specs[name], self.specs[name].sent_per_token
        wire = f", {sent:,} bytes a token to other ranks" if sent else ""
        predicted = peak(self.stored[name], len(self.specs[name].layers), self.settings.weights)
        memory = f"peak {made['peak_bytes'] / 1e9:.2f} GB ({predicted / 1e9:.2f} predicted)"
        self.ctx.progress.note(f"{name}: {facts['layers']} layers, {how}, {memory}{wire}")
        return {"file": file} | spec.plain() | facts | ({"sent_bytes_per_token": sent} if sent else {})

    def weights(self) -> dict[str, Any]:
        """One file a rank, shared by its engines."""
        (self.ctx.out / "weights").mkdir()
        written = {}
        for rank in sorted({spec.rank for spec in self.specs.values()}):
            tables = [spec.plain() for spec in self.specs.values() if spec.rank == rank]
            name = f"weights/rank{rank}.safetensors"
            written[name] = self.run("worker", f"weights of rank {rank}", task="weights", specs=tables)["facts"]
            os.replace(self.scratch / WEIGHTS, self.ctx.out / name)
        return written


def _describe(work: _Work, engines: dict[str, Any], weights: dict[str, Any], compared: dict[str, Any]) -> dict[str, Any]:
    """engine.json."""
    settings, arch, spec = work.settings, work.checkpoint.arch, next(iter(work.specs.values()))
    formats = sorted({name for engine in engines.values() for name in engine["formats"]})
    targets, interpreted = [f"SM{sm}" for sm in work.targets], " and interpreted in numpy" if compared["agreement"] else ""
    return {
        "kind": "tensorrt", "library": work.library, "version": installed_version(work.library), "targets": targets,
        "ranks": spec.ranks, "parallel": spec.parallel, "dtype": spec.dtype, "weights": settings.weights, "weight_files": weights,
        "computed_as": {name: BUILT_AS[name] for name in formats}, "expanded_from": settings.expanded_from,
        "max_batch_size": settings.max_batch_size, "max_seq_len": settings.max_seq_len, "prefill_batch": settings.prefill_batch,
        "prefill_chunk": min(settings.prefill_chunk, settings.max_seq_len), "num_layers": arch.num_hidden_layers,
        "latent_dim": arch.latent_dim, "hidden_size": arch.hidden_size, "vocab_size": arch.vocab_size, "mtp": spec.mtp,
        "bos_token_id": arch.bos_token_id, "eos_token_ids": eos_token_ids(arch, work.ctx.inputs["convert"]),
        "engines": engines, "agreement": compared["agreement"], "not_compared": compared.get("not_compared"),
        "not_run": f"built for {', '.join(targets)}{interpreted}; no engine was run on a GPU.",
    }  # fmt: skip
