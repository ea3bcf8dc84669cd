"""The verdict: measured errors against the limits of `verify`, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.verify.weights import TensorError

if TYPE_CHECKING:
    from pipeline.config.schema import VerifyConfig
    from pipeline.verify.logits import LogitsError

__all__ = ["alarms", "below", "failures", "scale_failures", "scale_faults"]


def failures(config: VerifyConfig, errors: Sequence[TensorError], logits: LogitsError | None) -> list[str]:
    """Where the conversion lost more than may be; empty when it may be built into an engine."""
    return [*_weight_failures(config, errors), *_logits_failures(config, logits)]


def alarms(config: VerifyConfig, errors: Sequence[TensorError]) -> list[str]:
    """What is worse than usual, though it passes."""
    found = []
    for key, limit, low, total in below(config.alarm_sqnr_db, errors):
        passing = [error for error in low if error.rank >= config.min_sqnr_db.get(key, float("-inf"))]
        if passing:
            worst = passing[0]
            found.append(
                f"{len(passing)} of {total} {key} tensors lie below verify.alarm_sqnr_db.{key}={limit:g} dB, the worst, "
                f"{worst.name}, at {worst.rank:g} dB: unusual weights, or scales that do not fit them."
            )
    return found


def below(
    limits: Mapping[str, float], errors: Sequence[TensorError]
) -> Iterator[tuple[str, float, list[TensorError], int]]:
    """Limit by limit: its key and value, the tensors below it (worst first), and how many it holds for."""
    for key, limit in sorted(limits.items()):
        mine = [error for error in errors if error.limit_key == key]
        if low := sorted((error for error in mine if error.rank < limit), key=lambda error: (error.rank, error.name)):
            yield key, limit, low, len(mine)


def scale_faults(errors: Sequence[TensorError]) -> list[str]:
    """Scales that runtimes would compute with in silence, a sentence each."""
    return [
        f"{error.name.removesuffix('.weight')}.{suffix} holds a value that is not finite and above 0"
        for error in errors
        for suffix in error.bad_scales
    ]


def scale_failures(errors: Sequence[TensorError]) -> Iterator[str]:
    """What is damaged, in a sentence."""
    if faults := scale_faults(errors):
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        yield f"{faults[0]}{more}; the checkpoint is damaged, convert it again."


def _weight_failures(config: VerifyConfig, errors: Sequence[TensorError]) -> Iterator[str]:
    for key, limit, low, total in below(config.min_sqnr_db, errors):
        worst = low[0]
        yield (
            f"{len(low)} of {total} {key} tensors lie below verify.min_sqnr_db.{key}={limit:g} dB, the worst, "
            f"{worst.name}, at {worst.rank:g} dB; convert again if the checkpoint was altered, keep the class in a wider "
            f"format (quant.{worst.kind}=bf16), or lower the limit."
        )


def _logits_failures(config: VerifyConfig, logits: LogitsError | None) -> Iterator[str]:
    if logits is None:
        return
    way_out = (
        "keep attention, o_proj or shared_experts in a wider format (quant.o_proj=bf16), or everything "
        "(quant.accuracy_sensitive=true, which verify.on_failure=fallback does by itself), or move the limit."
    )
    if not logits.kl <= config.max_kl:
        yield f"Mean KL is {logits.kl:g} nats a token, above verify.max_kl={config.max_kl:g}; {way_out}"
    if not logits.top1 >= config.min_top1:
        yield f"Top-1 agreement is {logits.top1:g}, below verify.min_top1={config.min_top1:g}; {way_out}"
    if not logits.ppl_ratio <= config.max_ppl_ratio:
        yield (
            f"Perplexity rises from {logits.ppl_source:g} to {logits.ppl_converted:g}, {logits.ppl_ratio:g} times, above "
            f"verify.max_ppl_ratio={config.max_ppl_ratio:g}; {way_out}"
        )
