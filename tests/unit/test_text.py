"""Streaming text: split characters, stop words, special tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests._utils import serving

from text import Detokenizer, StopWords, TextCodec  # isort: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    serving.write_byte_tokenizer(path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec(folder)


@pytest.mark.parametrize("text", ["plain", "你好，世界", "🙂👩‍👩‍👧 é", "mixed 中 a🙂b"])
def test_a_split_character_comes_whole(codec: TextCodec, text: str) -> None:
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.feed(token) for token in codec.encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) == len(text.encode()), "the test tokenizer has one token a byte"


def test_an_unfinished_character_at_the_end_is_not_shown(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    assert "".join(detokenizer.feed(token) for token in codec.encode("a🙂")[:-1]) == "a"


def test_pieces_add_up_to_the_library_s_own_decode(folder: Path, codec: TextCodec) -> None:
    library, rng = Tokenizer.from_file(str(folder / "tokenizer.json")), random.Random(0)
    for _ in range(300):
        ids = [
            rng.choice([*b"ab\xe4\xbd\xa0\xf0\x9f\x99\x82\xff\xc0", 256, 257]) for _ in range(rng.randrange(1, 30))
        ] + [46]
        detokenizer = Detokenizer(codec)
        assert "".join(map(detokenizer.feed, ids)) == library.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_silent_and_added_ones_are_text(codec: TextCodec) -> None:
    assert codec.token_bytes(256) == b""
    assert codec.token_bytes(257) == b"<think>"
    assert codec.token_bytes(99_999) == b""


def test_bos_is_put_in_front_once(codec: TextCodec) -> None:
    assert codec.encode("a", bos=256) == [256, 97]
    assert codec.encode("<｜begin▁of▁sentence｜>a", bos=256) == [256, 97]
    assert codec.encode("a") == [97]


def test_bos_comes_once_where_the_tokenizer_adds_it_too() -> None:
    tiny = TextCodec(Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1")
    assert tiny.encode("hi", bos=0) == tiny.encode("<｜begin▁of▁sentence｜>hi", bos=0)
    assert tiny.encode("hi", bos=0).count(0) == 1


def test_a_tokenizer_that_cannot_be_streamed_is_refused(folder: Path, tmp_path: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"decoder": {"type": "WordPiece"}}))
    with pytest.raises(ValueError, match="WordPiece; only ByteLevel"):
        TextCodec(tmp_path)


@pytest.mark.parametrize(("words", "pieces", "shown", "found"), [
    (["stop"], ["a st", "op b"], "a ", True),
    (["stop"], ["a st", "ay"], "a stay", False),
    (["aab"], ["a", "a", "a", "b"], "a", True),
    (["b", "abc"], ["xa", "bc"], "xa", True),
    (["end", "\n\n"], ["x\n", "\ny"], "x", True),
    (["世界"], ["你好世", "界"], "你好", True),
    ([""], ["abc"], "abc", False),
    (["ab"], ["a"], "a", False),
    ([], ["a", "b"], "ab", False),
])  # fmt: skip
def test_stop_words(words: list[str], pieces: list[str], shown: str, found: bool) -> None:
    stop = StopWords(words)
    text = "".join(map(stop.feed, pieces))
    assert (text + stop.flush(), stop.found) == (shown, found)


def test_stop_words_cut_where_the_first_one_is_complete() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(30)))
        words = ["".join(rng.choice("abc") for _ in range(rng.randrange(2, 5))) for _ in range(2)]
        stop = StopWords(words)
        shown = "".join(map(stop.feed, text)) + stop.flush()
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(words))]
        cut = min(text.index(word) for word in words if word in text[: ends[0]]) if ends else len(text)
        assert (shown, stop.found) == (text[:cut], bool(ends))
