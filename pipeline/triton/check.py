"""Static check of a model repository: the mistakes that a server reports late, badly, or never.

Triton loads an empty repository as READY, takes any folder in its root for a model, hangs when model.py is missing
and believes `string_value: "${x}"`. All of that is visible in the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.core.errors import ConfigError, StageError
from pipeline.triton import pbtxt

__all__ = ["check_repository"]


def check_repository(repository: Path) -> dict[str, pbtxt.ModelConfig]:
    """The models by name; StageError with every problem found if there is one."""
    models, problems = {}, []
    for entry in sorted(repository.iterdir()) if repository.is_dir() else []:
        if not entry.is_dir():
            problems.append(f"{entry.name} is not a model; keep only model folders in the repository's root")
            continue
        try:
            models[entry.name] = pbtxt.read(entry / "config.pbtxt")
            problems += _problems(entry, models[entry.name])
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            problems.append(f"model {entry.name}: {error}")
    if not models and not problems:
        problems.append("there is no model in it, and a server would still report itself ready")
    if problems:
        raise StageError(
            f"Model repository {repository} cannot be served:\n" + "\n".join(f"  - {line}" for line in problems)
        )
    return models


def _problems(folder: Path, config: pbtxt.ModelConfig) -> Iterator[str]:
    if config.name != folder.name:
        yield f"model {folder.name}: its config.pbtxt says name {config.name!r}; folder and name must be equal"
    if not (config.backend or config.platform):
        yield f"model {folder.name}: no backend is set"
    if not config.HasField("model_transaction_policy"):
        yield f"model {folder.name}: model_transaction_policy is missing; say decoupled true or false"
    versions = [path for path in folder.iterdir() if path.is_dir() and path.name.isdigit()]
    if not versions:
        yield f"model {folder.name}: it has no version folder such as 1/"
    for version in versions:
        entry = config.default_model_filename or "model.py"
        if config.backend == "python" and not (version / entry).is_file():
            yield f"model {folder.name}: {version.name}/{entry} is missing and the server would wait for it forever"
    for group in config.instance_group:
        if group.count < 1:
            yield f"model {folder.name}: instance_group count {group.count} must be at least 1"
    names = [tensor.name for tensor in (*config.input, *config.output)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"model {folder.name}: tensor {', '.join(twice)} is declared twice"
