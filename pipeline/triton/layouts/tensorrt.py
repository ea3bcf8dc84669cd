"""Layout of native TensorRT engines: the python model of the embedded engine over a runtime of its own."""

from __future__ import annotations

import shutil

from pipeline.core.errors import ConfigError
from pipeline.core.jsonio import read_json
from pipeline.core.stage import StageContext
from pipeline.share import share
from pipeline.triton.layouts.torch import write_repository
from pipeline.triton.releases import Release

__all__ = ["layout"]


def layout(ctx: StageContext, release: Release | None = None) -> None:
    """Write the repository of the embedded engine, with `triton_repo/tensorrt` in place of its runtime.

    Raises:
        ConfigError: the engines are of several ranks, which the runtime does not run.
    """
    ranks = read_json(ctx.inputs["engine"] / "engine.json")["ranks"]
    if ranks > 1:
        raise ConfigError(
            f"engine=tensorrt with parallel.tp={ranks} builds engines (python -m pipeline engine), but its Triton model runs one "
            "rank: set parallel.tp=1 to package it."
        )
    version = write_repository(ctx, release)
    for source in sorted((share("triton_repo") / "tensorrt" / "1").glob("*.py")):
        shutil.copyfile(source, version / source.name)
