"""Layouts: which models a repository holds. One module each: `layout(ctx, release)` writes `repository/<model>/...`.

`release` is the Triton release to write for; None: none holds the engine, so only fields that every release takes are written.
Nothing but models may lie in the repository's root.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.share import share

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.triton.pbtxt import ModelConfig

__all__ = ["NO_REPOSITORY", "chosen", "write_model"]

NO_REPOSITORY = "none"
"""Prefill and decode on instances of their own are served by trtllm-serve, not by Triton."""

FITTING = {"torch": ("torch",), "trtllm": ("llmapi", "bls"), "vllm": ("vllm",)}
"""Engine kind -> its layouts, the default first. An engine that is not listed has the one of its own name."""


def chosen(config: Config) -> str:
    """The module of this package that lays the repository out: serve.layout, or the engine's default; or NO_REPOSITORY.

    Raises:
        ConfigError: the engine cannot be served in that layout.
    """
    kind, wanted = config.engine.kind, config.serve.layout
    fitting = FITTING.get(kind, (kind,))
    if config.engine.trtllm is not None and config.engine.trtllm.serving == "disaggregated":
        fitting = (NO_REPOSITORY,)
    if wanted == "auto":
        return fitting[0]
    if wanted not in fitting:
        if NO_REPOSITORY in fitting:
            raise ConfigError(
                f"serve.layout={wanted} is for Triton, which cannot serve prefill and decode apart: use "
                "engine.trtllm.serving=aggregated, or serve.layout=auto and the launchers of trtllm-serve."
            )
        engines = " or ".join(f"engine={kind}" for kind, names in FITTING.items() if wanted in names)
        raise ConfigError(
            f"serve.layout={wanted} needs {engines}, but engine={kind}: use serve.layout={' or '.join(fitting)}, or auto."
        )
    return wanted


def write_model(repository: Path, config: ModelConfig, code: str = "") -> Path:
    """Write a model's config.pbtxt and its version folder `1/` with the files of `triton_repo/<code>`; that folder."""
    from pipeline.triton import pbtxt

    version = repository / config.name / "1"
    version.mkdir(parents=True)
    pbtxt.write(version.parent / "config.pbtxt", config)
    for source in sorted((share("triton_repo") / code / "1").glob("*.py")) if code else ():
        shutil.copyfile(source, version / source.name)
    return version
