"""vLLM, served by Triton's vLLM backend. Its build is a checkpoint, engine arguments (model.json) and an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.core.stage import Determinism

__all__ = ["determinism", "requires", "toolchain"]


def toolchain(config: Config) -> dict[str, str]:
    """The version that is written for."""
    assert config.engine.vllm is not None
    return {"vllm line": config.engine.vllm.version}


def requires(config: Config) -> None:
    """Nothing: the bundle is written anywhere."""


def determinism(config: Config) -> Determinism:
    """Text and links to the checkpoint; the server chooses kernels, not this build."""
    return "bitwise"
