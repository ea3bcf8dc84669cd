"""Rules over LLM arguments, one file a family; a new rule is a function and a row in its family's table.

They need the file alone. What needs a machine and a model is judged by the planner's rules (`pipeline/lint/planned.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.lint.args import batching, cache, experts, keys, parallel, runtime, speculation
from pipeline.lint.args.subject import Args, args_of, line_of
from pipeline.lint.base import Finding, Rule, apply

__all__ = ["RULES", "Args", "args_of", "findings", "line_of"]

RULES: tuple[Rule[Args], ...] = (
    *keys.RULES, *runtime.RULES, *parallel.RULES, *batching.RULES, *cache.RULES, *experts.RULES, *speculation.RULES,
)  # fmt: skip


def findings(args: Args) -> Iterator[Finding]:
    """Every breach by one set of arguments."""
    yield from apply(RULES, args, args.document.file)
