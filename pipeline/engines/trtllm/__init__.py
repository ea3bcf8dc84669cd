"""TensorRT-LLM (PyTorch backend). It builds no engine file: its build is a checkpoint, arguments and an environment."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.core.stage import Determinism

__all__ = ["determinism", "installed_version", "requires", "toolchain"]


def toolchain(config: Config) -> dict[str, str]:
    """The version line that is written for, and the installed version, whose own check may refuse."""
    assert config.engine.trtllm is not None
    return {"tensorrt_llm": installed_version() or "not installed", "tensorrt_llm line": config.engine.trtllm.version}


def requires(config: Config) -> None:
    """Nothing: the bundle is written anywhere; without tensorrt_llm its arguments are not validated."""


def determinism(config: Config) -> Determinism:
    """Text and links to the checkpoint; the server chooses kernels, not this build."""
    return "bitwise"


def installed_version() -> str | None:
    """Version of the tensorrt_llm of this Python, without importing it; None if there is none."""
    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        return None
