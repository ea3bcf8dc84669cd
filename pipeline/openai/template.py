"""A chat as the model's prompt: the chat template of its tokenizer, rendered as transformers renders it.

The template is code from a checkpoint, so it runs in jinja2's immutable sandbox, with transformers' extras: loop
controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`, and a `namespace` that
takes no private names. It comes from chat_template.jinja, else from tokenizer_config.json (named templates: "default").
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pipeline.core.errors import ConfigError
from pipeline.openai.errors import ApiError

__all__ = ["RESERVED", "ChatTemplate"]

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *SPECIAL})
"""Variables that a request cannot set."""


class ChatTemplate:
    """One compiled template and the tokenizer's special tokens."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        self._special = special
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"The chat template is not valid jinja: {error.message} in line {error.lineno}.") from None

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of the tokenizer in `folder`; None if it has none."""
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        separate = folder / "chat_template.jinja"
        source = separate.read_text(encoding="utf-8") if separate.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        special = {name: _content(config[name]) for name in SPECIAL if config.get(name) is not None}
        return cls(source, special) if source else None

    @property
    def bos(self) -> str:
        """Text of the BOS token; empty if there is none."""
        return self._special.get("bos_token", "")

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt for the assistant's next message. `variables` are the template's own (V3.1's `thinking`).

        Raises:
            ApiError: 400, in the template's words where it refuses the chat itself.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": True} | self._special | variables
        try:
            return self._template.render(messages=messages, **given)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ApiError(400, f"The model's chat template cannot render these messages: {error}", param="messages") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Names,
    }
    return environment


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is a plain block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Names(Namespace):
    """jinja's namespace without names that lead to Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        Namespace.__init__(self, *rest, **values)
        for name in dict(*rest, **values):
            _require_public(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        Namespace.__setitem__(self, name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} on a namespace")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _content(token: Any) -> str:
    """A special token is its text, or a table that has it as `content`."""
    return str(token["content"] if isinstance(token, dict) else token)
