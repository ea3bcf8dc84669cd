"""Reads the rendered launchers back and compares them with the bundle that they start.

Nothing here knows what the launchers were rendered from: world sizes come from the LLM-args files themselves, everything
else from the text of the launchers. aiconfigurator 0.12 asked for 64 GPUs for a plan of 8 because nothing did this.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.jsonio import read_json
from pipeline.launch.fleet import LOAD_SECONDS
from pipeline.launch.image import contents
from pipeline.launch.script import Files

__all__ = ["Bundle", "bundle_of", "problems"]

CASE = re.compile(
    r"^(?P<name>[\w-]+)\)\n  gpus=(?P<gpus>[\d,]+) ranks=(?P<ranks>\d+) (?P<ports>(?:\w+=\d+ )+)prefix=(?P<prefix>\w+)",
    re.M,
)
START = re.compile(r"^start (?P<name>[\w-]+) (?P<first>\d+) (?P<nodes>\d+) (?P<ranks>\d+)$", re.M)
EXPORT = re.compile(r"^export (\w+)=(.*)$", re.M)
IMAGE = re.compile(r"\w[\w.-]*[/#][\w./-]+:[\w.-]+")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What the engine stage wrote, as far as launchers must agree with it."""

    kind: str
    line: str
    ranks: Mapping[str, int]
    """World size by role, from the role's own LLM arguments."""
    counts: Mapping[str, int]
    environment: Mapping[str, str]
    gpus: Mapping[str, tuple[int, ...]]
    """Instance -> GPU of each rank on its first node, where the plan placed them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One instance as instance.sh has it."""

    gpus: tuple[int, ...]
    ranks: int
    ports: tuple[int, ...]
    """HTTP first."""
    prefix: str


def bundle_of(engine: Path, rows: list[dict[str, Any]], deploy: Mapping[str, Any]) -> Bundle:
    """`rows` are those of `fleet.roles_of`; world sizes are read from the files that they name, placement from deploy.json."""
    described = read_json(engine / "engine.json")
    variables = read_json(engine / "environment.json") if (engine / "environment.json").is_file() else []
    return Bundle(
        kind=described["kind"],
        line=str(described.get("line") or described.get("version") or ""),
        ranks={row["role"]: _world_size(engine / row["llm_args"], row["ranks"]) for row in rows},
        counts={row["role"]: row["count"] for row in rows},
        environment={row["name"]: row["value"] for row in variables},
        gpus=_placed(deploy) if [row["role"] for row in rows] == ["aggregated"] else {},
    )


def problems(files: Files, bundle: Bundle) -> list[str]:
    """A sentence for each place where the launchers disagree with the bundle or with one another."""
    cases = _cases(files["instance.sh"])
    found = [*_instances(cases, bundle), *_environment(files["instance.sh"], bundle), *_images(files, bundle)]
    for name, text in files.items():
        if name.endswith((".sbatch", "run.sh")):
            found += [f"{name}: {said}" for said in _starts(text, cases)]
        if name.endswith("disaggregated.yaml"):
            found += [f"{name}: {said}" for said in _router(yaml.safe_load(text), cases, bundle)]
    if "kubernetes/serve.yaml" in files:
        found += [f"kubernetes/serve.yaml: {said}" for said in _kubernetes(files["kubernetes/serve.yaml"], cases, bundle)]
    if "compose/compose.yaml" in files:
        found += [f"compose/compose.yaml: {said}" for said in _compose(yaml.safe_load(files["compose/compose.yaml"]), cases)]
    return found


def _world_size(llm_args: Path, otherwise: int) -> int:
    if not llm_args.is_file():
        return otherwise
    args = yaml.safe_load(llm_args.read_text(encoding="utf-8"))
    return math.prod(int(args.get(f"{axis}_parallel_size", 1)) for axis in ("tensor", "pipeline", "context", "data"))


def _placed(deploy: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    gpus: dict[str, tuple[int, ...]] = {}
    first = {place["instance"]: place["node"] for place in reversed(deploy.get("placement") or [])}
    for place in deploy.get("placement") or []:
        name = f"aggregated-{place['instance']}"
        if place["node"] == first[place["instance"]]:
            gpus[name] = (*gpus.get(name, ()), place["gpu"])
    return gpus


def _cases(script: str) -> dict[str, Case]:
    return {
        match["name"]: Case(
            tuple(int(gpu) for gpu in match["gpus"].split(",")),
            int(match["ranks"]),
            tuple(map(int, re.findall(r"=(\d+)", match["ports"]))),
            match["prefix"],
        )
        for match in CASE.finditer(script)
    }


def _role(name: str) -> str:
    return name.rpartition("-")[0]


def _instances(cases: Mapping[str, Case], bundle: Bundle) -> Iterator[str]:
    counts = Counter(_role(name) for name in cases)
    for role, count in bundle.counts.items():
        if counts[role] != count:
            yield f"instance.sh has {counts[role]} {role} instances, and engine.json {count}."
    for name, case in cases.items():
        wanted = bundle.ranks.get(_role(name))
        if case.ranks != wanted:
            yield f"instance.sh gives {name} {case.ranks} ranks, and its LLM arguments take {wanted}."
        if (planned := bundle.gpus.get(name, case.gpus)) != case.gpus:
            yield f"instance.sh gives {name} GPUs {case.gpus}, and the plan {planned}."
        if len(set(case.gpus)) != len(case.gpus) or case.ranks % len(case.gpus):
            yield f"instance.sh gives {name} GPUs {case.gpus} for {case.ranks} ranks: one GPU a rank on every node."
    for what, values in (
        ("port", [port for case in cases.values() for port in case.ports]),
        ("shm-region-prefix-name", [case.prefix for case in cases.values()]),
    ):
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            yield f"instance.sh uses the {what} {twice[0]} twice."


def _environment(script: str, bundle: Bundle) -> Iterator[str]:
    exported = {name: value.strip("'\"") for name, value in EXPORT.findall(script)}
    if exported != dict(bundle.environment):
        yield f"instance.sh exports {exported}, and environment.json has {dict(bundle.environment)}."


def _images(files: Files, bundle: Bundle) -> Iterator[str]:
    """One image everywhere, and one that holds the engine."""
    named = {
        (image.replace("#", "/"), name)
        for name, text in files.items()
        for line in text.splitlines()
        if re.match(r"\s*(image[:=]|- image:)", line)
        for image in IMAGE.findall(line)
    }
    images = sorted({image for image, _ in named})
    if len(images) > 1:
        yield f"The launchers start different images: {', '.join(images)}."
    for image in images:
        kind, held = contents(image)
        if kind and (kind != bundle.kind or not f"{held}.".startswith(f"{bundle.line}.")):
            yield f"{image} holds {kind} {held}, and the bundle is written for {bundle.kind} {bundle.line}."


def _starts(text: str, cases: Mapping[str, Case]) -> Iterator[str]:
    """Every instance once, with its ranks, on GPUs that no other takes, on nodes that the job has."""
    rows = {match["name"]: tuple(int(match[key]) for key in ("first", "nodes", "ranks")) for match in START.finditer(text)}
    if rows.keys() != cases.keys():
        yield f"it starts {sorted(rows)}, and the instances are {sorted(cases)}."
        return
    taken = {}
    for name, (first, nodes, ranks) in rows.items():
        if ranks != cases[name].ranks or ranks != nodes * len(cases[name].gpus):
            yield f"it starts {name} with {ranks} ranks on {nodes} nodes, which has {cases[name].ranks} on {cases[name].gpus}."
        taken[name] = {(node, gpu) for node in range(first, first + nodes) for gpu in cases[name].gpus}
    for a, b in combinations(taken, 2):
        if shared := taken[a] & taken[b]:
            yield f"{a} and {b} both take GPU {min(shared)[1]} of node {min(shared)[0]}."
    last = max(first + nodes for first, nodes, _ in rows.values())
    for asked in re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.M):
        if int(asked) != last:
            yield f"the job asks for {asked} nodes, and its servers take {last}."
    for asked in re.findall(r"^#SBATCH --(?:ntasks|gpus)-per-node=(\d+)$", text, re.M):
        if int(asked) < max(len(case.gpus) for case in cases.values()):
            yield f"the job asks for {asked} GPUs a node, fewer than an instance takes there."


def _router(config: Mapping[str, Any], cases: Mapping[str, Case], bundle: Bundle) -> Iterator[str]:
    for role in ("context", "generation"):
        servers = config[f"{role}_servers"]
        urls, count = servers["urls"], bundle.counts.get(role, 0)
        if servers["num_instances"] != count or len(set(urls)) != count:
            yield f"{role}_servers names {len(set(urls))} servers, and engine.json has {count}."
        ports = {case.ports[0] for name, case in cases.items() if _role(name) == role}
        if strange := [url for url in urls if int(url.rpartition(":")[2]) not in ports]:
            yield f"{strange[0]} is no address of a {role} server, whose ports are {sorted(ports)}."


def _kubernetes(text: str, cases: Mapping[str, Case], bundle: Bundle) -> Iterator[str]:
    documents = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(text)}
    seen: Counter[str] = Counter()
    for (kind, name), item in documents.items():
        if kind == "ConfigMap":
            yield from _router(yaml.safe_load(item["data"]["disaggregated.yaml"]), cases, bundle)
        if kind not in ("Deployment", "LeaderWorkerSet") or name.endswith("-router"):
            continue
        template = item["spec"].get("leaderWorkerTemplate") or {"size": 1, "leaderTemplate": item["spec"]["template"]}
        container = template["leaderTemplate"]["spec"]["containers"][0]
        started = next(word for word in container["command"] if word in cases)
        seen[_role(started)] += item["spec"]["replicas"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        if template["size"] * gpus != cases[started].ranks:
            yield f"{name} gives {template['size']} pods of {gpus} GPUs to {started}, which has {cases[started].ranks} ranks."
        yield from (f"{name}: {said}" for said in _pod(container, cases[started]))
    if dict(seen) != dict(bundle.counts):
        yield f"its replicas are {dict(seen)}, and engine.json has {dict(bundle.counts)}."


def _pod(container: Mapping[str, Any], case: Case) -> Iterator[str]:
    ports = {port["containerPort"] for port in container["ports"]}
    if not ports <= set(case.ports):
        yield f"ports {sorted(ports)} are not the server's, {case.ports}."
    start = container["startupProbe"]
    if start["periodSeconds"] * start["failureThreshold"] < LOAD_SECONDS:
        yield f"the start may take {start['periodSeconds'] * start['failureThreshold']} s, and a first load {LOAD_SECONDS}."


def _compose(document: Mapping[str, Any], cases: Mapping[str, Case]) -> Iterator[str]:
    servers = {name: row for name, row in document["services"].items() if name != "router"}
    if servers.keys() != cases.keys():
        yield f"it starts {sorted(servers)}, and the instances are {sorted(cases)}."
    for name, row in servers.items():
        if name not in row["command"]:
            yield f"the service {name} starts {row['command']}."
        published = {int(port.partition(":")[0]) for port in row["ports"]}
        if name in cases and not published <= set(cases[name].ports):
            yield f"{name} publishes {sorted(published)}, and its ports are {cases[name].ports}."
    for a, b in combinations(cases, 2):
        if shared := set(cases[a].gpus) & set(cases[b].gpus):
            yield f"{a} and {b} both take GPU {min(shared)}."
