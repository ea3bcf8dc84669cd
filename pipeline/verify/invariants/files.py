"""The files: whole, in one index, and nothing beside them that a loader might take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator

from pipeline.checkpoint.problems import Problem
from pipeline.checkpoint.source import INDEX
from pipeline.inspect.contents import table_of
from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Fault, Rule, Subject

__all__ = ["RULES"]

PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
LEFTOVERS = frozenset({".part", ".partial", ".incomplete", ".tmp", ".aria2", ".crdownload"})
TOLD = ("no-weights", "unreadable-file", "file-size", "byte-ranges", "unreadable-index", "no-index", "name-in-two-shards",
        "tensor-without-index", "index-without-tensor", "no-config", "unreadable-config")  # fmt: skip
"""Kinds of problem that reading the headers tells, as rules are called."""


def _told(kind: str) -> Callable[[Subject], Iterable[Fault]]:
    """What opening the folder said of this kind; the reason is part of the text already."""

    def check(subject: Subject) -> Iterator[Fault]:
        for problem in subject.contents.problems:
            if problem.kind.replace(" ", "-") == kind:
                yield Fault(problem.tensor, _short(problem, subject))

    return check


def _other(subject: Subject) -> Iterator[Fault]:
    for problem in subject.contents.problems:
        if problem.kind.replace(" ", "-") not in TOLD:
            yield Fault(problem.tensor, _short(problem, subject))


def _short(problem: Problem, subject: Subject) -> str:
    """File names without their folder."""
    return problem.text.rstrip(".").replace(f"{subject.contents.folder}{os.sep}", "")


def _stray_files(subject: Subject) -> Iterator[Fault]:
    contents = subject.contents
    for file in sorted(set(contents.folder.glob("*.safetensors")) - set(contents.shards)):
        yield Fault("", f"{file.name} lies beside the index, which does not name it")


def _pickles(subject: Subject) -> Iterator[Fault]:
    for file in sorted(subject.contents.folder.iterdir()):
        if file.suffix.lower() in PICKLES:
            yield Fault("", f"{file.name} is a pickle; it was not read")


def _leftovers(subject: Subject) -> Iterator[Fault]:
    folder = subject.contents.folder
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in LEFTOVERS:
            yield Fault("", f"{file.name} was left by a download or a write that did not end")


def _index_size(subject: Subject) -> Iterator[Fault]:
    contents = subject.contents
    try:
        index = json.loads((contents.folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    said = table_of(table_of(index).get("metadata")).get("total_size")
    if contents.tensors and not contents.problems and said != contents.num_bytes:
        yield Fault("", f"{INDEX} gives total_size {said}, the tensors take {contents.num_bytes}")


RULES = (
    Rule("no-weights", ERROR, _told("no-weights"), "there is nothing to load", "point at the folder with the safetensors files"),
    Rule(
        "unreadable-file", ERROR, _told("unreadable-file"), "the shard is half-written or damaged, and its tensors are lost",
        "copy or write the file again",
    ),
    Rule("file-size", ERROR, _told("file-size"), "a copy or a write was cut off", "copy or write the file again"),
    Rule(
        "byte-ranges", ERROR, _told("byte-ranges"), "tensors overlap or have holes between them, which strict loaders refuse",
        "write the shard again with safetensors",
    ),
    Rule(
        "unreadable-index", ERROR, _told("unreadable-index"), "loaders find no tensor by it",
        f"write {INDEX} again from the headers of the shards",
    ),
    Rule(
        "no-index", ERROR, _told("no-index"), "loaders look for one where there are several shards",
        f"write {INDEX} from the headers of the shards",
    ),
    Rule(
        "name-in-two-shards", ERROR, _told("name-in-two-shards"), "which of the two is loaded depends on the loader",
        "remove the stale shard, or the stale copy",
    ),
    Rule(
        "tensor-without-index", ERROR, _told("tensor-without-index"),
        "loaders that go by the index never read it; of a scale they keep whatever memory holds",
        f"write {INDEX} from the headers of the shards: every tensor, the scales too",
    ),
    Rule(
        "index-without-tensor", ERROR, _told("index-without-tensor"), "loaders stop at it",
        f"download the shard again, or write {INDEX} from the headers",
    ),
    Rule(
        "no-config", ERROR, _told("no-config"), "loaders cannot tell the architecture",
        "copy config.json from the source, without its quantization_config",
    ),
    Rule("unreadable-config", ERROR, _told("unreadable-config"), "loaders stop at it", "write the file again"),
    Rule("file-fault", ERROR, _other, "the folder is not what its index says", "write the checkpoint again"),
    Rule(
        "file-without-index", WARNING, _stray_files, "loaders that take every file read it as well",
        "remove it, or add its tensors to the index",
    ),
    Rule(
        "pickle", WARNING, _pickles, "loading one runs whatever code it holds",
        "remove it; safetensors files hold the same weights",
    ),
    Rule("leftover", WARNING, _leftovers, "a shard may be missing or stale", "finish the download, or remove the file"),
    Rule(
        "index-size", NOTE, _index_size, "tools that plan memory by the index are misled",
        f"write the sum of all tensors' bytes into {INDEX}",
    ),
)  # fmt: skip
