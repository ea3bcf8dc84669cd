"""The text that tiny_r1 learns from: what CPython itself ships, under the PSF licence.

Three kinds of document are taken from a standard library directory:

  topic   a chapter of `pydoc_data/topics.py`, the prose of the language reference
  docs    one file's docstrings, each under its signature; and, as a chat in R1's form, one function's
  code    one file's source

Files and topics are held out whole, by a hash of their name, so that no held-out sentence was trained on
in another kind. Prose is repeated, since there is far less of it than of code.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

__all__ = ["SPECIAL_TOKENS", "VOCAB_SIZE", "prepare"]

VOCAB_SIZE = 1024
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THOUGHT = ("<think>", "</think>")
"""Tokens of their own, but text: as in R1's tokenizer, a decoder that skips special tokens must show them."""
SPECIAL_TOKENS = (BOS, EOS, PAD, USER, ASSISTANT, *THOUGHT)

REPEATS = {"topic": 4, "docs": 2, "chat": 2, "code": 1}
HELD_OUT_TEXT = 96 * 1024  # bytes of held-out text that are shipped, half prose, half code
SKIPPED = ("site-packages/", "pydoc_data/", "encodings/", "_sysconfigdata", "config-", "lib2to3/tests/data/")
MAX_FILE = 400_000  # bytes; larger files are tables


@dataclass(frozen=True, slots=True)
class Document:
    """One text, its kind, and whether it is held out."""

    kind: str
    held_out: bool
    text: str


def held_out(name: str, one_in: int) -> bool:
    """The same answer for a name on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % one_in == 0


def topics(stdlib: Path) -> Iterator[Document]:
    """The language reference, a chapter at a time."""
    tree = ast.parse((stdlib / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    for label, text in ast.literal_eval(table).items():
        yield Document("topic", held_out(f"topics/{label}", 10), text.strip() + "\n")


def sources(stdlib: Path) -> Iterator[tuple[str, str]]:
    """Relative path and text of each Python file that is UTF-8 and mostly words."""
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if name.startswith(SKIPPED) or path.stat().st_size > MAX_FILE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if sum(map(str.isalpha, text)) > 0.45 * len(text):
            yield name, text


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Signature and docstring of every documented class and function."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if not text or len(text) < 60:
            continue
        if isinstance(node, ast.ClassDef):
            yield f"class {node.name}", text
        else:
            yield f"def {node.name}({ast.unparse(node.args)})", text


def chat(module: str, signature: str, text: str) -> str:
    """R1's form: a question, a thought, an answer."""
    name = signature.split("(")[0].split()[-1]
    question = f"What is `{name}` in `{module}`?"
    return f"{USER}{question}{ASSISTANT}<think>\nIt is written `{signature}`.\n</think>\n\n{text}\n"


def of_file(name: str, text: str) -> Iterator[Document]:
    """The source, and the prose inside it."""
    out = held_out(name, 20)
    yield Document("code", out, text)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    documented = list(docstrings(tree))
    parts = [ast.get_docstring(tree) or "", *(f"{signature}\n\n{doc}" for signature, doc in documented)]
    if any(parts):
        yield Document("docs", out, "\n\n\n".join(filter(None, parts)) + "\n")
    if not name.startswith("test/"):
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for signature, doc in documented:
            yield Document("chat", out, chat(module, signature, doc))


def collect(stdlib: Path) -> list[Document]:
    """All documents, each text once; what is held out anywhere is held out everywhere."""
    found = list(topics(stdlib))
    for name, text in sources(stdlib):
        found.extend(of_file(name, text))
    found.sort(key=lambda document: not document.held_out)
    unique = {hashlib.sha256(document.text.strip().encode()).digest(): document for document in reversed(found)}
    return list(unique.values())


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with all 256 bytes, so any UTF-8 text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
    )
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] not in THOUGHT
    return Tokenizer.from_str(json.dumps(spec))


def encode(tokenizer: Tokenizer, documents: list[Document]) -> tuple[np.ndarray, np.ndarray]:
    """One stream of BOS, text, EOS; and where each document starts in it."""
    encoded = tokenizer.encode_batch([d.text + EOS for d in documents])
    rows = [np.array(e.ids, dtype=np.uint16) for e, d in zip(encoded, documents, strict=True)
            for _ in range(1 if d.held_out else REPEATS[d.kind])]  # fmt: skip
    order = np.random.default_rng(0).permutation(len(rows))
    starts = np.cumsum([0, *(len(rows[i]) for i in order[:-1])], dtype=np.int64)
    return np.concatenate([rows[i] for i in order]), starts


def held_out_text(documents: list[Document]) -> str:
    """About HELD_OUT_TEXT bytes, half of them chapters of the reference, half source, in turns."""
    text = {"topic": "", "code": ""}
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.text.encode()).digest()):
        if len(text.get(document.kind, " " * HELD_OUT_TEXT)) < HELD_OUT_TEXT // 2:
            text[document.kind] += document.text[: HELD_OUT_TEXT // 8] + "\n\n"
    return text["topic"] + text["code"]


def prepare(stdlib: Path, work: Path) -> dict[str, int]:
    """Write `tokenizer.json`, `heldout.txt` and `corpus.npz` under `work`; return what was counted."""
    work.mkdir(parents=True, exist_ok=True)
    documents = collect(stdlib)
    kept = [d for d in documents if not d.held_out]
    tokenizer = train_tokenizer([d.text for d in kept if d.kind != "chat"])
    tokenizer.save(str(work / "tokenizer.json"))
    train, starts = encode(tokenizer, kept)
    unseen, _ = encode(tokenizer, [d for d in documents if d.held_out])
    np.savez_compressed(work / "corpus.npz", train=train, starts=starts, heldout=unseen)
    (work / "heldout.txt").write_text(held_out_text([d for d in documents if d.held_out]), encoding="utf-8")
    counts = {f"{kind}_bytes": sum(len(d.text.encode()) for d in kept if d.kind == kind) for kind in REPEATS}
    counts |= {"documents": len(kept), "train_tokens": len(train), "heldout_tokens": len(unseen)}
    (work / "corpus.json").write_text(json.dumps(counts, indent=1) + "\n")
    return counts
