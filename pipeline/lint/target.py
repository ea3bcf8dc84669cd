"""What the files are meant for: a release of TensorRT-LLM and of Triton, and where it is known a machine and a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.versions import last_with_tensorrt, release_order

if TYPE_CHECKING:
    from pipeline.config.schema import Config

__all__ = ["Target", "target_of"]


@dataclass(frozen=True)
class Target:
    """Unset is unknown: rules that need it are left out."""

    version: str | None = None
    """Release or line of TensorRT-LLM; of `triton` where only that was given."""
    triton: str | None = None
    """Release of Triton's container: 25.12."""
    config: Config | None = None
    """Machine, model, formats and workload, as `plan` takes them."""
    load: bool = False
    """Whether a workload was asked for; else `config` holds the default one, which is nobody's."""

    @property
    def line(self) -> tuple[int, ...]:
        """(1, 2); () where it is unknown."""
        found = re.match(r"(\d+)\.(\d+)", self.version or "")
        return (int(found[1]), int(found[2])) if found else ()

    @property
    def without_tensorrt(self) -> bool:
        """Whether this release has no TensorRT backend any more; False where it is unknown or a line that had both."""
        version, last = self.version or "", release_order(last_with_tensorrt())
        return self.line > last[:2] or (version.count(".") > 1 and release_order(version) > last)

    @property
    def sm(self) -> int | None:
        """Compute capability of hw=, as 100."""
        return self.config.hw.sm if self.config else None

    def __str__(self) -> str:
        parts = [f"TensorRT-LLM {self.version}" if self.version else "", f"Triton {self.triton}" if self.triton else ""]
        load = "" if self.load else " (no workload given)"
        parts += [f"{self.config.model.name} on {self.config.hw.name}{load}"] if self.config else []
        return ", ".join(filter(None, parts))


def target_of(settings: Iterable[str], config_dir: Path | None = None) -> Target:
    """`version=1.2 triton=25.12 hw=b200 model=deepseek_r1`, and with hw= any setting of `plan` (model: DeepSeek-R1 unless said).

    Raises:
        ConfigError: if a value is not known, or settings are given that need hw=.
    """
    given = dict(word.lstrip("+").split("=", 1) for word in settings)
    version, tag, hw = given.pop("version", None), given.pop("triton", None), given.pop("hw", None)
    if tag is not None:
        from pipeline.triton.releases import release

        image = release(tag).images.get("trtllm")
        version = version or (image.version if image else None)
    _require_version(version)
    if hw is None and given:
        raise ConfigError(
            f"lint does not know {', '.join(given)} by itself: it takes version=, triton= and hw=, and with hw= model= and every "
            "setting of plan."
        )
    config = _config(hw, given, version, config_dir) if hw is not None else None
    return Target(version, tag, config, any(name.partition(".")[0] == "workload" for name in given))


def _require_version(version: str | None) -> None:
    if version is not None and not Target(version).line:
        raise ConfigError(f"version={version} is no release of TensorRT-LLM: give a line or a release, such as 1.2 or 1.2.1.")


def _config(hw: str, given: dict[str, str], version: str | None, config_dir: Path | None) -> Config:
    from pipeline.config.load import load

    given = {"model": "deepseek_r1"} | given
    words = [f"+hw={hw}", *(f"{key}={value}" for key, value in given.items())]
    config = load(words if "engine" in given else [*words, "engine=trtllm"], config_dir)
    if config.engine.trtllm is None:
        raise ConfigError(f"lint judges arguments of TensorRT-LLM, but engine={config.engine.kind}: leave engine= out.")
    if version:
        config.engine.trtllm.version = version
    return config
