"""LLM arguments as rules see them: in the names of one version line, whatever names the file uses, with the file's own lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pipeline.engines.trtllm.arguments import Problem, problems
from pipeline.engines.trtllm.migrate import Migration, migrate
from pipeline.engines.trtllm.versions import VersionLine, known_lines, release_order, version_line
from pipeline.lint.base import Place
from pipeline.lint.document import Document, value_at
from pipeline.lint.target import Target

__all__ = ["LLM_ARGS", "Args", "args_of", "line_of"]

LLM_ARGS = "TensorRT-LLM tensorrt_llm/llmapi/llm_args.py"
"""Where most rules are known from."""

DEEPSEEK = re.compile(r"deepseek|kimi|\br1\b|\bv3\b|checkpoint|^[./]", re.IGNORECASE)
"""Names of such models, and folders, which may hold one."""
ABSENT = (None, 0, -1)
"""How TensorRT-LLM spells a number that is not given."""

BATCH, TOKENS = 2048, 8192
"""TensorRT-LLM's own limits where neither the file nor the line's defaults say (1.0 has them in BuildConfig)."""


@dataclass(frozen=True)
class Args:
    """One set of arguments, for one instance."""

    document: Document
    """As written."""
    line: VersionLine
    target: Target
    role: str = "both"
    """both, prefill (context servers) or decode (generation servers)."""
    inherited: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that hold for all servers of a disaggregated file, and are judged there."""

    @cached_property
    def _migrated(self) -> Migration:
        return migrate({**self.inherited, **self.document.values}, self.line)

    @cached_property
    def refused(self) -> list[Problem]:
        """What the line refuses of the file."""
        return problems(self.document.values, self.line)

    @property
    def values(self) -> Mapping[str, Any]:
        """In the line's names; what it would refuse is left out."""
        return self._migrated.args

    @cached_property
    def _written(self) -> dict[str, str]:
        return {change.to: change.path for change in self._migrated.changes}

    def get(self, path: str) -> Any:
        """The value at a dotted path, or the line's default; None where the line does not have it."""
        value = value_at(self.values, path)
        if value is None and not self.given(path):
            known = self.line.known.get(path)
            return known.default if known else None
        return value

    def given(self, path: str) -> bool:
        """Whether the file says it."""
        head, _, key = path.rpartition(".")
        table = value_at(self.values, head) if head else self.values
        return isinstance(table, Mapping) and key in table

    def count(self, path: str, absent: int = 1) -> int:
        """A whole number; `absent` where none is given."""
        value = self.get(path)
        if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
            value = int(value)
        return absent if value in ABSENT or not isinstance(value, (int, float)) else int(value)

    def at(self, path: str) -> Place:
        """Where the file says it, under whatever name."""
        return replace(self.document.at(self._written.get(path, path)), key=self._written.get(path, path))

    @property
    def tp(self) -> int:
        """Tensor parallel ranks."""
        return self.count("tensor_parallel_size")

    @property
    def tp_elsewhere(self) -> bool:
        """Whether ranks are left to the command line (`trtllm-serve MODEL --tp_size 8`), which names the model, too."""
        return not self.given("tensor_parallel_size") and not self.given("model")

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.count("pipeline_parallel_size")

    @property
    def cp(self) -> int:
        """Context parallel ranks."""
        return self.count("context_parallel_size")

    @property
    def ep(self) -> int:
        """Ranks that share the experts among them."""
        moe_tp = self.count("moe_tensor_parallel_size", self.tp)
        return self.count("moe_expert_parallel_size", max(1, self.tp // moe_tp))

    @property
    def batch(self) -> int:
        """Requests in flight, per rank."""
        return self.count("max_batch_size", BATCH)

    @property
    def tokens(self) -> int:
        """Tokens of one step, per rank."""
        return self.count("max_num_tokens", TOKENS)

    @property
    def adp(self) -> bool:
        """Attention data parallelism."""
        return bool(self.get("enable_attention_dp"))

    @property
    def draft(self) -> int:
        """Tokens that are drafted in a step; 0 without speculation."""
        if not self.values.get("speculative_config"):
            return 0
        return self.count(f"speculative_config.{self.line.mtp_key}", self.count("speculative_config.max_draft_len"))

    @property
    def graphs(self) -> bool:
        """Whether CUDA graphs are on."""
        return not (self.given("cuda_graph_config") and self.get("cuda_graph_config") is None)

    @property
    def deepseek(self) -> bool:
        """Whether the model is one of DeepSeek-V3's kind; where no name tells, it is."""
        named = str(self.get("model") or "")
        return not named or not re.search(r"[A-Za-z]{3}", named) or bool(DEEPSEEK.search(named))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The line as numbers, to compare: (1, 2)."""
        return release_order(self.line.line)[:2]


def args_of(document: Document, target: Target, role: str = "both", inherited: Mapping[str, Any] | None = None) -> Args:
    """The arguments of `document` for the target's version, or for the line that they fit best."""
    inherited = inherited or {}
    return Args(document, line_of({**inherited, **document.values}, target), target, role, inherited)


def line_of(args: Mapping[str, Any], target: Target) -> VersionLine:
    """The target's line; the nearest known one where that is unknown; without a version the newest that refuses least."""
    lines = [version_line(name) for name in known_lines()]
    if not target.line:
        return min(reversed(lines), key=lambda line: len(problems(args, line)))
    older = [line for line in lines if release_order(line.line)[:2] <= target.line]
    return older[-1] if older else lines[0]
