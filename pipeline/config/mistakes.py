"""What Hydra, OmegaConf and YAML raise, as sentences: the one place where their errors end."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipeline.config.schema import MIN_SQNR_DB, Config
from pipeline.core.errors import ConfigError
from pipeline.models.arch import HF_FIELDS
from pipeline.share import share

__all__ = ["ADDED", "as_sentences", "choices", "groups", "missing_values", "prefix", "unknown_keys"]

TABLES = {"model.hf": HF_FIELDS, "verify.min_sqnr_db": tuple(MIN_SQNR_DB)}
"""Fields that are tables of the user's own keys, with the keys they may have."""
OPEN = "engine.trtllm.args"
"""The table whose keys are the engine's, and judged by `plan`."""
ADDED = ("hw", "deployment")
"""Groups without a default, which are chosen as `+GROUP=NAME`: the hardware, or a whole deployment with its hardware."""
_LOCATION = ("full_key:", "object_type=", "reference_type=", "See https:", "Set the environment variable HYDRA_FULL_ERROR")


@contextlib.contextmanager
def as_sentences(words: list[str], config_dir: Path | None) -> Iterator[None]:
    """Turn whatever composing `words` raises into a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except MissingConfigException as error:
        raise ConfigError(_unknown_choice(error, config_dir)) from error
    except ConfigCompositionException as error:
        raise ConfigError(_bad_override(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explanation(error)) from error
    except YAMLError as error:
        raise ConfigError(_bad_yaml(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_not_utf8(config_dir)} is not UTF-8 text ({error.reason}): save it as UTF-8.") from error
    except AssertionError as error:  # OmegaConf's answer to a value inside a section that is null
        raise ConfigError(_null_section(words)) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:  # Hydra's, about the shape of a file
        raise ConfigError(f"The configuration cannot be composed: {explanation(error)}.") from error


def choices(group: str, config_dir: Path | None = None) -> list[str]:
    """The files of a config group, by name."""
    folders = [share("conf") / group, *([config_dir / group] if config_dir else [])]
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml") if path.is_file()})


def prefix(group: str) -> str:
    """How a choice of the group is written, up to the `=`."""
    return f"+{group}" if group in ADDED else group


def groups() -> list[str]:
    """The config groups, by name."""
    return sorted(path.name for path in share("conf").iterdir() if path.is_dir())


def explanation(error: BaseException) -> str:
    """The whole message in one line, led by the key that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    said = " ".join(line for line in lines if not line.startswith(_LOCATION)) or type(error).__name__
    return f"{key}: {said}" if key and key not in said else said


def unknown_keys(node: DictConfig, schema: type = Config, prefix: str = "") -> list[str]:
    """A sentence for each key that the schema does not have."""
    fields = {field.name: field for field in dataclasses.fields(schema)}
    hints = typing.get_type_hints(schema)
    problems = []
    for key in node:
        name = f"{prefix}{key}"
        if key not in fields:
            problems.append(_no_key(name))
        elif (inner := _dataclass_of(hints[key])) and not OmegaConf.is_missing(node, key) and node[key] is not None:
            problems += unknown_keys(node[key], inner, f"{name}.")
        elif name in TABLES and node[key] is not None:
            problems += [_no_key(f"{name}.{entry}") for entry in node[key] if entry not in TABLES[name]]
    return problems


def missing_values(composed: DictConfig) -> list[str]:
    """A sentence for each key that has no value."""
    return [f"{key} has no value: set it as {key}=..." for key in sorted(OmegaConf.missing_keys(composed))]


def _dataclass_of(hint: Any) -> type | None:
    return next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)


def _all_keys(schema: type = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(schema).items():
        inner = _dataclass_of(hint)
        keys += _all_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _no_key(name: str) -> str:
    """`There is no key quant.kv_dytpe; did you mean quant.kv_dtype?`, over whole keys first, then over their last part."""
    table, _, leaf = name.rpartition(".")
    if f"{name}.".startswith(f"{OPEN}."):
        return f"{name} is not set yet: add it as +{name if leaf != 'args' else f'{OPEN}.NAME'}=VALUE."
    keys = [f"{table}.{key}" for key in TABLES[table]] if table in TABLES else [*_all_keys(), *groups()]
    if table in TABLES and name in keys:
        return f"{name} is not set yet: add it as +{name}=VALUE."
    near = [] if table in TABLES else difflib.get_close_matches(name, keys, n=1, cutoff=0.6)
    leaves = difflib.get_close_matches(leaf, [key.rsplit(".", 1)[-1] for key in keys], n=1, cutoff=0.6)
    near = near or [key for key in keys if leaves and key.endswith("." + leaves[0])]
    if near:
        return f"There is no key {name}; did you mean {near[0]}?"
    known = TABLES.get(table) or sorted({key.split(".")[0] for key in keys})
    return f"There is no key {name}: known are {', '.join(known)}."


def _unknown_choice(error: MissingConfigException, config_dir: Path | None) -> str:
    """`hw=nope is not known: choose one of ...`."""
    missing = error.missing_cfg_file
    if not missing or "/" not in missing:
        return explanation(error)
    group, _, name = missing.rpartition("/")
    known = choices(group, config_dir)
    if not known:
        return f"There is no config group {group}: choose one of {', '.join(groups())}."
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    word = prefix(group)
    return f"{word}={name} is not known: choose one of {', '.join(f'{word}={choice}' for choice in known)}.{hint}"


def _bad_override(error: ConfigCompositionException) -> str:
    """Hydra's message, with the nearest key where it is about an unknown one."""
    if match := re.search(r"Could not override '([^']+)'", str(error)):
        name = match.group(1).split("@")[0]
        if name.split(".")[0] not in _all_keys() and "/" not in name and name in groups():
            return f"{name} is chosen once: {explanation(error)}"
        return _no_key(name)
    return explanation(error.__cause__ or error)


def _bad_yaml(error: YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else "A file of the configuration"
    return f"{where} is not YAML: {getattr(error, 'problem', None) or explanation(error)}."


def _not_utf8(config_dir: Path | None) -> str:
    for file in sorted(config_dir.rglob("*.yaml")) if config_dir else ():
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return str(file)
        except OSError:
            continue
    return "A file of the configuration"


def _null_section(words: list[str]) -> str:
    """`engine.trtllm.mtp` without `engine=trtllm`."""
    nested = [word for word in words if word.split("=")[0].count(".") > 1]
    sections = {word.split("=")[0].lstrip("+").rpartition(".")[0] for word in nested}
    choose = " or ".join(f"{section.split('.')[0]}={section.split('.')[1]}" for section in sorted(sections))
    return f"{', '.join(nested)} sets a key of a section that is not selected: select it with {choose}."
