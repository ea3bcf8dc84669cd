"""TensorRT-LLM (PyTorch backend). It builds no engine file: its build is a checkpoint, arguments and an environment."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from pipeline.core.errors import MissingToolError
from pipeline.engines.trtllm.versions import version_line

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.core.stage import Determinism

__all__ = ["determinism", "installed_as", "installed_version", "requires", "toolchain"]


def toolchain(config: Config) -> dict[str, str]:
    """The version line that is written for, and the installed version, whose own check may refuse."""
    assert config.engine.trtllm is not None
    return {"tensorrt_llm": installed_version() or "not installed", "tensorrt_llm line": config.engine.trtllm.version}


def requires(config: Config) -> None:
    """Nothing, as the bundle is written anywhere: without tensorrt_llm its arguments are not validated. Warming takes it.

    Raises:
        MissingToolError: engine.trtllm.warm=true and no tensorrt_llm of the line is installed.
    """
    assert config.engine.trtllm is not None
    line = version_line(config.engine.trtllm.version).line
    if config.engine.trtllm.warm and not installed_as(line):
        here = installed_version()
        raise MissingToolError(
            f"engine.trtllm.warm=true starts the engine, but {f'tensorrt_llm {here}' if here else 'no tensorrt_llm'} is installed "
            f"here, not {line}: run this in a container of that line, or set engine.trtllm.warm=false."
        )


def determinism(config: Config) -> Determinism:
    """Text and links to the checkpoint; what warming keeps was measured, and is another on each run."""
    assert config.engine.trtllm is not None
    return "numeric" if config.engine.trtllm.warm else "bitwise"


def installed_as(line: str) -> bool:
    """Whether the tensorrt_llm of this Python is of a version line."""
    return f"{installed_version()}.".startswith(f"{line}.")


def installed_version() -> str | None:
    """Version of the tensorrt_llm of this Python, without importing it; None if there is none."""
    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        return None
