"""One generation as a client sees it: stop words cut, reasoning apart, and an end with its reason and counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from pipeline.openai.backend import Piece
from pipeline.openai.reasoning import Delta, Splitter
from pipeline.openai.scan import Scanner

__all__ = ["End", "Plain", "generation"]


@dataclass(frozen=True, slots=True)
class End:
    """How a generation ended."""

    finish_reason: str
    completion_tokens: int
    prompt_tokens: int | None
    """None where the model does not tell."""


class Plain:
    """A splitter that takes all text for the answer."""

    def feed(self, text: str) -> Delta:
        """`text`, as it is."""
        return Delta(content=text)

    def flush(self) -> Delta:
        """Nothing is held back."""
        return Delta()


async def generation(
    pieces: AsyncGenerator[Piece, None],
    *,
    stops: Iterable[str],
    splitter: Splitter | Plain,
    max_tokens: int | None,
    count: Callable[[str], int],
) -> AsyncGenerator[Delta | End, None]:
    """Deltas that are not empty, then the End. `count` estimates tokens of text where the model does not count.

    Stop words are looked for here too, although the engine was told them: some engines match tokens instead of text,
    and let the first half of a stop word into the stream.
    """
    scanner, text, last = Scanner(stops), [], Piece()
    found = ""
    async with aclosing(pieces):
        async for piece in pieces:
            last = _latest(last, piece)
            text.append(piece.text)
            shown, found, _ = scanner.feed(piece.text)
            if delta := splitter.feed(shown):
                yield delta
            if found:
                break
    for delta in (splitter.feed("" if found else scanner.flush()), splitter.flush()):
        if delta:
            yield delta
    told = None if found and not last.finish_reason else last.completion_tokens  # cut here: the count never came
    tokens = count("".join(text)) if told is None else told
    yield End(_reason(last, found, tokens, max_tokens), tokens, last.prompt_tokens)


def _latest(old: Piece, new: Piece) -> Piece:
    """What is known of the generation after one more response."""
    return Piece(
        "",
        new.finish_reason or old.finish_reason,
        old.prompt_tokens if new.prompt_tokens is None else new.prompt_tokens,
        old.completion_tokens if new.completion_tokens is None else new.completion_tokens,
    )


def _reason(last: Piece, found: str, tokens: int, max_tokens: int | None) -> str:
    """OpenAI's reason; where the model tells none, a full count means that it was cut."""
    if found:
        return "stop"
    if last.finish_reason in ("stop", "length"):
        return last.finish_reason
    return "length" if max_tokens is not None and tokens >= max_tokens else "stop"
