"""The nearest request that works: as few of the user's own settings as possible are taken back, and the result is checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.config.schema import Config
from pipeline.planner.case import Case
from pipeline.planner.choose import choose
from pipeline.planner.policy import precision_of, recipe
from pipeline.planner.rules import REFUSE, Finding, check

__all__ = ["nearest"]

MOST_EDITS = 5


def nearest(case: Case) -> str:
    """One sentence: the settings to give instead, and the layout that follows."""
    edits, refused = [], _refusals(case)
    while refused and len(edits) < MOST_EDITS:
        options = [(len(_refusals(tried)), text, tried) for text, tried in _edits(case)]
        count, text, tried = min(options, key=lambda option: option[0])
        if count >= len(refused):
            break
        case = tried
        edits.append(text)
        refused = _refusals(case)
    if refused:
        return "No nearby configuration of this model works on this hardware: see the reasons above."
    return f"Nearest that works: {' '.join(edits)} ({choose(case).layout})."


def _refusals(case: Case) -> list[Finding]:
    return [finding for finding in check(choose(case).setup) if finding.level == REFUSE]


def _edits(case: Case) -> Iterator[tuple[str, Case]]:
    """Single steps back, the least surprising first."""
    config = case.config
    steps: tuple[tuple[str, str, Any], ...] = (
        ("engine.trtllm", "moe_backend", "auto"),
        ("engine.trtllm", "version", "1.2"),
        ("engine.trtllm", "mtp", None),
        ("parallel", "ep", None),
        ("parallel", "attention_dp", None),
        ("parallel", "pp", 1),
        ("parallel", "tp", None),
        ("engine.trtllm", "free_gpu_memory_fraction", None),
        ("quant", "kv_dtype", "fp8"),
    )
    for section, name, value in steps:
        if getattr(_section(config, section), name) != value:
            shown = "null" if value is None else value
            yield f"{section}.{name}={shown}", _with_config(case, _replaced(config, section, name, value))
    yield from _shorter(case)
    for name in ("fp8_block", "nvfp4"):
        if config.quant.name != name:
            yield f"quant={name}", _with_config(case, replace(config, quant=recipe(name)))
    for nodes in (2, 4):
        yield f"hw.num_nodes={nodes}", _with_config(case, _replaced(config, "hw", "num_nodes", nodes))


def _shorter(case: Case) -> Iterator[tuple[str, Case]]:
    limit = case.arch.max_position_embeddings
    if case.isl + case.osl > limit:
        osl = min(case.osl, limit // 2)
        yield f"workload.isl={limit - osl} workload.osl={osl}", replace(case, isl=limit - osl, osl=osl)
    held = _held(case)
    if case.concurrency and 1 <= held < case.concurrency:
        yield f"workload.concurrency={held}", replace(case, concurrency=held)


def _held(case: Case) -> int:
    """Requests that fit at once: fewer of them may mean other drafts, which take memory, so it is asked until it settles."""
    held = case.concurrency or 0
    for _ in range(MOST_EDITS):
        choice = choose(replace(case, concurrency=held)) if held else None
        fit = min(choice.capacity, choice.setup.max_batch_size * choice.layout.cache_ranks) if choice else 0
        if fit >= held:
            break
        held = fit
    return held


def _with_config(case: Case, config: Config) -> Case:
    precision = precision_of(config, case.arch)
    return replace(case, config=config, recipe=precision.recipe, formats=precision.formats, kv_format=precision.kv_format)


def _section(config: Config, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _replaced(config: Config, path: str, name: str, value: Any) -> Config:
    head, _, rest = path.partition(".")
    inner = getattr(config, head)
    changed = _replaced(inner, rest, name, value) if rest else replace(inner, **{name: value})
    return replace(config, **{head: changed})
