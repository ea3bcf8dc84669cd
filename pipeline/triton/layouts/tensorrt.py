"""Layout of native TensorRT engines: the python model of the embedded engine over a runtime of its own."""

from __future__ import annotations

import shutil

from pipeline.core.stage import StageContext
from pipeline.share import share
from pipeline.triton.layouts.torch import write_repository
from pipeline.triton.releases import Release

__all__ = ["layout"]


def layout(ctx: StageContext, release: Release | None = None) -> None:
    """Write the repository of the embedded engine, with `triton_repo/tensorrt` in place of its runtime. Several ranks, too, are one
    model with one instance: its process leads, and starts the others."""
    version = write_repository(ctx, release)
    for source in sorted((share("triton_repo") / "tensorrt" / "1").glob("*.py")):
        shutil.copyfile(source, version / source.name)
