"""Command `migrate`: a file of LLM arguments, rewritten for a version line, with what changed and what was left out.

It may be one of `trtllm-serve disaggregated`, too, or a Triton model.yaml: what is no LLM argument there stays as it is. The text
is YAML whose comments tell the story, so it can be piped as it is; with out= it is written there at once, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.engines import TrtllmEngineConfig
from pipeline.core.errors import ConfigError, GateError
from pipeline.core.events import Console
from pipeline.core.jsonio import write_atomic
from pipeline.engines.trtllm.arguments import Problem
from pipeline.engines.trtllm.dialects import OWN, dialect, dialects
from pipeline.engines.trtllm.llm_args import to_yaml
from pipeline.engines.trtllm.migrate import Migration, migrate
from pipeline.engines.trtllm.versions import VersionLine, version_line
from pipeline.lint.args.disaggregated import OF_FILE, OF_SERVERS, SECTIONS
from pipeline.lint.document import Document, read_document
from pipeline.lint.names import OWN_KEYS

if TYPE_CHECKING:
    from pipeline.cli import Options

__all__ = ["migrate_command", "text_of"]


def migrate_command(options: Options, console: Console) -> int:
    """0, or 4 where an argument had to be left out."""
    file, settings = _words(options.overrides)
    line = version_line(settings.get("version", TrtllmEngineConfig().version))
    done = migrated(read_document(file), line, settings.get("from"))
    text = text_of(done, file.name)
    if "out" in settings:
        _write(Path(settings["out"]), text)
    for said in () if options.as_json else _told(done) if "out" in settings else text.splitlines():
        console.line(said)
    console.result({"command": "migrate", **plain(done)} if options.as_json else {})
    return GateError.exit_code if done.lost else 0


def migrated(document: Document, line: VersionLine, source: str | None) -> Migration:
    """The file's arguments and, in one of `trtllm-serve disaggregated`, those of each side."""
    values = document.values
    sides = {name: values[name] for name in SECTIONS if isinstance(values.get(name), Mapping)}
    own = (*OF_FILE, *sides) if sides else OWN_KEYS
    parts = {"": (own, values)} | {f"{name}.": (OF_SERVERS, table) for name, table in sides.items()}
    done = Migration("", line.line)
    sources = []
    for prefix, (kept, table) in parts.items():
        args = {key: value for key, value in table.items() if key not in kept}
        part = migrate(args, line, source)
        sources += [part.source] if args or not sides else []
        whole = {key: value for key, value in table.items() if key in kept and key not in sides} | part.args
        done.args |= {prefix.rstrip("."): whole} if prefix else whole
        done.changes += [replace(item, path=f"{prefix}{item.path}", to=f"{prefix}{item.to}") for item in part.changes]
        where = f"{prefix.rstrip('.')}: " if prefix else ""
        done.lost += [replace(item, path=f"{prefix}{item.path}", message=f"{where}{item.message}") for item in part.lost]
    done.source = " and ".join(dict.fromkeys(sources))
    done.lost += [Problem(path, None, "value", f"{path} is given twice, and the last one counts") for path in document.twice]
    return done


def text_of(done: Migration, name: str) -> str:
    """The new file, with what happened as comments above it."""
    head = [f"{name}: migrated from {done.source} to TensorRT-LLM {done.line}", *_told(done)]
    return "".join(f"# {said}\n" for said in head) + to_yaml(done.args)


def plain(done: Migration) -> dict[str, Any]:
    """For JSON."""
    return {
        "from": done.source,
        "to": done.line,
        "arguments": done.args,
        "changed": [asdict(change) for change in done.changes],
        "left_out": [asdict(problem) for problem in done.lost],
    }


def _told(done: Migration) -> list[str]:
    changed = [f"changed: {change}" for change in done.changes]
    return [*changed, *(f"left out: {problem}" for problem in done.lost)] or ["nothing had to be changed"]


def _words(words: list[str]) -> tuple[Path, dict[str, str]]:
    files = [word for word in words if "=" not in word or Path(word).is_file()]
    settings = dict(word.split("=", 1) for word in words if word not in files)
    foreign = [name for name in dialects() if name not in OWN]
    if len(files) != 1:
        raise ConfigError(f"migrate takes one file, but got {len(files)}: migrate FILE [version=1.2] [out=FILE].")
    if odd := sorted(settings.keys() - {"version", "out", "from"}):
        raise ConfigError(f"migrate does not know {', '.join(odd)}: it takes version=LINE, out=FILE and from=NAME.")
    if settings.get("from", "trtllm") not in ("trtllm", *foreign):
        known = ", ".join(f"{name} ({dialect(name).title})" for name in foreign)
        raise ConfigError(f"from={settings['from']} is not known: choose trtllm, {known}, or leave it to the file.")
    return Path(files[0]), settings


def _write(out: Path, text: str) -> None:
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"out={out} is {'a folder' if out.is_dir() else 'in no folder that exists'}: name a file to write.")
    write_atomic(out, text.encode())
