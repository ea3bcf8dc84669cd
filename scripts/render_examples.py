"""Write conf/deployment/*.md: what each preset renders, every line explained.

    python scripts/render_examples.py [--check]

Each preset is planned, and the stages `engine` and `package` run on the plan, as they do in a build, with a checkpoint that
holds a config.json and no weights. Explanations are data: `pipeline/engines/trtllm/explained.yaml` for LLM arguments,
`pipeline/launch/explained.yaml` for launchers; a key without one is an error. Scripts carry theirs as comments. `--check`
writes nothing and exits with 1 where a file is not what would be written; a test does the same.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config.load import choices, load  # noqa: E402
from pipeline.config.schema import Config  # noqa: E402
from pipeline.core.jsonio import write_json  # noqa: E402
from pipeline.core.stage import StageContext  # noqa: E402
from pipeline.engines.trtllm.build import build  # noqa: E402
from pipeline.planner.plan import make_plan  # noqa: E402
from pipeline.stages import package  # noqa: E402

__all__ = ["document", "documents", "explained", "main", "stage_outputs", "table"]

FOLDER = ROOT / "conf" / "deployment"
COLUMN = 56
"""Where explanations start, if the line is shorter."""
LINE = re.compile(r"^(?P<indent> *)(?P<dash>(?:- )*)(?:(?P<key>[\w.*/-]+|'[^']+')(?:: (?P<value>.*)|:$| \{$)|.*)$")
PODS = re.compile(r"^spec\.(?:template|leaderWorkerTemplate\.(?:leader|worker)Template)\.")
SHOWN = ("repository/*/config.pbtxt", "repository/*/1/model.yaml", "instances/*/llm_args.yaml", "launch/instance.sh", "launch/*/*")
KINDS = {"serve.yaml": "kubernetes", "compose.yaml": "compose", "disaggregated.yaml": "router", "config.pbtxt": "pbtxt"}
"""File -> table of explanations; other YAML files are LLM arguments."""
Stack = list[tuple[int, str]]
"""The keys above a line, with their indentation."""


class Silent:
    """A `Progress` that nobody watches."""

    def start(self, total: int, unit: str) -> None: ...

    def advance(self, amount: int = 1) -> None: ...

    def note(self, text: str) -> None: ...


def main(arguments: list[str]) -> int:
    """Write, or compare with --check."""
    stale = []
    for name, text in documents().items():
        file = FOLDER / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(file.relative_to(ROOT).as_posix())
            if "--check" not in arguments:
                file.write_text(text, encoding="utf-8")
    verb = "differ from a fresh rendering" if "--check" in arguments else "written"
    print(f"{', '.join(stale)} {verb}" if stale else "nothing has changed")
    return 1 if stale and "--check" in arguments else 0


def documents() -> dict[str, str]:
    """File name -> text, of every preset and their index."""
    texts = {"README.md": _index()}
    for name in choices("deployment"):
        with tempfile.TemporaryDirectory() as scratch:
            texts[f"{name}.md"] = document(name, stage_outputs(load([f"+deployment={name}"]), Path(scratch)))
    return texts


def document(name: str, out: Path) -> str:
    """One preset, whose package is `out`, as Markdown."""
    lines = [
        f"# {name}", "", _about(name), "",
        f"`python -m pipeline plan +deployment={name}` says why each value was chosen;",
        f"`python -m pipeline build +deployment={name} checkpoint=FOLDER` writes these files",
        "beside the converted weights. Rendered by `scripts/render_examples.py` from the plan, without weights; not run on this",
        "hardware. A key is explained where it first stands in a file.", "",
    ]  # fmt: skip
    for file in (file for pattern in SHOWN for file in sorted(out.glob(pattern)) if file.is_file()):
        lines += _section(file.relative_to(out).as_posix(), file.read_text(encoding="utf-8"))
    return "\n".join(lines)


def stage_outputs(config: Config, scratch: Path) -> Path:
    """The package of a plan, by the stages themselves, over a checkpoint without weights."""
    plan, convert, engine, out = (scratch / name for name in ("plan", "convert", "engine", "package"))
    for folder in (plan, convert, engine, out):
        folder.mkdir(parents=True)
    write_json(plan / "deploy.json", make_plan(config, config.model.hf).deploy)
    write_json(convert / "config.json", config.model.hf)
    stages = ((build, {"plan": plan, "convert": convert}, engine), (package.run, {"plan": plan, "engine": engine}, out))
    for run, inputs, target in stages:
        run(StageContext(config=config, inputs=inputs, checkpoint=None, out=target, progress=Silent()))
    return out


def _section(name: str, text: str) -> list[str]:
    file = Path(name)
    if file.suffix not in (".yaml", ".pbtxt"):
        return [f"## {name}", "", "```bash" if file.suffix in (".sh", ".sbatch") else "```text", text.rstrip("\n"), "```", ""]
    return [f"## {name}", "", f"```{file.suffix[1:]}", explained(text, KINDS.get(file.name, "arguments")).rstrip("\n"), "```", ""]


def _about(name: str) -> str:
    """The comment of the preset's file."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("# ") for line in lines[1:] if line.startswith("# ")]
    return "\n".join(comment).removeprefix("schema: Config. ")


def _index() -> str:
    rows = [f"| [{name}]({name}.md) | {' '.join(_about(name).split())} |" for name in choices("deployment")]
    return "\n".join([
        "# Deployments", "", "Presets: `+deployment=NAME` brings hardware, model, precision and load; what stands after it on the",
        "command line wins. Beside each file what it renders, every line explained.", "", "| preset | |", "|---|---|", *rows, "",
    ])  # fmt: skip


# --- explanations ------------------------------------------------------------------------------------------------


@cache
def table(kind: str) -> Mapping[str, str]:
    """Path -> explanation, of `kubernetes`, `compose`, `router`, `pbtxt` or `arguments`."""
    folder = "engines/trtllm" if kind == "arguments" else "launch"
    found = yaml.safe_load((ROOT / "pipeline" / folder / "explained.yaml").read_text(encoding="utf-8"))
    rows: Mapping[str, str] = found if kind == "arguments" else found[kind]
    return rows


def explained(text: str, kind: str) -> str:
    """The text with `# explanation` behind each key where it first stands; KeyError for a key that has none."""
    said: set[tuple[str, str]] = set()
    lines = []
    for line, where, path in _keys(text, kind):
        if path and (where, path) not in said:
            said.add((where, path))
            line = f"{line:{COLUMN}}  # {_said(where, path)}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _said(kind: str, path: str) -> str:
    """The router repeats LLM arguments of its servers."""
    argument = path.partition("_servers.")[2]
    repeated = kind == "router" and argument and path not in table(kind)
    return table("arguments")[argument] if repeated else table(kind)[path]


def _keys(text: str, kind: str) -> Iterator[tuple[str, str, str]]:
    """(line, its table, its key's path or ""); a literal text inside is the router's file."""
    stack, inner, literal = [], [], None
    for line in text.splitlines():
        match = LINE.match(line)
        assert match is not None
        indent = len(match["indent"])
        if literal is not None and indent > literal:
            yield line, "router", _path(inner, match, indent)
            continue
        literal = None
        if line == "---":
            stack = []
        path = _path(stack, match, indent)
        if match["value"] in ("|", "|-"):
            literal, inner = indent, []
        yield line, kind, _name(path, kind)


def _path(stack: Stack, match: re.Match[str], indent: int) -> str:
    """Path of the key on a line; keeps `stack`."""
    while match["dash"] and stack and stack[-1][0] > indent:
        stack.pop()
    if match["key"] is None:
        return ""
    at = indent + len(match["dash"])
    while stack and stack[-1][0] >= at:
        stack.pop()
    stack.append((at, match["key"].strip("'")))
    return ".".join(key for _, key in stack)


def _name(path: str, kind: str) -> str:
    """As the table has it: pods wherever they stand, services without their names."""
    if kind == "kubernetes":
        return PODS.sub("pod.", path)
    if kind == "compose":
        return re.sub(r"(depends_on)\.[^.]+", r"\1.*", re.sub(r"^services\.[^.]+", "services.*", path))
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
