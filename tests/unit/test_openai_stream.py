"""Stop words and reasoning in a stream: however the text is cut into pieces, the client gets the same, and no more."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterator

import pytest

from pipeline.openai.backend import Piece
from pipeline.openai.choice import End, Plain, generation
from pipeline.openai.reasoning import Delta, Splitter
from pipeline.openai.scan import Scanner


def cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut `text` into up to three pieces, and one character at a time."""
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[:first], text[first:second], text[second:]]
    yield list(text)


def cut_at_first(text: str, words: list[str]) -> str:
    """`text` before the stop word that is complete first: what a client may see, said in another way."""
    for end in range(len(text) + 1):
        if ending := [word for word in words if text[:end].endswith(word)]:
            return text[: end - len(max(ending, key=len))]
    return text


@pytest.mark.parametrize(("text", "words"), [
    ("one two three", ["two"]),
    ("aaab aab", ["aab"]),
    ("abcabcabd", ["abcabd"]),
    ("no such word here", ["wordy", "hereby"]),
    ("the end", ["end"]),
    ("stop", ["stop"]),
    ("你好🙂再见", ["🙂再"]),
    ("xyz abc", ["abcd", "yz", "z a"]),
    ("long stopped", ["stop", "long stop"]),
    ("nothing", []),
    ("nothing", [""]),
])  # fmt: skip
def test_a_stop_word_ends_the_text_before_it(text: str, words: list[str]) -> None:
    expected = cut_at_first(text, [word for word in words if word])
    for pieces in cuts(text):
        scanner, shown, found = Scanner(words), "", ""
        for piece in pieces:
            out, found, _ = scanner.feed(piece)
            shown += out
            assert expected.startswith(shown), f"{pieces} leaked {shown!r}"
            if found:
                break
        shown += "" if found else scanner.flush()
        assert shown == expected, pieces


def split_whole(text: str, inside: bool) -> tuple[str, str]:
    """(reasoning, content) of a whole text, by regular expressions."""
    opened = re.match(r"\s*<think>", text)
    if not opened and not inside:
        return "", text
    thought, found, answer = text[opened.end() if opened else 0 :].partition("</think>")
    return thought.strip(), answer.lstrip() if found else ""


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("text", [
    "<think>\nhm, 2+2\n</think>\n\nIt is 4.\n",
    "hm, 2+2\n</think>\n\nIt is 4. ",
    "\n <think>a</think>b",
    "<think></think>b",
    "</think>\n\nb",
    "<think>never closed  \n",
    "never closed </thin",
    "<thin ice is not a thought",
    "  \n leading space stays",
    "a < b and </b>",
    "<think>x</think>y</think>z<think>w",
    "<think> one \n\n two </thinking> </think>",
    "<thi",
    "",
    "   ",
])  # fmt: skip
def test_reasoning_is_told_from_the_answer(text: str, inside: bool) -> None:
    expected = split_whole(text, inside)
    for pieces in cuts(text):
        splitter, reasoning, content = Splitter(inside), "", ""
        for delta in [*(splitter.feed(piece) for piece in pieces), splitter.flush()]:
            reasoning, content = reasoning + delta.reasoning, content + delta.content
            assert expected[0].startswith(reasoning) and expected[1].startswith(content), f"{pieces} leaked"
        assert (reasoning, content) == expected, pieces


def test_text_is_shown_as_soon_as_it_can_be() -> None:
    splitter = Splitter(inside=True)
    assert splitter.feed("one two") == Delta("one two")
    assert splitter.feed(" </") == Delta()
    assert splitter.feed("b") == Delta(" </b")
    assert splitter.feed("</think>\n\nyes") == Delta("", "yes")
    assert splitter.feed("\n\n") == Delta("", "\n\n")


def collect(pieces: list[Piece], stops: tuple[str, ...] = (), max_tokens: int = 100, chat: bool = False) -> tuple[Delta, End, bool]:
    """All text, the end, and whether the model's iterator was closed before its end."""
    state = {"closed": False}

    async def model() -> AsyncIterator[Piece]:
        try:
            for piece in pieces:
                yield piece
        except GeneratorExit:
            state["closed"] = True
            raise

    async def run() -> list[Delta | End]:
        splitter = Splitter(False) if chat else Plain()
        items = generation(model(), stops=stops, splitter=splitter, max_tokens=max_tokens, count=lambda text: len(text.split()))
        return [item async for item in items]

    *deltas, end = asyncio.run(run())
    assert isinstance(end, End) and all(deltas)
    text = Delta("".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas))
    return text, end, state["closed"]


def test_a_stop_word_that_the_engine_missed_ends_the_generation() -> None:
    text, end, closed = collect([Piece("one tw"), Piece("o three"), Piece(" four"), Piece("", "length", 3, 4)], ("two",))
    assert (text.content, end, closed) == ("one ", End("stop", 3, None), True)


def test_the_engine_s_own_counts_and_reason_are_taken() -> None:
    _, end, closed = collect([Piece("one two", prompt_tokens=7), Piece(" x", completion_tokens=9), Piece("", "length")])
    assert (end, closed) == (End("length", 9, 7), False)


@pytest.mark.parametrize(("most", "reason"), [(3, "length"), (4, "stop")])
def test_without_a_reason_a_full_count_means_length(most: int, reason: str) -> None:
    assert collect([Piece("one two three")], max_tokens=most)[1] == End(reason, 3, None)


def test_stop_words_hold_inside_thoughts_too() -> None:
    text, end, _ = collect([Piece("<think>one ST"), Piece("OP two</think>x")], ("STOP",), chat=True)
    assert (text, end.finish_reason) == (Delta("one"), "stop")


def test_what_was_held_back_comes_at_the_end() -> None:
    text, end, _ = collect([Piece("one ST"), Piece("", "stop", 1, 2)], ("STOP",))
    assert (text.content, end.finish_reason) == ("one ST", "stop")
