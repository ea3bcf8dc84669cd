"""A file of LLM arguments, in the names of any version line, of old guides, vLLM or SGLang, on the line that is asked for.

Every argument is first given the name that the newest line knows, then the one of the line asked for; so older to newer and newer
to older are the same work. What has no equivalent is left out and told, with the reason; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.engines.trtllm.arguments import Problem, earlier_name, earlier_value, later_value, notes, problems
from pipeline.engines.trtllm.dialects import OWN, Spelling, dialect, dialect_of
from pipeline.engines.trtllm.fields import shown
from pipeline.engines.trtllm.versions import VersionLine, known_lines, version_line

__all__ = ["Change", "Migration", "migrate"]

Args = Mapping[str, Any]
_OLD_SECTION = "pytorch_backend_config."


@dataclass(frozen=True, slots=True)
class Change:
    """One argument that is spelled otherwise."""

    path: str
    value: Any
    to: str
    new_value: Any
    note: str = ""

    def __str__(self) -> str:
        old, new = shown(self.value), shown(self.new_value)
        text = f"{self.path} is now {self.to}" if old == new else f"{self.path}: {old} is now {self.to}: {new}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(slots=True)
class Migration:
    """What became of a file."""

    source: str
    """In whose names it was."""
    line: str
    args: dict[str, Any] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    lost: list[Problem] = field(default_factory=list)
    """Arguments that are left out."""


def migrate(args: Args, line: VersionLine, source: str | None = None) -> Migration:
    """`args` in the names and values of `line`; `source` is their dialect, or "trtllm", where their own names do not tell."""
    written, args = args, _underscored(args)
    foreign = dialect_of(args) if source is None else None if source == "trtllm" else source
    done = Migration(dialect(foreign).title if foreign else _own_source(args, line), line.line)
    moves = [move for path, value in _leaves(args, line) for move in _moves(done, path, value, args, foreign, line)]
    kinds = {move.to: str(move.new_value) for move in moves}
    for move in sorted(moves, key=lambda move: move.to.count(".")):  # a table that is null before what is in it
        _place(done, move, kinds, line)
    while refused := problems(done.args, line):
        done.lost += refused
        for problem in refused:
            _remove(done.args, problem.path)
    _as_written(done, written)
    return done


def _underscored(args: Args) -> dict[str, Any]:
    """Options as they are in files for command lines (`max-model-len: 8192`, tables as JSON) under the names of arguments."""
    taken = {str(key): _table(value) for key, value in args.items()}
    return {(name if (name := key.replace("-", "_")) == key or name not in taken else key): value for key, value in taken.items()}


def _table(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _as_written(done: Migration, written: Args) -> None:
    """Give what is told the spelling of the file."""
    hyphens = {str(key).replace("-", "_"): str(key) for key in written if "-" in str(key)}
    told = {item.path.partition(".")[0] for item in (*done.changes, *done.lost)}
    done.changes += [
        Change(key, done.args[name], name, done.args[name])
        for name, key in hyphens.items()
        if name not in told and name in done.args
    ]

    def old(path: str) -> str:
        head, dot, rest = path.partition(".")
        return f"{hyphens.get(head, head)}{dot}{rest}"

    done.changes = [replace(item, path=old(item.path)) for item in done.changes]
    done.lost = [
        replace(item, path=old(item.path), message=item.message.replace(item.path, old(item.path))) for item in done.lost
    ]  # fmt: skip


def _own_source(args: Args, wanted: VersionLine) -> str:
    """The line that finds least wrong with a file, `wanted` or the newest; or TensorRT-LLM's dialect that no line takes."""
    lines = [wanted, *(version_line(name) for name in reversed(known_lines()))]
    line = min(lines, key=lambda line: len(problems(args, line)) + len(notes(args, line)))
    odd = [problem.path.removeprefix(_OLD_SECTION) for problem in problems(args, line) if problem.kind in ("renamed", "removed")]
    spoken = [name for name in OWN if any(_spelled(path, name) for path in odd)]
    if _OLD_SECTION.rstrip(".") in args:
        spoken = ["before_1_0"]
    return dialect(spoken[0]).title if spoken else f"TensorRT-LLM {line.line}"


def _moves(done: Migration, path: str, value: Any, args: Args, foreign: str | None, line: VersionLine) -> Iterator[Change]:
    """One argument in the newest line's names; nothing for what has no equivalent, which is noted in `done`."""
    meant = _meaning(path, foreign, line)
    if meant is None or meant.to is None:
        done.lost.append(_unknown(path, value, meant, line))
        return
    try:
        for spelling in (meant, meant.also):
            if spelling and spelling.to:
                yield Change(path, value, spelling.to, spelling.value(value, args), spelling.note)
    except LookupError:
        done.lost.append(Problem(path, value, "value", f"{path}={shown(value)} has no equivalent"))


def _place(done: Migration, move: Change, kinds: Mapping[str, str], line: VersionLine) -> None:
    """Put one argument where `line` has it."""
    to = earlier_name(move.to, line, _kind(move.to, kinds, line)) or move.to
    new = later_value(to, move.new_value, line) or earlier_value(to, move.new_value, line) or move.new_value
    if to not in line.known and not _inside(to, line):
        done.lost.append(_unknown(move.path, move.value, None, line))
    elif not _set(done.args, to, new):
        message = f"{move.path} is left out, because {to} is set otherwise"
        done.lost.append(Problem(move.path, move.value, "removed", message))
    elif (move.path, move.value) != (to, new):
        done.changes.append(replace(move, to=to, new_value=new))


def _kind(path: str, kinds: Mapping[str, str], line: VersionLine) -> str:
    """Which kind of its table an argument is in, where tables have kinds."""
    head = path.partition(".")[0]
    field = line.fields.get(head)
    union = line.unions.get(field.section or "") if field else None
    return kinds.get(f"{head}.{union.by}", union.default or "") if union else ""


def _inside(path: str, line: VersionLine) -> bool:
    """Whether it is a key of a table that the line takes as it is."""
    return any(path.startswith(f"{known}.") for known, field in line.known.items() if "dict" in field.types)


def _meaning(path: str, foreign: str | None, line: VersionLine) -> Spelling | None:
    """What a path means, in the newest line's names; None if nobody knows it."""
    bare = path.removeprefix(_OLD_SECTION)
    if foreign and (meant := _spelled(bare, foreign)):
        return meant
    newest = _newest_name(bare)
    if newest in line.known or earlier_name(newest, line):
        return Spelling(newest)
    return next((meant for name in OWN if (meant := _spelled(bare, name))), None)


def _spelled(path: str, name: str) -> Spelling | None:
    """What a dialect means by a path, or by the table that it is in, where that has no equivalent as a whole."""
    names = dialect(name).names
    if meant := names.get(path):
        return replace(meant, to=meant.to and _newest_name(meant.to))
    parts = path.split(".")
    tables = (names.get(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    return next((table for table in tables if table and table.to is None), None)


def _newest_name(path: str) -> str:
    """Follow an argument through all lines."""
    for name in known_lines():
        line = version_line(name)
        path = line.moved.get(path) or line.aliases.get(path) or path
    return path


def _unknown(path: str, value: Any, meant: Spelling | None, line: VersionLine) -> Problem:
    if meant is not None:
        return Problem(path, value, "removed", f"{path} has no equivalent", meant.note)
    nested: Any = value
    for part in reversed(path.removeprefix(_OLD_SECTION).split(".")):
        nested = {part: nested}
    found = [problem for problem in problems(nested, line) if problem.value == value]
    return found[0] if found else Problem(path, value, "unknown", f"{path} is not an argument of TensorRT-LLM {line.line}")


def _leaves(args: Args, line: VersionLine, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted path; tables that are values, and empty ones, are not taken apart."""
    for key, value in args.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not _is_value(path, line):
            yield from _leaves(value, line, f"{path}.")
        else:
            yield path, value


def _is_value(path: str, line: VersionLine) -> bool:
    """Whether the line takes any table here, or another one where it has no such argument."""
    lines = [line] if path in line.known else map(version_line, known_lines())
    fields = [one.known[path] for one in lines if path in one.known]
    return any("dict" in field.types and not field.section for field in fields)


def _set(args: dict[str, Any], path: str, value: Any) -> bool:
    """False where something else is there."""
    *parents, key = path.split(".")
    for parent in parents:
        args = args.setdefault(parent, {})
        if not isinstance(args, dict):
            return False
    if isinstance(value, Mapping) and not value and isinstance(args.get(key), dict):
        return True
    if key in args and args[key] != value:
        return False
    args[key] = dict(value) if isinstance(value, Mapping) else value
    return True


def _remove(args: dict[str, Any], path: str) -> None:
    """Take out an argument, or the table that lacks it."""
    head, _, rest = path.partition(".")
    inner = args.get(head)
    if isinstance(inner, dict) and rest and (rest.partition(".")[0] in inner):
        _remove(inner, rest)
    else:
        args.pop(head, None)
