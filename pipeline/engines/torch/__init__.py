"""The compiled torch engine: `build` makes it, `triton_repo/torch/1/runtime.py` runs it."""

from pipeline.engines.torch.carry import code
from pipeline.engines.torch.toolchain import determinism, requires, toolchain

__all__ = ["code", "determinism", "requires", "toolchain"]
