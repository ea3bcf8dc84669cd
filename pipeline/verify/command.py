"""The arguments of `verify DIR [checkpoint=SOURCE] [out=FOLDER] [verify.KEY=VALUE]`, which needs no hardware."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.core.events import Console
from pipeline.core.source import EMBEDDED

if TYPE_CHECKING:
    from pipeline.cli import Options

__all__ = ["folders_of", "verify_command"]


def folders_of(words: list[str]) -> list[str]:
    """The words that name a folder instead of a setting."""
    return [word for word in words if "=" not in word or Path(word).is_dir()]


def verify_command(options: Options, console: Console) -> int:
    """Check one folder; 4 where an error was found."""
    from pipeline.verify.foreign import verify_folder

    folders = folders_of(options.overrides)
    if len(folders) != 1:
        raise ConfigError(f"verify takes one checkpoint folder, but got {len(folders)}: {', '.join(folders)}.")
    settings = dict(word.split("=", 1) for word in options.overrides if word not in folders)
    source, out = settings.pop("checkpoint", None), settings.pop("out", None)
    if odd := sorted(name for name in settings if not name.startswith("verify.")):
        known = "checkpoint=SOURCE, out=FOLDER and verify.KEY=VALUE"
        raise ConfigError(f"verify DIR does not know {', '.join(odd)}: it takes {known}.")
    if out:
        _require_writable(Path(out))
    limits = load(["+hw=cpu", *(f"{name}={value}" for name, value in settings.items())], options.config_dir).verify
    progress = console.stage_started("verify", f"reads {folders[0]}")
    verdict = verify_folder(_folder(folders[0]), _folder(source) if source else None, limits, progress)
    console.stage_ended("verify", "built")
    if out:
        verdict.write(Path(out), limits)
    for line in verdict.lines() if not options.as_json else ():
        console.line(line)
    console.result({"command": "verify", **verdict.plain()} if options.as_json else {})
    return verdict.exit_code


def _require_writable(out: Path) -> None:
    """Before an hour of reading, not after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written ({error.strerror or error}): name a folder that can.") from error


def _folder(named: str) -> Path:
    data = Path(__file__).resolve().parents[1] / "data"
    folder = data / named.removeprefix(EMBEDDED) if named.startswith(EMBEDDED) else Path(named).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{named} is not a folder: name a Hugging Face checkpoint folder.")
    return folder
