"""The command line: `python -m pipeline COMMAND [hydra overrides]`.

Hydra has no sub-commands, so the first word is taken off here and the rest goes to `config.load`. The command never
enters the configuration: `plan`, `build` and `explain` see the same config and so the same stage keys.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipeline import __version__
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.events import Console, make_console
from pipeline.core.process import STOPS

__all__ = ["COMMANDS", "Options", "main"]

USAGE = """\
usage: python -m pipeline COMMAND [+hw=NAME] [GROUP=CHOICE ...] [KEY=VALUE ...] [options]

From a DeepSeek-R1-class checkpoint to a verified Triton deployment.

commands
{commands}

options
  -h, --help         this text, or that of a command
  --json             JSON lines instead of text
  --config-dir DIR   a folder of your own config groups, beside conf/ (DIR/hw/mine.yaml is +hw=mine)
  --cfg              print the resolved configuration and stop
  --dry-run          (convert) show what would be done to each tensor; write nothing
  --version          print the version and stop

exit codes
  0 done   1 internal error   2 configuration or input refused   3 a stage failed   4 the verify gate refused
  5 a tool is missing here    130 interrupted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says beside the command."""

    overrides: list[str]
    as_json: bool = False
    config_dir: Path | None = None
    show_config: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One command: a line for the table, a text for its own help, and the function in `commands.py`."""

    summary: str
    details: str
    function: str
    needs_config: bool = True
    arguments: str = ""
    """What it takes beside the settings."""


COMMANDS: dict[str, Command] = {
    "plan": Command(
        "choose precision, parallelism, batch and KV limits; show memory per rank",
        "Needs no GPU, no torch and no checkpoint: `plan +hw=b200 model=deepseek_r1`.",
        "plan",
    ),
    "convert": Command(
        "convert the checkpoint to the recipe of quant=",
        "Streams shard by shard; a killed run goes on from the last finished shard. --dry-run plans from the headers and\n"
        "block scales alone (seconds at any size) and writes nothing: action, tensors and bytes of each module class, and\n"
        "every problem; with --json the action, source range and output shard of each parameter. It exits with 2 when\n"
        "there are problems.",
        "convert",
        arguments="[--dry-run] ",
    ),
    "verify": Command(
        "compare the converted weights with the source, and gate on the result",
        "Thresholds are verify.max_kl, verify.min_top1, verify.max_ppl_ratio and verify.min_sqnr_db.",
        "verify",
    ),
    "engine": Command(
        "build the engine of engine=", "engine=torch compiles here; engine=trtllm writes a TensorRT-LLM bundle.", "engine"
    ),
    "package": Command(
        "write the Triton model repository",
        "Everything tritonserver needs lies in repository/; the manifest lies beside it.",
        "package",
    ),
    "build": Command(
        "all of these, in order; what is up to date is left alone",
        "A second run is a no-op; changing one leaf rebuilds what depends on it (see explain).",
        "package",
    ),
    "serve": Command(
        "start tritonserver on the result, print its URLs, stop cleanly on Ctrl-C",
        "Builds first if needed. Ports: serve.http_port, serve.grpc_port, serve.metrics_port (0: a free one).",
        "serve",
    ),
    "smoke": Command(
        "start tritonserver, run the contract against it, measure TTFT, TPOT, tokens/s",
        "Builds first if needed. serve.url=HOST:PORT probes a server that already runs.",
        "smoke",
    ),
    "explain": Command("say for each stage whether it would run, and which leaf changed", "Runs nothing.", "explain"),
    "inspect": Command(
        "what a checkpoint is, and what is odd about it, from its headers",
        "DIR is a Hugging Face checkpoint folder. Shows format, tensors and bytes of each module class, what the configs\n"
        "declare, whether MTP is there, and each oddity as a sentence. With tp=8 ep=8 attention_dp=true (gpus_per_node=8) also\n"
        "the bytes that one rank loads. Needs no configuration.",
        "inspect",
        needs_config=False,
        arguments="DIR [tp=N] [ep=N] [attention_dp=true] ",
    ),
    "doctor": Command(
        "what this machine can build, serve and run, with versions", "Needs no configuration.", "doctor", needs_config=False
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["stage"]:  # a stage in its own process, started by an executor
        from pipeline.executors.local import child_main

        return child_main(Path(words[1]))
    try:
        return _run(words)
    except PipelineError as error:
        if "--json" in words:
            make_console(as_json=True).result({"exit_code": error.exit_code, "error": str(error)})
        print(
            "\n".join(f"error: {line}" if not line.startswith(" ") else line for line in str(error).splitlines()), file=sys.stderr
        )
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: finished stages are kept, run the same command to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise ConfigError(f"There is no command {name}: choose one of {', '.join(COMMANDS)}.")
    if "-h" in rest or "--help" in rest:
        print(_command_help(name))
        return 0
    options = _parse(rest)
    if options.dry_run and "--dry-run" not in COMMANDS[name].arguments:
        raise ConfigError(f"{name} has no --dry-run: only convert has; explain says what {name} would rebuild.")
    if options.show_config:
        from pipeline.config.load import resolved_yaml

        print(resolved_yaml(options.overrides, options.config_dir), end="")
        return 0
    for number in STOPS[1:]:
        signal.signal(number, _interrupt)
    return _function(name)(options, make_console(as_json=options.as_json))


def _function(name: str) -> Callable[[Options, Console], int]:
    from pipeline import commands

    return getattr(commands, COMMANDS[name].function)


def _parse(words: list[str]) -> Options:
    overrides: list[str] = []
    as_json, show_config, dry_run, config_dir = False, False, False, None
    rest = iter(words)
    for word in rest:
        match word.split("=", 1):
            case ["--json"]:
                as_json = True
            case ["--cfg"]:
                show_config = True
            case ["--dry-run"]:
                dry_run = True
            case ["--config-dir", folder]:
                config_dir = Path(folder)
            case ["--config-dir"]:
                config_dir = Path(next(rest, ""))
            case [option, *_] if option.startswith("-"):
                raise ConfigError(
                    f"There is no option {option}: known are --json, --config-dir DIR, --cfg, --dry-run and --help; "
                    f"settings are KEY=VALUE."
                )
            case _:
                overrides.append(word)
    return Options(
        overrides=overrides, as_json=as_json, config_dir=config_dir, show_config=show_config, dry_run=dry_run
    )


def _usage() -> str:
    return USAGE.format(commands="\n".join(f"  {name:9}{command.summary}" for name, command in COMMANDS.items()))


def _command_help(name: str) -> str:
    from pipeline.config.load import choices
    from pipeline.share import share

    command = COMMANDS[name]
    settings = "+hw=NAME [GROUP=CHOICE ...] [KEY=VALUE ...] " if command.needs_config else ""
    lines = [
        f"usage: python -m pipeline {name} {command.arguments}{settings}[--json]",
        "",
        command.summary + ".",
        command.details,
    ]
    if command.needs_config:
        groups = ["hw", *sorted(path.name for path in share("conf").iterdir() if path.is_dir() and path.name != "hw")]
        lines += [
            "",
            "config groups",
            *(f"  {'+' if group == 'hw' else ''}{group}=  {', '.join(choices(group))}" for group in groups),
        ]
        lines += ["", "Every key and its default: --cfg."]
    return "\n".join(lines)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
