"""Separates what a model thinks (<think>...</think>) from what it answers, while the text comes in pieces.

A template may open the thought itself (R1's ends with `<think>` and a newline), or the model does as its first word; a
model that never thinks passes through untouched. White space around the thought and before the answer is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.openai.scan import Scanner

__all__ = ["CLOSE", "OPEN", "Delta", "Splitter"]

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of either kind."""

    reasoning: str = ""
    content: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content)


class Splitter:
    """`inside`: the prompt has opened the thought already."""

    def __init__(self, inside: bool) -> None:
        self._inside, self._start = inside, ""
        self._begun = False
        self._scanner, self._thought, self._answer = Scanner([CLOSE]), _Trim(), _Trim(started=not inside)

    def feed(self, text: str) -> Delta:
        """What can be told of the text so far."""
        if self._begun:
            return self._split(text)
        self._start += text
        head = self._start.lstrip()
        if OPEN.startswith(head):
            if head != OPEN:
                return Delta()  # it may still become <think>
        elif not head.startswith(OPEN):
            return self._begin(self._start)
        self._inside, self._answer = True, _Trim()
        return self._begin(head[len(OPEN) :])

    def flush(self) -> Delta:
        """The rest, once nothing follows."""
        first = Delta() if self._begun else self._begin(self._start)
        rest = self._scanner.flush()
        if not self._inside:
            return Delta(first.reasoning, first.content + rest)
        return Delta(first.reasoning + self._thought.feed(rest), first.content)

    def _begin(self, text: str) -> Delta:
        self._begun, self._start = True, ""
        return self._split(text)

    def _split(self, text: str) -> Delta:
        if not self._inside:
            return Delta(content=self._answer.feed(text, hold=False))
        thought, found, rest = self._scanner.feed(text)
        reasoning = self._thought.feed(thought)
        if not found:
            return Delta(reasoning)
        self._inside = False
        return Delta(reasoning, self._answer.feed(rest, hold=False))


class _Trim:
    """Drops white space at the beginning and, where it holds it back, at the end."""

    def __init__(self, started: bool = False) -> None:
        self._started, self._space = started, ""

    def feed(self, text: str, hold: bool = True) -> str:
        text = self._space + (text if self._started else text.lstrip())
        self._started = self._started or bool(text)
        shown = text.rstrip() if hold else text
        self._space = text[len(shown) :]
        return shown
