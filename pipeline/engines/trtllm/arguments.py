"""What a version line of TensorRT-LLM would refuse in a file of LLM arguments, and what it would take without effect.

Judged against the rows of `versions/`: every argument of the line, at the top and in sections. An unknown key is explained
as far as it can be: a name of another line, one that is gone, another engine's name, or the nearest known one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pipeline.engines.trtllm.dialects import OWN, dialect, dialects
from pipeline.engines.trtllm.fields import Field, shown
from pipeline.engines.trtllm.versions import VersionLine, known_lines, later_lines, release_order, version_line

__all__ = ["Problem", "earlier_name", "earlier_value", "later_value", "no_tensorrt", "notes", "problems"]

Args = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One argument that the engine refuses, or takes and does otherwise."""

    path: str
    """Dotted."""
    value: Any
    kind: str
    """unknown, type, value, renamed or removed."""
    message: str
    """What is wrong, as a clause: `moe_backend is called moe_config.backend`."""
    fix: str = ""
    """What to write instead; a path for renamed."""

    def __str__(self) -> str:
        return f"{self.message}: {self.fix}" if self.fix and self.kind != "renamed" else self.message


def problems(args: Args, line: VersionLine) -> list[Problem]:
    """Everything that `line` refuses in `args`, in the order of the file."""
    return list(_table(args, line.fields, "", line, ""))


def notes(args: Args, line: VersionLine) -> list[Problem]:
    """What `line` takes, but has another name for, or ignores: it works, and may not on the next line."""
    return list(_noted(args, line.fields, "", line, ""))


def _table(args: Args, fields: Mapping[str, Field], prefix: str, line: VersionLine, kind: str) -> Iterator[Problem]:
    for key, value in args.items():
        path = f"{prefix}{key}"
        field = fields.get(key)
        if field is None:
            if path not in line.aliases:
                yield _unknown(path, value, fields, line)
        elif field.section and isinstance(value, Mapping):
            yield from _section(value, field, path, line)
        elif refused := field.refusal(value):
            yield _refused(path, value, refused, field, line)
        elif (old := earlier_name(path, line, kind)) and old.rpartition(".")[2] not in args:
            why = line.ignored[f"{path}@{kind}"]
            yield Problem(path, value, "renamed", f"{path} is called {old} on {line.line}: {why}", old)


def _section(value: Args, field: Field, path: str, line: VersionLine) -> Iterator[Problem]:
    assert field.section is not None
    union = line.unions.get(field.section)
    if union and value.get(union.by, union.default) is None:
        message = f"{path} does not say its {union.by}"
        yield Problem(f"{path}.{union.by}", None, "value", message, f"one of {', '.join(union.kinds)}")
    yield from _table(value, line.section(field.section, value), f"{path}.", line, line.kind(field.section, value))


def _refused(path: str, value: Any, kind: str, field: Field, line: VersionLine) -> Problem:
    new = later_value(path, value, line) or earlier_value(path, value, line)
    if path == "backend" and str(value).lower() in ("tensorrt", "trt"):
        message = f"backend={value} is not the PyTorch backend, whose arguments these are"
        return Problem(path, value, "removed", message, no_tensorrt(line))
    near = get_close_matches(str(value).upper(), [word.upper() for word in field.words], n=1)
    hint = new or next((word for word in field.words if near and word.upper() == near[0]), "")
    fix = f"did you mean {hint}?" if hint else ""
    return Problem(path, value, kind, f"{path}={shown(value)} must be {field.wanted()}", fix)


def no_tensorrt(line: VersionLine) -> str:
    """What became of the TensorRT backend on a line."""
    last = line.tensorrt_backend
    if last == "always":
        return "that backend builds engines with trtllm-build and has arguments of its own (TrtLlmArgs)"
    return f"the TensorRT backend is gone{'' if last == 'never' else f' after {last}'}: leave backend out"


def later_value(path: str, value: Any, line: VersionLine) -> str:
    """What `line` calls a value that an earlier line had; empty if it was not renamed."""
    tables = (table.get(path, {}) for past in _past(line) for table in (past.values, past.replaced))
    return next((new for table in tables if (new := table.get(str(value)))), "")


def earlier_value(path: str, value: Any, line: VersionLine) -> str:
    """What `line` calls a value that a later line renamed; empty if none did."""
    words = line.known[path].words if path in line.known else ()
    renamed = (version_line(name).values.get(path, {}) for name in later_lines(line.line))
    return next((old for table in renamed for old, new in table.items() if new == value and old in words), "")


def _overruled(path: str, kind: str, args: Args, line: VersionLine) -> str | None:
    """Why a path has no effect in a table of this kind; None where it has, or where `problems` says so."""
    old = earlier_name(path, line, kind)
    return line.ignored.get(f"{path}@{kind}") if old is None or old.rpartition(".")[2] in args else None


def _unknown(path: str, value: Any, fields: Mapping[str, Field], line: VersionLine) -> Problem:
    return (
        _moved(path, value, line)
        or _gone(path, value, line)
        or _later(path, value, line)
        or _foreign(path, value, line)
        or _nearest(path, value, fields, line)
    )


def _past(line: VersionLine) -> Iterator[VersionLine]:
    """The line and those before it, newest first."""
    yield from (version_line(name) for name in reversed(known_lines()) if release_order(name) <= release_order(line.line))


def _moved(path: str, value: Any, line: VersionLine) -> Problem | None:
    for past in _past(line):
        if new := past.moved.get(path):
            return Problem(path, value, "renamed", f"{path} is called {new} since {past.line}", new)
    return None


def _gone(path: str, value: Any, line: VersionLine) -> Problem | None:
    for past in _past(line):
        if why := past.gone.get(path):
            return Problem(path, value, "removed", f"{path} is gone since {past.line}", why)
    return None


def earlier_name(path: str, line: VersionLine, kind: str = "") -> str | None:
    """What `line` calls an argument to which a later line gave the name `path`; `kind` is that of its table, if it has kinds.

    None where `line` knows it by that name, or not at all.
    """
    if path in line.known and f"{path}@{kind}" not in line.ignored:
        return None
    for name in later_lines(line.line):
        later = version_line(name)
        for old, new in (*later.moved.items(), *later.aliases.items()):
            if new == path and old in line.known:
                return old
    return None


def _later(path: str, value: Any, line: VersionLine) -> Problem | None:
    if old := earlier_name(path, line):
        return Problem(path, value, "renamed", f"{path} is called {old} on {line.line}", old)
    for name in later_lines(line.line):
        if path in version_line(name).known:
            return Problem(path, value, "unknown", f"{path} is not an argument of {line.line}, but of {name}", f"serve with {name}")
    return None


def _foreign(path: str, value: Any, line: VersionLine) -> Problem | None:
    for name in (*OWN, *(name for name in dialects() if name not in OWN)):
        spoken = dialect(name)
        meant = spoken.names.get(path.removeprefix("pytorch_backend_config."))
        if meant is None:
            continue
        if meant.to and meant.to != path:
            new = earlier_name(meant.to, line) or meant.to
            return Problem(path, value, "renamed", f"{path} is how {spoken.title} spells {new}", new)
        return Problem(path, value, "removed", f"{path} belongs to {spoken.title}", meant.note)
    if path == "pytorch_backend_config":
        return Problem(path, value, "renamed", "the keys of pytorch_backend_config stand at the top since 1.0", "the top")
    return None


def _nearest(path: str, value: Any, fields: Mapping[str, Field], line: VersionLine) -> Problem:
    prefix, _, key = path.rpartition(".")
    same = sorted((known for known in line.known if known.rpartition(".")[2] == key), key=lambda known: _unstable(known, line))
    elsewhere = [known if "." in known else f"{known} at the top" for known in same]
    place = next(iter(get_close_matches(key, fields, n=1, cutoff=0.8) or elsewhere or get_close_matches(key, fields, n=1)), None)
    fix = f"did you mean {place}?" if place else ""
    where = f" ({prefix})" if prefix else ""
    doubt = "" if line.complete else ", as far as it is known"
    return Problem(path, value, "unknown", f"{key} is not an argument of TensorRT-LLM {line.line}{where}{doubt}", fix)


def _unstable(path: str, line: VersionLine) -> bool:
    return line.fields[path.partition(".")[0]].status != "stable"


def _noted(args: Args, fields: Mapping[str, Field], prefix: str, line: VersionLine, kind: str) -> Iterator[Problem]:
    for key, value in args.items():
        path, field = f"{prefix}{key}", fields.get(key)
        if new := line.aliases.get(path):
            yield Problem(path, value, "renamed", f"{path} is still taken, and is called {new} since {_since(path)}", new)
        elif why := line.ignored.get(path) or _overruled(path, kind, args, line):
            yield Problem(path, value, "removed", f"{path} is taken without effect", why)
        elif field and field.status == "deprecated":
            yield Problem(path, value, "removed", f"{path} is deprecated on {line.line}", "leave it out")
        if field and field.section and isinstance(value, Mapping):
            yield from _noted(value, line.section(field.section, value), f"{path}.", line, line.kind(field.section, value))


def _since(path: str) -> str:
    return next(name for name in known_lines() if path in version_line(name).aliases)
