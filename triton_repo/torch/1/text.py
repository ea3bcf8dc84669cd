"""Text in, text out: the tokenizer, UTF-8 safe streaming of tokens, and stop words over the streamed text.

A token of a byte-level tokenizer is a run of bytes, and one character may take several tokens (most emoji do). So the
stream is decoded as bytes: an incremental UTF-8 decoder holds the first bytes of a character back until the rest is
there. Only bytes that can never become a character turn into U+FFFD, as they do in Hugging Face's own decode.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

__all__ = ["Detokenizer", "StopWords", "TextCodec"]


class TextCodec:
    """A byte-level tokenizer.json: text to ids, and the bytes of each id."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        spec = json.loads(path.read_text(encoding="utf-8"))
        if "ByteLevel" not in {part["type"] for part in _decoders(spec["decoder"])}:
            raise ValueError(
                f"{path.name} has a decoder of type {spec['decoder']['type']}; only ByteLevel can be streamed"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        self._added = {token["id"]: "" if token["special"] else token["content"] for token in spec["added_tokens"]}
        self.longest = max(map(len, self._tokenizer.get_vocab()))
        """Bytes of the longest token (or more): a text has at least its bytes divided by this many tokens."""
        self._byte_of = {char: byte for byte, char in enumerate(_byte_chars())}

    def encode(self, text: str, bos: int | None = None) -> list[int]:
        """Ids of `text`; `bos` is put in front unless the text brings it (a chat template does), so it comes once."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for a special token or an id without an entry."""
        if token in self._added:
            return self._added[token].encode()
        return bytes(self._byte_of[char] for char in self._tokenizer.id_to_token(token) or "")


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces add up to the decode of all tokens."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Text that is complete with this token. An unfinished character at the very end is never shown."""
        return self._utf8.decode(self._codec.token_bytes(token))


class StopWords:
    """Finds the first stop word in a stream, and holds back text that could still become one."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = [word for word in words if word]
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Text that can be shown now. After `found`, nothing more comes."""
        if self.found:
            return ""
        text = self._held + text
        if ends := [(at + len(word), at) for word in self._words if (at := text.find(word)) >= 0]:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]  # the one complete first: so pieces of any size give the same text
        keep = max((_overlap(text, word) for word in self._words), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once it is known that nothing follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:size])), 0)


def _decoders(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return spec["decoders"] if spec["type"] == "Sequence" else [spec]


def _byte_chars() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself if printable, else the next free code point from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: 256 + place for place, byte in enumerate(others)}
    return [chr(moved.get(byte, byte)) for byte in range(256)]
