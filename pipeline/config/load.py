"""From the command line to one checked `Config`: the only place that knows Hydra and OmegaConf.

Every mistake ends in a `ConfigError` sentence: a missing or unknown choice lists the choices, an unknown key names
the nearest one, a wrong type names the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.share import share

__all__ = ["choices", "from_plain", "load", "resolved_yaml"]

HYDRA_VERSION_BASE = "1.3"


def load(overrides: list[str], config_dir: Path | None = None) -> Config:
    """Compose `conf/` (and `config_dir`, which may add choices) with the overrides, and check the result.

    Raises:
        ConfigError: with a sentence for each mistake.
    """
    return _typed(_compose(overrides, config_dir))


def resolved_yaml(overrides: list[str], config_dir: Path | None = None) -> str:
    """The whole configuration as YAML, after checking it."""
    composed = _compose(overrides, config_dir)
    _typed(composed)
    return OmegaConf.to_yaml(composed, resolve=True)


def from_plain(plain: dict[str, Any]) -> Config:
    """The `Config` of `dataclasses.asdict(config)`: how a configuration travels to another process."""
    return _typed(OmegaConf.merge(OmegaConf.structured(Config), plain))


def choices(group: str, config_dir: Path | None = None) -> list[str]:
    """The files of a config group, by name."""
    folders = [share("conf") / group, *([config_dir / group] if config_dir else [])]
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _compose(overrides: list[str], config_dir: Path | None) -> DictConfig:
    wanted = [_appended(override) for override in overrides]
    if config_dir:
        if not config_dir.is_dir():
            raise ConfigError(f"--config-dir {config_dir} is not a folder.")
        wanted.append(f"hydra.searchpath=[file://{config_dir.absolute()}]")
    if not any(re.match(r"\+hw=.", override) for override in wanted):
        raise ConfigError(f"Choose the hardware: add one of {_hw_choices(config_dir)}.")
    ConfigStore.instance().store("schema", Config)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(share("conf")), version_base=HYDRA_VERSION_BASE):
        try:
            return compose("config", overrides=wanted)
        except MissingConfigException as error:
            raise ConfigError(_unknown_choice(error, config_dir)) from error
        except ConfigCompositionException as error:
            raise ConfigError(_bad_override(error)) from error
        except OverrideParseException as error:
            raise ConfigError(
                f"{error.override} is not an override: write KEY=VALUE, with quotes around special characters."
            ) from error
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_first_line(error)) from error
        except AssertionError as error:  # OmegaConf's answer to a value inside a section that is null
            raise ConfigError(_null_section(wanted)) from error


def _appended(override: str) -> str:
    """`hw` is absent from the defaults list, so `hw=b200` is taken as `+hw=b200`."""
    return f"+{override}" if override.startswith("hw=") else override


def _hw_choices(config_dir: Path | None) -> str:
    return ", ".join(f"+hw={name}" for name in choices("hw", config_dir))


def _typed(composed: DictConfig) -> Config:
    """Refuse unknown keys and missing values, then build the dataclasses (which check their ranges)."""
    if problems := [*_unknown_keys(composed, Config, ""), *_missing(composed)]:
        raise ConfigError("\n".join(problems))
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
    assert isinstance(config, Config)
    return config


def _unknown_keys(node: DictConfig, schema: type, prefix: str) -> list[str]:
    fields = {field.name: field for field in dataclasses.fields(schema)}
    hints = typing.get_type_hints(schema)
    problems = []
    for key in node:
        name = f"{prefix}{key}"
        if key not in fields:
            problems.append(f"There is no key {name}{_nearest(name)}.")
        elif (inner := _dataclass_of(hints[key])) and not OmegaConf.is_missing(node, key) and node[key] is not None:
            problems += _unknown_keys(node[key], inner, f"{name}.")
    return problems


def _dataclass_of(hint: Any) -> type | None:
    return next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)


def _missing(composed: DictConfig) -> list[str]:
    return [f"{key} has no value: set it as {key}=..." for key in sorted(OmegaConf.missing_keys(composed))]


def _all_keys(schema: type = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(schema).items():
        inner = _dataclass_of(hint)
        keys += _all_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _nearest(name: str) -> str:
    """`; did you mean quant.kv_cache?`, over whole keys first, then over their last part."""
    keys = [*_all_keys(), *_groups()]
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.6)
    known = sorted({key.split(".")[0] for key in keys})
    leaf = difflib.get_close_matches(name.rsplit(".", 1)[-1], [key.rsplit(".", 1)[-1] for key in keys], n=1, cutoff=0.6)
    near = near or [key for key in keys if leaf and key.endswith("." + leaf[0])]
    return f"; did you mean {near[0]}?" if near else f": known are {', '.join(known)}"


def _unknown_choice(error: MissingConfigException, config_dir: Path | None) -> str:
    """`hw=nope is not known: choose one of ...`."""
    missing = error.missing_cfg_file
    if not missing or "/" not in missing:
        return _first_line(error)
    group, _, name = missing.rpartition("/")
    known = choices(group, config_dir)
    if not known:
        return f"There is no config group {group}: choose one of {', '.join(_groups())}."
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    plus = "+" if group == "hw" else ""
    return f"{plus}{group}={name} is not known: choose one of {', '.join(f'{plus}{group}={choice}' for choice in known)}.{hint}"


def _groups() -> list[str]:
    return sorted(path.name for path in share("conf").iterdir() if path.is_dir())


def _bad_override(error: ConfigCompositionException) -> str:
    """Hydra's first line, with the nearest key where it is about an unknown one."""
    if match := re.search(r"Could not override '([^']+)'", str(error)):
        name = match.group(1).split("@")[0]
        if name.split(".")[0] not in _all_keys() and "/" not in name and name in _groups():
            return f"{name} is chosen once: {_first_line(error)}"
        return f"There is no key {name}{_nearest(name)}."
    return _first_line(error.__cause__ or error)


def _null_section(overrides: list[str]) -> str:
    """`engine.trtllm.mtp` without `engine=trtllm`."""
    nested = [override for override in overrides if override.split("=")[0].count(".") > 1]
    sections = {override.split("=")[0].lstrip("+").rpartition(".")[0] for override in nested}
    choose = " or ".join(f"{section.split('.')[0]}={section.split('.')[1]}" for section in sorted(sections))
    return f"{', '.join(nested)} sets a key of a section that is not selected: select it with {choose}."


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    return f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]
