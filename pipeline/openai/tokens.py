"""Token counts where the served model does not tell them, and the BOS that would come twice."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from pipeline.core.errors import ConfigError

__all__ = ["TokenCounter"]


class TokenCounter:
    """The tokenizer of the served model."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"There is no {path.name} in {folder}: give the folder of the model's tokenizer.")
        self._tokenizer = Tokenizer.from_file(str(path))
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        token = config.get("bos_token") or ""
        self._bos: str = token["content"] if isinstance(token, dict) else token
        ids: list[int] = self._tokenizer.encode("").ids
        self.longest = max(map(len, self._tokenizer.get_vocab()))
        """Bytes (or more) of the longest token: no prompt of `longest * n` bytes or more has fewer than n tokens."""
        self._adds_bos = bool(self._bos) and (config.get("add_bos_token") is True or ids == self._bos_ids())

    def prompt(self, text: str) -> int:
        """Tokens of a prompt as the model sees it, its BOS included."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return len(ids) + (self._adds_bos and ids[:1] != self._bos_ids())

    def output(self, text: str) -> int:
        """Tokens of generated text: what was sampled may have been cut differently, so this is an estimate."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def without_bos(self, prompt: str) -> str:
        """`prompt` without the BOS that a template wrote, if the model's tokenizer adds one itself."""
        return prompt.removeprefix(self._bos) if self._adds_bos else prompt

    def _bos_ids(self) -> list[int]:
        token = self._tokenizer.token_to_id(self._bos)
        return [] if token is None else [token]
