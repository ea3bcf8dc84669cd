"""Every configuration worth asking about: recipe x layout x drafts x requests in flight x tokens a step.

What the user fixed (`parallel.*`, `engine.trtllm.mtp`, `engine.trtllm.moe_backend`, `workload.concurrency`) is fixed, and
`parallel.tp` means one instance where no total is asked for; the rest is tried. Limits of one rank follow from the requests:
max_batch_size is the rank's share, the largest CUDA graph is max_batch_size, and a candidate whose cache does not hold its
requests at full length is left out. Layouts that break a rule (`planner.rules`) never become candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.planner.case import Case
from pipeline.planner.choose import MARGIN_TOKENS, ROOM, fractions, gpu_counts, moe_backend
from pipeline.planner.memory import kv_tokens, tokens_per_block
from pipeline.planner.policy import MOST_RANKS, instances_on, num_gpus
from pipeline.planner.rules import REFUSE, check
from pipeline.planner.rules.engine import CHUNK_SMS
from pipeline.planner.setup import Layout, Setup, divides

__all__ = ["BATCHES", "Candidate", "candidates", "layouts", "on_nodes"]

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, *range(64, 129, 16), *range(160, 257, 32), *range(320, 1025, 64))
"""Requests of one rank that are tried where `workload.concurrency` is open."""
STEPS = (8192, 16384)
"""Tokens a step that are tried beside the least that takes a whole prompt and a full batch."""
DRAFTS = (0, 1, 3)
"""Draft tokens a step that published runs of R1 have."""
CHUNKS = (2048, 4096, 8192)
"""Tokens a step with chunked prefill, which is tried where a prompt is longer."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """`replicas` instances of one setup."""

    recipe: str
    setup: Setup
    nodes: int
    """Nodes that are paid for, idle GPUs and all."""
    paid: int
    """Their GPUs."""
    replicas: int
    concurrency: int
    """Requests in flight over all instances."""
    kv_tokens: int
    """Of one rank."""
    sequences: int
    """Whole requests that one rank's cache holds."""

    @property
    def in_instance(self) -> float:
        """Requests in flight at one instance."""
        return self.concurrency / self.replicas

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.replicas * self.setup.layout.world_size


def candidates(case: Case, nodes: int, bases: Sequence[Setup] | None = None, *, steps: bool = True) -> list[Candidate]:
    """Everything that could work with the formats of `case` on `nodes` nodes; without `steps` the least step alone.

    `bases` are those of `layouts`, where they are known already.
    """
    bases = layouts(case) if bases is None else bases
    return [item for setup in bases for item in _sized(case, setup, nodes, steps)]


def on_nodes(case: Case, item: Candidate, nodes: int) -> Candidate | None:
    """The same instances, with the same load each, as many as `nodes` nodes hold; None where those hold none."""
    replicas = instances_on(case.config, item.setup.layout.world_size, nodes)
    if not replicas:
        return None
    load = round(item.in_instance * replicas)
    return replace(item, nodes=nodes, paid=num_gpus(case.config, nodes), replicas=replicas, concurrency=load)


def layouts(case: Case) -> list[Setup]:
    """Layouts and drafts that no rule refuses, with the least limits."""
    setups = (_setup(case, layout, mtp) for layout in _layouts(case) for mtp in _drafts(case))
    return [setup for setup in setups if not any(finding.level == REFUSE for finding in check(setup))]


def _layouts(case: Case) -> Iterator[Layout]:
    asked = case.config.parallel
    largest = min(num_gpus(case.config) // asked.pp, MOST_RANKS)
    for tp in [asked.tp] if asked.tp else gpu_counts(max(1, largest)):
        modes = (False, True) if asked.attention_dp is None and tp > 1 else (bool(asked.attention_dp) and tp > 1,)
        for adp in modes:
            for ep in [asked.ep] if asked.ep else [size for size in range(1, tp + 1) if tp % size == 0]:
                layout = Layout(tp, ep, adp, asked.pp)
                if divides(case.arch, case.formats, layout):
                    yield layout


def _drafts(case: Case) -> Sequence[int]:
    if case.trtllm.mtp is not None:
        return (case.trtllm.mtp,)
    return DRAFTS if case.arch.num_nextn_predict_layers else (0,)


def _setup(case: Case, layout: Layout, mtp: int) -> Setup:
    """One request a rank."""
    asked = case.config.workload.chunked_prefill
    chunked = bool(asked) or (asked is None and case.longest_prompt > min(CHUNKS))  # the least that a step may be
    return Setup(
        arch=case.arch, hw=case.hw, formats=case.formats, stored_as=case.config.quant.layout, layout=layout,
        model=case.config.model.name, version=case.trtllm.version, kv_format=case.kv_format, fraction=fractions(case)[-1], mtp=mtp,
        moe_backend=moe_backend(case, layout).value, max_batch_size=1,
        max_num_tokens=min(CHUNKS) if chunked else _round_up(case.longest_prompt + 1 + mtp, 64), chunked_prefill=chunked,
        max_seq_len=min(case.longest + MARGIN_TOKENS, case.arch.max_position_embeddings),
        isl=case.isl, osl=case.osl, given=case.given, **case.engine_limits,
    )  # fmt: skip


def _sized(case: Case, base: Setup, nodes: int, steps: bool) -> list[Candidate]:
    """`base` with every batch and step that its cache has room for."""
    replicas = instances_on(case.config, base.layout.world_size, nodes)
    replicas = min(replicas, case.concurrency or replicas)
    if not replicas:
        return []
    ranks, paid = replicas * base.layout.cache_ranks, num_gpus(case.config, nodes)
    batches = (math.ceil(case.concurrency / ranks),) if case.concurrency else BATCHES
    batch, tokens, chunked = np.array([(batch, *step) for batch in batches for step in _steps(case, base, batch, steps)]).T
    found: dict[int, Candidate] = {}
    for fraction in fractions(case):
        setup = replace(base, fraction=fraction)
        cached, held = _room(setup, batch, tokens)
        for index in np.flatnonzero(held >= batch):
            if index not in found:
                b, limits = int(batch[index]), {"max_batch_size": int(batch[index]), "max_num_tokens": int(tokens[index])}
                limits |= {"chunked_prefill": bool(chunked[index]), "concurrency": _share(case, replicas, ranks, b)}
                sized = replace(setup, **limits)
                load = case.concurrency or b * ranks
                room = int(cached[index]), int(held[index])
                found[int(index)] = Candidate(case.recipe, sized, nodes, paid, replicas, load, *room)
    return [found[index] for index in sorted(found)]


def _room(setup: Setup, batch: Ints, tokens: Ints) -> tuple[Ints, Ints]:
    """Tokens, and whole requests, that one rank's cache holds at each of the limits."""
    cached = np.broadcast_to(kv_tokens(setup, max_num_tokens=tokens, max_batch_size=batch), batch.shape).astype(np.int64)
    block = tokens_per_block(setup.arch, setup.hw.sm or 0)
    return cached, cached // (math.ceil((setup.isl + setup.osl + setup.mtp) / block) * block)


def _share(case: Case, replicas: int, ranks: int, batch: int) -> int:
    """Requests in flight at one instance."""
    return math.ceil(case.concurrency / replicas) if case.concurrency else batch * ranks // replicas


def _steps(case: Case, base: Setup, batch: int, every: bool) -> list[tuple[int, bool]]:
    """Tokens a step, and whether they hold a part of a prompt only; not `every` one: the least and the last."""
    asked, decoding = case.config.workload.chunked_prefill, batch * (1 + base.mtp)
    least = _round_up(case.longest_prompt + decoding + ROOM, 64)
    steps = [] if asked else [(size, False) for size in sorted({least, *(size for size in STEPS if size > least)})]
    if asked or (asked is None and case.hw.sm in CHUNK_SMS):
        sizes = sorted({max(size, _round_up(decoding, 64)) for size in CHUNKS})
        steps += [(size, True) for size in sizes if asked or size < least]
    return steps if every else steps[:1] + (steps[-1:] if len(steps) > 1 and steps[-1][1] else [])


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
