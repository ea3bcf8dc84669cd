"""The key of a stage: everything that can change its bytes, kept in parts so that `explain` can name the leaf.

parts = {schema, stage, version, config: {dotted leaf: value}, code: {file: sha256}, toolchain: {name: version},
inputs: {"plan/precision.json": digest, "checkpoint": digest}}; key = SHA-256 of their canonical JSON.
Inputs enter as digests of *outputs*, not as upstream keys: a stage that is rebuilt to the same bytes stops the
rebuild there. Paths, hosts, users, times and log levels never enter.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.core.jsonio import canonical
from pipeline.core.stage import Stage
from pipeline.core.store import SCHEMA
from pipeline.share import code_root, share

__all__ = ["flatten", "key_of", "key_parts"]


def key_parts(stage: Stage, config: Config, inputs: dict[str, str]) -> dict[str, Any]:
    """The parts of the key of `stage`; `inputs` maps an input's name to the digest of its content."""
    return {
        "schema": SCHEMA,
        "stage": stage.name,
        "version": stage.version,
        "config": config_leaves(config, stage.config),
        "code": {name: digest for path in (*stage.code, *stage.code_of(config)) for name, digest in code_digests(path).items()},
        "toolchain": stage.toolchain(config),
        "inputs": inputs,
    }


def key_of(parts: dict[str, Any]) -> str:
    """SHA-256 of the parts, as 64 hex digits."""
    return hashlib.sha256(canonical(parts)).hexdigest()


def config_leaves(config: Config, fields: tuple[str, ...]) -> dict[str, Any]:
    """The declared fields or sections as {dotted leaf: value}."""
    whole = flatten(asdict(config))
    chosen = {}
    for field in fields:
        leaves = {name: value for name, value in whole.items() if name == field or name.startswith(field + ".")}
        if not leaves:
            raise AssertionError(f"stage config field {field} is not in the schema")
        chosen |= leaves
    return chosen


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}; lists and empty dicts are leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return leaves


@cache
def code_digests(path: str) -> dict[str, str]:
    """{file: sha256} of one source file or of every file below a folder, named relative to the project."""
    base = share("triton_repo").parent if path.startswith("triton_repo") else code_root()
    root = base / path
    if not root.exists():
        raise ConfigError(f"{path} is missing from this installation: install the package again.")
    files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if _is_source(file))
    return {file.relative_to(base).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _is_source(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so"
