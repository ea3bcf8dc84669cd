"""Rules over a Triton model repository, one file a family; a new rule is a function and a row in its family's table.

They hold for anyone's repository: the llmapi model, NVIDIA's ensembles over an engine (filled in or not), vLLM's model.json,
and what `package` writes, which `pipeline/triton/check.py` holds to the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.lint.base import Finding, Rule, apply
from pipeline.lint.repository import config, engine, ensemble, folders, gpus, llmapi, vllm
from pipeline.lint.repository.subject import Model, Repository, open_repository

__all__ = ["MODEL_RULES", "ROOT_RULES", "Model", "Repository", "findings", "open_repository"]

ROOT_RULES: tuple[Rule[Repository], ...] = (*folders.ROOT_RULES, *gpus.ROOT_RULES)
MODEL_RULES: tuple[Rule[Model], ...] = (
    *folders.MODEL_RULES, *config.RULES, *gpus.MODEL_RULES, *ensemble.RULES, *llmapi.RULES, *engine.RULES, *vllm.RULES,
)  # fmt: skip


def findings(repository: Repository, whole: bool = True) -> Iterator[Finding]:
    """Every breach; where only one model of a repository was named (not `whole`), the root is not judged."""
    yield from apply(ROOT_RULES, repository, repository.folder) if whole else ()
    for model in repository.models.values():
        yield from apply(MODEL_RULES, model, model.folder)
