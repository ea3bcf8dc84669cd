"""Compares the networks, interpreted, with the reference model: `python -m pipeline.engines.tensorrt.agreement REQUEST`.

Prefill goes through the expanded form, then one token at a time through the absorbed one, over the cache that prefill wrote; each
rank has sequences of its own under attention data parallelism. Every figure is of logits against the reference in float32 on the
converted weights, its activations quantised where the network's are. Twice: the same definition with activations in float32, where
only an error of the definition can show, and the networks that are built, with every tensor rounded to its type.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import Checkpoint
from pipeline.core.errors import StageError
from pipeline.core.events import EventWriter
from pipeline.engines.tensorrt.builder import fingerprint
from pipeline.engines.tensorrt.graph import Graph
from pipeline.engines.tensorrt.interpreter import Interpreter, run_ranks
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.session import Session
from pipeline.engines.tensorrt.worker import network
from pipeline.formats.numerics import Array

__all__ = ["LIMIT_KL", "Comparison", "compare"]

LIMIT_KL = 1e-2
"""Nats a token with float32 activations. Measured on tiny_r1: 1e-11 where activations are not quantised; where they are, 1e-6 to
3e-3, as much as the reference differs from itself when its embedding is changed by 1e-6: roundings fall on the other side."""
ROWS = 2
"""Sequences of each rank."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How near logits [N, V] are to the reference's."""

    what: str
    activations: str
    tokens: int
    max_abs: float
    mean_kl: float
    top1: float

    def plain(self) -> dict[str, Any]:
        """For a report; three digits are what rounding leaves."""
        return {
            "what": self.what, "activations": self.activations, "tokens": self.tokens, "max_abs": float(f"{self.max_abs:.2e}"),
            "mean_kl": float(f"{self.mean_kl:.2e}"), "top1": round(self.top1, 4),
        }  # fmt: skip


def compare(what: str, activations: str, found: Array, expected: Array) -> Comparison:
    """Logits [..., V] of both."""
    found, expected = (value.reshape(-1, value.shape[-1]).astype(np.float64) for value in (found, expected))
    ours, theirs = _log_softmax(found), _log_softmax(expected)
    kl = (np.exp(theirs) * (theirs - ours)).sum(-1).mean()
    top1 = (found.argmax(-1) == expected.argmax(-1)).mean()
    return Comparison(what, activations, len(found), float(np.abs(found - expected).max()), float(kl), float(top1))


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Networks:
    """All networks of a deployment, interpreted."""

    def __init__(self, checkpoint: Checkpoint, library: str, tables: dict[str, dict[str, Any]], scratch: Path) -> None:
        self.specs = {name: Spec(arch=checkpoint.arch, **table) for name, table in tables.items()}
        self._nets: dict[str, Graph] = {name: network(checkpoint, library, table, scratch)[0] for name, table in tables.items()}

    def session(self) -> Session:
        """Sequences over them."""
        interpreters = {name: Interpreter(net) for name, net in self._nets.items()}
        return Session(self.specs, lambda names, feeds: run_ranks([interpreters[name] for name in names], feeds), ROWS)

    def fingerprints(self) -> dict[str, str]:
        """Network -> what it is; the builder's must be the same."""
        return {name: fingerprint(net) for name, net in self._nets.items()}


def _sequences(model: Any, spec: Spec, count: int) -> tuple[Array, int]:
    """Token ids [R, ROWS, count] and how many are a random prompt; the rest is what the reference says next, greedily."""
    import torch

    distinct = spec.ranks if spec.parallel == "adp" else 1
    prompt = count // 2
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, spec.arch.vocab_size, (distinct * ROWS, prompt), generator=random)
    while tokens.shape[1] < count:
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    ids = tokens.numpy().reshape(distinct, ROWS, count)
    return np.broadcast_to(ids, (spec.ranks, ROWS, count)), prompt


def _run(session: Session, ids: Array, prompt: int) -> tuple[Array, Array, Array]:
    """Logits of prefill [R, B, prompt, V], of decode [R, B, rest, V], and all hidden states."""
    ranks, rows, count = ids.shape
    prefill, hidden = session.step("expanded", ids[..., :prompt], np.zeros((ranks, rows), np.int64))
    steps = [session.step("absorbed", ids[..., at : at + 1], np.full((ranks, rows), at)) for at in range(prompt, count)]
    hidden = np.concatenate([hidden, *(state for _, state in steps)], axis=2)
    return prefill, np.concatenate([logits for logits, _ in steps], axis=2), hidden


def agreement(networks: Networks, model: Any, count: int) -> list[Comparison]:
    """Every comparison of these networks."""
    import torch

    spec = next(iter(networks.specs.values()))
    ids, prompt = _sequences(model, spec, count)
    flat = torch.from_numpy(ids.reshape(-1, count).copy())
    states = model.hidden(flat)
    expected = model.lm_head(states).numpy().reshape(*ids.shape, -1)
    session = networks.session()
    prefill, decode, hidden = _run(session, ids, prompt)
    found = [
        compare("prefill, expanded form", spec.dtype, prefill, expected[:, :, :prompt]),
        compare("decode, absorbed form, token by token", spec.dtype, decode, expected[:, :, prompt:]),
    ]
    if spec.mtp:
        drafted = session.draft("expanded", ids[..., 1:], hidden[:, :, :-1], np.zeros(ids.shape[:2], np.int64))
        wanted = model.mtp_logits(flat, states).numpy().reshape(*ids.shape[:2], count - 1, -1)
        found.append(compare("draft, MTP layer", spec.dtype, drafted, wanted))
    return found


def refuse_disagreement(found: list[Comparison]) -> None:
    """The definition is wrong where float32 activations disagree; rounded ones must at least give numbers."""
    for item in found:
        if not item.mean_kl <= (LIMIT_KL if item.activations == "float32" else float("inf")):
            raise StageError(
                f"The network does not compute the model: {item.what} is {item.mean_kl:.2g} nats a token from the reference, above "
                f"{LIMIT_KL:g}, with activations in {item.activations}. Nothing is built: raise engine.tensorrt.moe_capacity or "
                "exchange_share where they leave tokens out; else report it with the checkpoint's formats."
            )


def _work(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    from pipeline.engines.tensorrt.reference import reference

    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(folder / request["checkpoint"])
    built = request["specs"]
    wide = {name: table | {"dtype": "float32"} for name, table in built.items()}
    found: list[Comparison] = []
    with torch.inference_mode():
        first = next(iter(built.values()))
        model = reference(checkpoint, travel=first["gather"] if first["ranks"] > 1 else "bf16")
        for tables in (wide, built) if wide != built else (built,):
            networks = Networks(checkpoint, request["library"], tables, folder)
            found += agreement(networks, model, request["tokens"])
            refuse_disagreement(found)
    return {"agreement": [item.plain() for item in found], "fingerprints": networks.fingerprints()}


def main(request_file: Path) -> int:
    """Print the table as a `done` event."""
    events = EventWriter(sys.stdout)
    try:
        events.send(event="done", **_work(json.loads(request_file.read_text(encoding="utf-8")), request_file.parent))
    except StageError as error:
        events.send(event="error", text=str(error))
        return StageError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
