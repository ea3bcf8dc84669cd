"""What an engine is built for: compute capabilities, and which data types they have.

With TensorRT-RTX's default targets no data type is checked, and an engine may say SM80 in its header and hold FP8 kernels.
So targets are always given, and checked here first, in sentences.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.engines.tensorrt.library import RTX_TARGETS, library_for, listed

if TYPE_CHECKING:
    from pipeline.config.schema import Config

__all__ = ["MOE_LAYER_TARGETS", "moe_lowering", "plugins_for", "resolve", "unsupported"]

LAYER_FORMATS = ("bf16", "fp8")
"""Formats of experts that TensorRT's own layer gets here; of NVFP4 it says "not supported yet" (1.7.1)."""
FP4_TARGETS = (100, 103, 120, 121)
MOE_LAYER_TARGETS = (100, 103, 110)
"""Where TensorRT's own MoE layer builds; TensorRT-RTX 1.7 defines it, and has kernels for it nowhere."""
NEEDS = {
    "fp8": ("FP8 products", lambda sm: sm >= 89),
    "fp8_channel": ("FP8 products", lambda sm: sm >= 89),
    "fp8_block": ("the FP8 type", lambda sm: sm >= 89),
    "nvfp4": ("FP4 products", lambda sm: sm in FP4_TARGETS),
    "w4a16_nvfp4": ("the FP4 type", lambda sm: sm in FP4_TARGETS),
    "int4_awq": ("the INT4 type", lambda sm: sm >= 80),
}
"""Weight format -> what it needs, and who has that. The types are BF16 SM80, FP8 SM89, FP4 SM100/103/120/121 and up."""


def resolve(config: Config) -> tuple[str, tuple[int, ...]]:
    """Library and targets of `engine.tensorrt` on `hw`.

    Raises:
        ConfigError: there is no GPU, no library for it, or more targets, refits or plugins than the library takes.
    """
    settings = config.engine.tensorrt
    assert settings is not None
    if not settings.targets and config.hw.sm is None:
        raise ConfigError(
            f"engine=tensorrt builds for GPUs, and hw={config.hw.name} has none: name targets, as in engine.tensorrt.targets=[120]."
        )
    targets = tuple(sorted(set(settings.targets or [config.hw.sm])))
    library = settings.library
    for sm in targets:
        library = library_for(sm, library)
    if library == "tensorrt" and len(targets) > 1:
        raise ConfigError(
            f"tensorrt builds for the one GPU that it runs on, but engine.tensorrt.targets has {len(targets)}: keep one of them, "
            f"or only those of tensorrt_rtx ({', '.join(map(str, RTX_TARGETS))})."
        )
    if settings.weights == "refit" and library != "tensorrt":
        raise ConfigError(
            "engine.tensorrt.weights=refit needs tensorrt: tensorrt_rtx refuses every refit flag where there is no GPU. "
            "engine.tensorrt.weights=inputs serves the same end."
        )
    if settings.plugins == "all" and library != "tensorrt":
        raise ConfigError(
            f"engine.tensorrt.plugins=all needs tensorrt: {library}, which is for {listed(targets)}, takes no plugins: leave it."
        )
    return library, targets


def unsupported(targets: Iterable[int], formats: Iterable[str], dtype: str = "bfloat16") -> list[str]:
    """A sentence for each target that lacks a data type of the weights."""
    problems = []
    for sm in targets:
        if sm < 80:
            problems.append(f"SM{sm} has neither BF16 nor float32 products in TensorRT: {dtype} engines need SM80 or newer.")
            continue
        for name in sorted(set(formats) & NEEDS.keys()):
            what, has = NEEDS[name]
            if not has(sm):
                able = "SM100, SM103, SM120 and SM121" if "FP4" in what else "SM89 and newer"
                problems.append(
                    f"{name} weights need {what}, which SM{sm} lacks ({able} have it): choose another quant=, or target."
                )
    return problems


def plugins_for(config: Config) -> int:
    """Compute capability, x10, of the kernels that stand for native layers; 0: none do, as tensorrt_rtx takes none."""
    settings = config.engine.tensorrt
    assert settings is not None
    library, targets = resolve(config)
    return targets[0] if library == "tensorrt" and settings.plugins != "off" else 0


def moe_lowering(wanted: str, library: str, targets: Iterable[int], expert_format: str) -> str:
    """`auto` is TensorRT's layer where it builds and experts are in BF16, else dense. It takes them in FP8, too, when asked for.

    Raises:
        ConfigError: the layer was asked for where it does not build, or for experts that would have to be widened.
    """
    able = library == "tensorrt" and all(sm in MOE_LAYER_TARGETS for sm in targets)
    if wanted == "layer" and not able:
        raise ConfigError(
            f"engine.tensorrt.moe=layer builds with tensorrt for SM100, SM103 and SM110, not with {library} for "
            f"{listed(targets)}: set engine.tensorrt.moe=dense or dispatch."
        )
    if wanted == "layer" and expert_format not in LAYER_FORMATS:
        raise ConfigError(
            f"engine.tensorrt.moe=layer gets experts in BF16 or FP8 here; those in {expert_format} would be dequantised for it: "
            "set engine.tensorrt.moe=dense or dispatch, or quant=bf16 or fp8."
        )
    return ("layer" if able and expert_format == "bf16" else "dense") if wanted == "auto" else wanted
