"""Looks for words in text that comes in pieces, and never shows the beginning of one before it knows better."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Scanner"]


class Scanner:
    """Finds the word that is complete first; pieces of any size give the same result."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = [word for word in words if word]
        self._held = ""

    def feed(self, text: str) -> tuple[str, str, str]:
        """(text that can be shown, the word found or "", text after the word)."""
        text, self._held = self._held + text, ""
        found = [(at + len(word), at, word) for word in self._words if (at := text.find(word)) >= 0]
        if found:
            end, begin, word = min(found)
            return text[:begin], word, text[end:]
        keep = max((_overlap(text, word) for word in self._words), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], "", ""

    def flush(self) -> str:
        """What was held back, once it is known that nothing follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`."""
    longest = min(len(text), len(word) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
