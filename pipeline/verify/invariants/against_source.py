"""What only a comparison with the source shows: parameters lost, codes taken for weights, scales that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.inspect.contents import Contents, Module
from pipeline.verify.gate import below
from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Fault, Rule, Subject
from pipeline.verify.weights import TensorError

__all__ = ["RULES"]

RAW = 20.0
"""Relative L2 error beyond which weights are not rounded but something else: codes of FP8 are hundreds of times larger."""
UNTOUCHED = frozenset({"embed", "lm_head", "norm", "router"})
"""Classes that no recipe quantises."""


def _lost(subject: Subject) -> Iterator[Fault]:
    theirs = _weights(subject.contents)
    for name in _weights(subject.source) if subject.source else ():
        if name not in theirs and f"{name}.weight" not in subject.contents.lost:
            yield Fault(name, f"{name} is in the source, but not here")


def _invented(subject: Subject) -> Iterator[Fault]:
    ours = _weights(subject.source) if subject.source else {}
    for name in _weights(subject.contents) if subject.source else ():
        if name not in ours:
            yield Fault(name, f"{name} is here, but not in the source")


def _raw_codes(subject: Subject) -> Iterator[Fault]:
    for error in subject.errors:
        if error.relative_l2 is not None and error.relative_l2 > RAW:
            yield Fault(error.name, f"{error.name} is off by {error.relative_l2:,.0f} times its own norm")


def _not_finite(subject: Subject) -> Iterator[Fault]:
    for error in subject.errors:
        if error.relative_l2 is None and error.sqnr_db is not None:
            yield Fault(error.name, f"{error.name} decodes to NaN or infinity, or to something where the source is 0")


def _clipped(subject: Subject) -> Iterator[Fault]:
    for error in subject.errors:
        if error.clipped > 0:
            fact = f"{error.name} has {error.clipped:.4%} of its weights beyond the largest number that its scale allows"
            yield Fault(error.name, fact)


def _low(subject: Subject) -> Iterator[Fault]:
    if subject.limits:
        yield from _below(subject, subject.limits.min_sqnr_db)


def _alarm(subject: Subject) -> Iterator[Fault]:
    if subject.limits:
        told = {fault.tensor for fault in _low(subject)}
        yield from (fault for fault in _below(subject, subject.limits.alarm_sqnr_db) if fault.tensor not in told)


def _changed(subject: Subject) -> Iterator[Fault]:
    for error in subject.errors:
        if error.kind in UNTOUCHED and error.sqnr_db is not None:
            yield Fault(error.name, f"{error.name} differs from the source by {error.sqnr_db:g} dB")


def _uncompared(subject: Subject) -> Iterator[Fault]:
    if subject.uncompared:
        yield Fault("", f"No weight was compared with the source, {subject.uncompared}")


def _cut_off(subject: Subject) -> Iterator[Fault]:
    for name in subject.cut_off:
        yield Fault(name, f"{name} was not compared, for the source's file ends before it does")


def _below(subject: Subject, limits: Mapping[str, float]) -> Iterator[Fault]:
    measurable = [error for error in subject.errors if not _otherwise_told(error)]
    for key, limit, low, _ in below(limits, measurable):
        for error in low:
            fact = f"{error.name} ({error.format}) has an SQNR of {error.rank:g} dB, {key} should have {limit:g}"
            yield Fault(error.name, fact)


def _otherwise_told(error: TensorError) -> bool:
    return error.relative_l2 is None or error.relative_l2 > RAW or (error.kind in UNTOUCHED and error.format == error.source)


def _weights(contents: Contents) -> dict[str, Module]:
    """Modules that are more than scales."""
    return {name: module for name, module in contents.modules.items() if module.shape}


RULES = (
    Rule(
        "lost-parameter", ERROR, _lost, "loaders stop, or start it at random",
        "copy it from the source; count tensors in and out (MTP layers and aliased tensors are the usual losses)",
    ),
    Rule("invented-parameter", WARNING, _invented, "loaders stop at a name that they do not know, or drop it", "remove the tensor"),
    Rule(
        "raw-codes", ERROR, _raw_codes,
        "codes of the source were quantised as if they were weights, or their scales were dropped (a scale in another shard is the "
        "usual cause)",
        "quantise the layer again from a source that is dequantised with its scales, wherever they lie",
    ),
    Rule("not-finite", ERROR, _not_finite, "every prompt that reaches it gives NaN", "quantise the layer again"),
    Rule(
        "clipped-weights", ERROR, _clipped, "the largest weights, which matter most, are cut off (the amax of one shard was used)",
        "quantise the layer again with the amax of the whole tensor, and of its fused partner",
    ),
    Rule(
        "low-sqnr", ERROR, _low, "a global scale that is wrong by 1.25 leaves about 11.5 dB, a missing one far less",
        "quantise the layer again; keep it in a wider format if its weights are unusual",
    ),
    Rule(
        "unusual-sqnr", WARNING, _alarm, "normal weights lose less in this format",
        "look at the heat map; search block scales, or keep the layer in a wider format",
    ),
    Rule(
        "changed-parameter", WARNING, _changed, "embeddings, norms, router and head are copied by every recipe",
        "copy the tensor from the source, in its own type",
    ),
    Rule(
        "not-compared", NOTE, _uncompared, "only the checkpoint's own consistency was checked",
        "give the folder of its source as checkpoint=DIR",
    ),
    Rule(
        "damaged-source", ERROR, _cut_off, "the comparison that was asked for was made in part only",
        "download the source's file again, and compare again",
    ),
)  # fmt: skip
