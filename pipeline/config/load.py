"""From the command line to one checked `Config`.

Every mistake ends in a `ConfigError` sentence: a missing or unknown choice lists the choices, an unknown key names
the nearest one, a wrong type or value names the field and its limit (`mistakes.py`, `pipeline/core/limits.py`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from pipeline.config.mistakes import ADDED, as_sentences, choices, groups, missing_values, prefix, unknown_keys
from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.core.limits import mistakes
from pipeline.share import share

__all__ = ["choices", "from_plain", "load", "prefix", "resolved_yaml"]

HYDRA_VERSION_BASE = "1.3"


def load(overrides: list[str], config_dir: Path | None = None) -> Config:
    """Compose `conf/` (and `config_dir`, which adds choices) with the overrides, and check the result.

    Raises:
        ConfigError: with a sentence for each mistake.
    """
    with as_sentences(overrides, config_dir):
        return _typed(_compose(overrides, config_dir))


def resolved_yaml(overrides: list[str], config_dir: Path | None = None) -> str:
    """The whole configuration as YAML, after checking it."""
    with as_sentences(overrides, config_dir):
        composed = _compose(overrides, config_dir)
        _typed(composed)
        return OmegaConf.to_yaml(composed, resolve=True)


def from_plain(plain: dict[str, Any]) -> Config:
    """The `Config` of `dataclasses.asdict(config)`: how a configuration travels to another process."""
    with as_sentences([], None):
        return _typed(OmegaConf.merge(OmegaConf.structured(Config), plain))


def _compose(overrides: list[str], config_dir: Path | None) -> DictConfig:
    wanted = [_checked(word, config_dir) for word in overrides]
    brought = [word for word in wanted if word.startswith(tuple(f"+{group}=" for group in ADDED))]
    if len(brought) > 1:
        raise ConfigError(f"{' and '.join(brought)} both bring the hardware: choose one of them, and set hw.KEY=VALUE beside it.")
    if not brought:
        raise ConfigError(
            f"Choose the hardware: add one of {_listed('hw', config_dir)}, or a whole deployment: one of "
            f"{_listed('deployment', config_dir)}."
        )
    if config_dir:
        _require_own(config_dir)
        wanted.append(f"hydra.searchpath=[file://{config_dir.absolute()}]")
    _register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(share("conf")), version_base=HYDRA_VERSION_BASE):
        return compose("config", overrides=wanted)


@cache
def _register_schema() -> None:
    ConfigStore.instance().store("schema", Config)


def _require_own(config_dir: Path) -> None:
    """Hydra would pass over a file that has the name of one of ours, and one outside of a group."""
    if not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder.")
    files = sorted(path for path in config_dir.glob("**/*.yaml") if path.is_file())
    for path in files:
        name = path.relative_to(config_dir)
        if (share("conf") / name).is_file():
            raise ConfigError(f"{path} has the name of a file that comes with the pipeline, which would win: give it another name.")
        if len(name.parts) == 1:
            raise ConfigError(f"{path} would not be read: move it into the folder of a group, such as hw/ or quant/.")


def _checked(word: str, config_dir: Path | None) -> str:
    """The override, if it is one and a group gets exactly one choice; `hw=b200` as `+hw=b200`."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        said = word.strip() or "An empty word"
        raise ConfigError(f"{said} is not an override: write KEY=VALUE, with quotes around special characters.") from error
    if override.key_or_group not in groups() or override.type == OverrideType.DEL:
        return word
    if not _one_choice(override):
        group = override.key_or_group
        raise ConfigError(f"{word} does not choose one {group}: choose one of {_listed(group, config_dir)}.")
    absent = override.key_or_group in ADDED and override.type == OverrideType.CHANGE
    return f"+{word}" if absent else word


def _one_choice(override: Override) -> bool:
    value = override.value()
    return not override.is_sweep_override() and isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _listed(group: str, config_dir: Path | None) -> str:
    return ", ".join(f"{prefix(group)}={name}" for name in choices(group, config_dir))


def _typed(composed: DictConfig) -> Config:
    """Refuse unknown keys and missing values, build the dataclasses, and check every field's type and limit."""
    if problems := [*unknown_keys(composed), *missing_values(composed)]:
        raise ConfigError("\n".join(problems))
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    if problems := list(mistakes(config)):
        raise ConfigError("\n".join(problems))
    return config
