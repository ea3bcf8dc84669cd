"""The command line: `python -m pipeline COMMAND [hydra overrides]`.

Hydra has no sub-commands, so the first word is taken off here and the rest goes to `config.load`. The command never
enters the configuration: `plan`, `build` and `explain` see the same config and so the same stage keys.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

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
  --dry-run          (convert, gc) show what would be done; write and remove nothing
  --keep N           (gc) results of each stage to keep beside those in use (1)
  --ablate           (plan) what each optimisation is worth here, predicted and published
  --compare FILE     (plan) a file of LLM arguments beside the plan's, both predicted
  --target           (doctor) whether this node can run what the settings plan
  --draw FILE        (inspect) the network as FILE.svg, or FILE.dot for Graphviz
  --sarif FILE       (lint) the findings as SARIF 2.1.0, too
  --rules            (lint) every rule, and what no file shows
  --version          print the version and stop

exit codes
  0 done   1 internal error   2 configuration or input refused   3 a stage failed   4 verify or lint found an error
  5 a tool is missing here    130 interrupted   141 nobody reads the output"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says beside the command."""

    overrides: list[str]
    as_json: bool = False
    config_dir: Path | None = None
    show_config: bool = False
    dry_run: bool = False
    keep: int = 1
    ablate: bool = False
    compare: Path | None = None
    draw: Path | None = None
    target: bool = False
    sarif: Path | None = None
    rules: bool = False


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
        "choose precision, parallelism, batch and KV limits; predict speed; show memory per rank",
        "Needs no GPU, no torch and no checkpoint: `plan +hw=b200 model=deepseek_r1 slo.tpot_ms=50`. All layouts, drafts, batches\n"
        "and steps that fit are predicted; the most tokens/s/GPU within slo.* is chosen, and every choice says why.\n"
        "report.html has the Pareto front, memory, decisions and rules. --ablate tells what each optimisation is worth,\n"
        "--compare FILE.yaml puts your own LLM arguments beside the plan's.",
        "plan",
        arguments="[--ablate] [--compare FILE] ",
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
        "Thresholds are verify.max_kl, verify.min_top1, verify.max_ppl_ratio and verify.min_sqnr_db; verify.sample=N compares N\n"
        "experts of each layer, verify.sensitivity=true each layer and class alone. With a folder it checks that checkpoint,\n"
        "whoever wrote it (ModelOpt, compressed-tensors, AutoAWQ, GPTQ), against a table of invariants, and against its source\n"
        "where checkpoint= names it; out=FOLDER keeps the report and the heat map. It exits with 4 when it finds an error.",
        "verify",
        arguments="[DIR [checkpoint=SOURCE] [out=FOLDER]] ",
    ),
    "lint": Command(
        "find mistakes in anyone's LLM arguments, checkpoint or Triton repository",
        "Takes YAML files of LLM arguments (of trtllm-serve disaggregated, too), checkpoint folders, Triton model repositories or\n"
        "one model of them (llmapi, vLLM, NVIDIA's ensembles, filled in or not), and what engine and package wrote. Each finding\n"
        "has its rule, place, reason, fix and source. version= is the release of TensorRT-LLM (else the line that fits best),\n"
        "triton= that of the container; with hw= (and model=, else deepseek_r1) the planner's rules judge, too, and with\n"
        "workload= or workload.isl= those about the load. It exits with 4 when it finds an error.",
        "lint",
        needs_config=False,
        arguments="PATH... [version=1.2] [triton=25.12] [hw=NAME [model=NAME] [SETTING=VALUE ...]] [--sarif FILE] | --rules ",
    ),
    "migrate": Command(
        "rewrite a file of LLM arguments for another version of TensorRT-LLM",
        "FILE is a YAML or JSON file in the names of any version line, of guides before 1.0, of trtllm-serve's command line, of\n"
        "vLLM or of SGLang (from=vllm says so where its names do not); one of trtllm-serve disaggregated, or a model.yaml of\n"
        "Triton, too. Prints the file for version= (older or newer), with what changed and what has no equivalent, and why, as\n"
        "comments; out=FILE writes it. It exits with 4 when something had to be left out.",
        "migrate",
        needs_config=False,
        arguments="FILE [version=1.2] [out=FILE] [from=vllm|sglang] ",
    ),
    "engine": Command(
        "build the engine of engine=", "engine=torch compiles here; engine=trtllm writes a TensorRT-LLM bundle.", "engine"
    ),
    "onnx": Command(
        "your own torch module to ONNX and TensorRT, checked by onnxruntime",
        "FACTORY() returns (module, args, dynamic_shapes), as torch.export.export takes them; other KEY=VALUE are its arguments.\n"
        "DIR gets model.onnx with its weights in model.onnx.data, what onnxruntime computes beside what torch computes, and, with\n"
        "targets=[120], model.engine by TensorRT's ONNX parser. It refuses where the two differ by more than tolerance=, a share\n"
        "of the largest value. pipeline.onnx.decoder:absorbed is an example. Needs no configuration.",
        "onnx",
        needs_config=False,
        arguments="MODULE:FACTORY out=DIR [targets=[120]] [library=tensorrt_rtx] [tolerance=0.001] [opset=23] [KEY=VALUE ...] ",
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
        "Builds first if needed. Ports: serve.http_port, serve.grpc_port, serve.metrics_port (0: a free one).\n"
        "serve.openai_port=9000 adds OpenAI's API (chat, completions, streams); with serve.url=HOST:PORT only that, in front\n"
        "of a server that already runs: then nothing is built, and serve.tokenizer=DIR names the model's tokenizer.",
        "serve",
    ),
    "smoke": Command(
        "start tritonserver, run the contract against it, measure TTFT, TPOT, tokens/s",
        "Builds first if needed. serve.url=HOST:PORT probes a server that already runs, and builds nothing.",
        "smoke",
    ),
    "explain": Command("say for each stage whether it would run, and which leaf changed", "Runs nothing.", "explain"),
    "gc": Command(
        "remove old results, and what stopped attempts left, from the store",
        "Keeps the results in use (those that latest/ names), the newest --keep results of each stage, and as many unfinished\n"
        "conversions, which the next run goes on from. --dry-run lists what would go. Refuses while a build is at work.",
        "gc",
        needs_config=False,
        arguments="[--keep N] [--dry-run] [store.root=DIR] ",
    ),
    "inspect": Command(
        "what a checkpoint is, and what is odd about it, from its headers",
        "DIR is a Hugging Face checkpoint folder. Shows format, tensors and bytes of each module class, what the configs\n"
        "declare, whether MTP is there, and each oddity as a sentence. With tp=8 ep=8 attention_dp=true (gpus_per_node=8) also\n"
        "the bytes that one rank loads. Of a result of engine=tensorrt it shows the engines; network=NAME each kernel with its\n"
        "layers, too, and --draw FILE.svg draws that network, its clusters that begin with open= in full. Needs no configuration.",
        "inspect",
        needs_config=False,
        arguments="DIR [tp=N] [ep=N] [attention_dp=true] | DIR [network=NAME] [--draw FILE.svg [open=PREFIX,...]] ",
    ),
    "doctor": Command(
        "what this machine can build, serve and run, with versions",
        "Needs no configuration. With --target and the settings of a plan it asks this node for everything that the plan needs\n"
        "of it: GPUs, memory, driver, NVLink and its fabric, IMEX, shared memory, limits, containers, MPI, disk, ports. Each line\n"
        "says what was found, what is wanted, and what to do; it exits with 5 when something is missing. Run it on every node.",
        "doctor",
        needs_config=False,
        arguments="[--target +hw=NAME model=NAME [KEY=VALUE ...]] ",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    _open_standard_streams()
    try:
        code = _guarded(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has left
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _discard_output()
        where = error.filename or "standard output or the store"
        print(f"error: {where}: {error.strerror or error}. What was finished before is kept.", file=sys.stderr)
        return 1


def _guarded(words: list[str]) -> int:
    """Errors of ours as sentences, one a line."""
    try:
        return _stage(words[1:]) if words[:1] == ["stage"] else _run(words)
    except PipelineError as error:
        if "--json" in words:
            make_console(as_json=True).result({"exit_code": error.exit_code, "error": str(error)})
        lines = (line if line.startswith(" ") else f"error: {line}" for line in str(error).splitlines())
        print("\n".join(lines), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: finished stages are kept, run the same command to go on", file=sys.stderr)
        return 130


def _stage(words: list[str]) -> int:
    """A stage in its own process, started by an executor."""
    from pipeline.executors.local import child_main

    if len(words) != 1 or not Path(words[0]).is_file():
        raise ConfigError("`stage` runs one stage for an executor: give the CALL.json that it wrote.")
    return child_main(Path(words[0]))


def _open_standard_streams() -> None:
    """A closed one (`>&-`) would lend its number to the next file that is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _discard_output() -> None:
    """Let what cannot be written go nowhere, so that the interpreter can end in peace."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with contextlib.suppress(OSError):
            sys.stdout.flush()


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
        raise ConfigError(f"{name} has no --dry-run: only convert and gc have; explain says what {name} would rebuild.")
    if (options.ablate or options.compare) and name != "plan":
        raise ConfigError(f"{name} has neither --ablate nor --compare: only plan predicts.")
    if (options.sarif or options.rules) and name != "lint":
        raise ConfigError(f"{name} has neither --sarif nor --rules: only lint has.")
    if options.draw and name != "inspect":
        raise ConfigError(f"{name} has no --draw: only inspect has, of a result of engine=tensorrt or of onnx.")
    if options.target and name != "doctor":
        raise ConfigError(f"{name} has no --target: only doctor looks at a node.")
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
    found: dict[str, Any] = {}
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        option, given, value = word.partition("=")
        if option in FLAGS:
            found[FLAGS[option]] = True
        elif option in VALUES:
            if not (value := value if given else next(rest, "")):
                raise ConfigError(f"{option} needs a value: write {option} VALUE.")
            found[option.lstrip("-").replace("-", "_")] = VALUES[option](value)
        elif word.startswith("-"):
            known = [*FLAGS, "--config-dir DIR", "--keep N", "--compare FILE", "--sarif FILE", "--draw FILE"]
            raise ConfigError(f"There is no option {option}: known are {', '.join(known)} and --help; settings are KEY=VALUE.")
        else:
            overrides.append(word)
    return Options(overrides=overrides, **found)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--keep {text} is not a number of 0 or more: give how many results of each stage to keep.")
    return int(text)


FLAGS = {
    "--json": "as_json", "--cfg": "show_config", "--dry-run": "dry_run", "--ablate": "ablate", "--rules": "rules",
    "--target": "target",
}  # fmt: skip
VALUES: dict[str, Callable[[str], Any]] = {
    "--config-dir": Path, "--keep": _count, "--compare": Path, "--sarif": Path, "--draw": Path,
}  # fmt: skip


def _usage() -> str:
    return USAGE.format(commands="\n".join(f"  {name:9}{command.summary}" for name, command in COMMANDS.items()))


def _command_help(name: str) -> str:
    from pipeline.config.load import choices, prefix
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
            *(f"  {prefix(group)}=  {', '.join(choices(group))}" for group in groups),
        ]
        lines += ["", "Every key and its default: --cfg."]
    return "\n".join(lines)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
