"""Which networks a deployment is made of: two forms, segments of layers, the MTP layer, and all of that for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from pipeline.core.errors import ConfigError
from pipeline.engines.tensorrt.network.spec import FORMS, FP4_BLOCK, Exchange, Parallel, Payload, Spec
from pipeline.engines.tensorrt.targets import moe_lowering, plugins_for, resolve
from pipeline.models.arch import Arch

if TYPE_CHECKING:
    from pipeline.config.schema import Config

__all__ = ["layout_of", "name_of", "networks", "refuse_impossible"]


def layout_of(config: Config) -> tuple[int, Parallel]:
    """Ranks, and how they share attention: `parallel.tp`, or one; attention data parallelism unless it is switched off."""
    return config.parallel.tp or 1, "tp" if config.parallel.attention_dp is False else "adp"


def refuse_impossible(config: Config, arch: Arch) -> list[str]:
    """A sentence for everything that cannot be built, whatever the weights are."""
    settings, problems = config.engine.tensorrt, []
    assert settings is not None
    ranks, parallel = layout_of(config)
    if arch.n_routed_experts % ranks:
        problems.append(f"{arch.n_routed_experts} experts do not spread over parallel.tp={ranks} ranks: choose a divisor.")
    if parallel == "tp" and arch.num_attention_heads % ranks:
        problems.append(f"{arch.num_attention_heads} heads do not spread over parallel.tp={ranks} ranks: choose a divisor.")
    if config.parallel.ep not in (None, ranks) or config.parallel.pp > 1:
        problems.append(
            f"The TensorRT engine spreads experts over all ranks: set parallel.ep={ranks} and parallel.pp=1, or leave them out."
        )
    if parallel == "tp" and (settings.exchange, settings.gather) != ("gather", "bf16"):
        problems.append(
            "engine.tensorrt.exchange and engine.tensorrt.gather are for tokens that ranks have apart; with parallel.attention_dp="
            "false all ranks have all tokens: leave them out, or set parallel.attention_dp=true."
        )
    if settings.gather == "fp4" and arch.hidden_size % FP4_BLOCK:
        problems.append(f"engine.tensorrt.gather=fp4 needs a hidden size of whole blocks of {FP4_BLOCK}, not {arch.hidden_size}.")
    if settings.max_seq_len > arch.max_position_embeddings:
        problems.append(
            f"engine.tensorrt.max_seq_len={settings.max_seq_len} exceeds the model's {arch.max_position_embeddings} positions: "
            f"set {arch.max_position_embeddings} or less."
        )
    if settings.expanded_from > settings.prefill_chunk:
        problems.append(
            f"engine.tensorrt.expanded_from={settings.expanded_from} exceeds prefill_chunk={settings.prefill_chunk}, so no chunk "
            "would reach it: lower it."
        )
    return problems


def networks(config: Config, arch: Arch) -> list[Spec]:
    """Every network, rank by rank.

    Raises:
        ConfigError: they cannot be.
    """
    settings = config.engine.tensorrt
    assert settings is not None
    library, targets = resolve(config)
    if problems := refuse_impossible(config, arch):
        raise ConfigError("\n".join(problems))
    ranks, parallel = layout_of(config)
    exchange = cast(Exchange, settings.exchange)
    moe = moe_lowering(settings.moe, library, targets, config.quant.routed_experts)
    draft = bool(settings.mtp and arch.num_nextn_predict_layers)
    chunk = min(settings.prefill_chunk, settings.max_seq_len)
    # a drafted decode step verifies a token and the draft behind it
    decoded = max(settings.expanded_from - 1, 2 if draft else 1)
    shapes = {"absorbed": (settings.max_batch_size, decoded), "expanded": (settings.prefill_batch, chunk)}
    return [
        Spec(
            arch=arch, form=form, dtype=settings.dtype, max_batch=shapes[form][0], max_tokens=shapes[form][1],
            max_seq_len=settings.max_seq_len, first_layer=first, last_layer=last, mtp=draft, rank=rank, ranks=ranks,
            parallel=parallel, moe=moe, moe_capacity=settings.moe_capacity, exchange=exchange,
            exchange_share=settings.exchange_share if exchange == "all_to_all" else 1.0, gather=cast(Payload, settings.gather),
            plugins_for=plugins_for(config), host_plugins=settings.plugins == "all",
        )
        for rank in range(ranks)
        for form in FORMS
        for first, last in _segments(arch, settings.layers_per_engine, draft)
    ]  # fmt: skip


def _segments(arch: Arch, layers_per_engine: int, draft: bool) -> Iterator[tuple[int, int]]:
    """First layer and one past the last of each engine."""
    count = arch.num_hidden_layers
    step = layers_per_engine or count
    yield from ((first, min(first + step, count)) for first in range(0, count, step))
    if draft:
        yield count, count + 1


def name_of(spec: Spec) -> str:
    """Name of the engine's files: rank0_absorbed, rank0_absorbed_layers3-4, rank0_absorbed_mtp."""
    part = ""
    if spec.is_draft:
        part = "_mtp"
    elif (spec.first_layer, spec.last_layer) != (0, spec.arch.num_hidden_layers):
        part = f"_layers{spec.first_layer}-{spec.last_layer - 1}"
    return f"rank{spec.rank}_{spec.form}{part}"
