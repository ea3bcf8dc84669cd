"""Native TensorRT engines: one network definition for `tensorrt` and `tensorrt_rtx`, an engine for each rank and form.

`network/` says what is computed, `interpreter/` computes it in numpy, `build.py` has it compared and built; what runs it where it
is served is `triton_repo/tensorrt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.errors import MissingToolError
from pipeline.core.gpu import compute_capabilities
from pipeline.engines.tensorrt.library import INSTALL, installed_version, listed
from pipeline.engines.tensorrt.plugins import compiler
from pipeline.engines.tensorrt.targets import plugins_for, resolve

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.core.stage import Determinism

__all__ = ["code", "determinism", "requires", "toolchain"]


def toolchain(config: Config) -> dict[str, str]:
    """The library, its version and the targets."""
    library, targets = resolve(config)
    found = {library: installed_version(library) or "not installed", "targets": " ".join(f"SM{sm}" for sm in targets)}
    if plugins_for(config):
        found["plugins"] = compiler() or "no compiler"
    return found


def code(config: Config) -> tuple[str, ...]:
    """Ops that are launched from the host are code of the engine."""
    assert config.engine.tensorrt is not None
    return ("plugins",) if config.engine.tensorrt.plugins == "all" else ()


def requires(config: Config) -> None:
    """The library that builds for the targets, and for `tensorrt` the GPU itself.

    Raises:
        MissingToolError: with what is missing.
    """
    library, targets = resolve(config)
    names = listed(targets)
    if installed_version(library) is None:
        raise MissingToolError(f"An engine for {names} is built by {library}, which is not installed here: {INSTALL[library]}.")
    found = [10 * major + minor for major, minor in compute_capabilities()]
    if library == "tensorrt" and targets[0] not in found:
        here = listed(found) or "no GPU"
        raise MissingToolError(
            f"tensorrt builds on the GPU that the engine is for: {names} is wanted and {here} is here. Run this build on such a "
            "machine; plan, convert and verify run anywhere."
        )


def determinism(config: Config) -> Determinism:
    """tensorrt times kernels on its GPU. tensorrt_rtx does not, but its compiler's threads race for addresses, by which it orders
    tables: with fixed ones (`process.py`) an idle machine writes the same bytes, two busy cores 20 to 800 others of 26 million."""
    return "numeric"
