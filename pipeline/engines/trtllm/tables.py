"""The YAML files beside the code: version lines and dialects."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

__all__ = ["read_table", "table_names"]


@cache
def table_names(package: str) -> tuple[str, ...]:
    """Names of a package's files, without .yaml, sorted as text."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files(package).iterdir() if file.name.endswith(".yaml")))


@cache
def read_table(package: str, name: str) -> dict[str, Any]:
    """One file of a package; nobody may change what is returned."""
    # NOTE: libyaml's loader reads the version lines in 10 ms, Python's in 150.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(yaml.load(files(package).joinpath(f"{name}.yaml").read_text(encoding="utf-8"), Loader=loader))
