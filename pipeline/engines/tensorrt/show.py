"""What `inspect DIR` says of an engine folder: its engines, what they bind, their kernels, how near the reference they are.

With network=NAME also every kernel of that network with the layers that it was made from, and `--draw FILE` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.core.jsonio import read_json, write_atomic
from pipeline.engines.tensorrt.listing import Layer, read
from pipeline.engines.tensorrt.picture.blocks import Picture, picture
from pipeline.engines.tensorrt.picture.dot import dot
from pipeline.engines.tensorrt.picture.svg import svg
from pipeline.engines.tensorrt.plan_file import Launch, kernels, launches, read_header

__all__ = ["View", "draw", "engine_files", "lines", "network_lines", "plain"]

FUSED_ATTENTION = "mha"
MOST_BLOCKS = 60
"""A network of more is drawn with its clusters closed, unless they are asked for."""
WRITERS = {".svg": svg, ".dot": dot}


@dataclass(frozen=True, slots=True)
class View:
    """What `inspect` was asked to look at more closely."""

    network: str | None
    opened: tuple[str, ...]
    """Beginnings of the clusters to open; none: as many as can be read."""

    @classmethod
    def parse(cls, words: list[str], names: Sequence[str]) -> View:
        """`network=NAME` and `open=PREFIX,…`; the first network where none is named."""
        given = dict(word.split("=", 1) for word in words if "=" in word)
        network, opened = given.pop("network", None), given.pop("open", "")
        if given:
            raise ConfigError(f"inspect of engines does not know {', '.join(given)}: it takes network=NAME and open=PREFIX.")
        if network is not None and network not in names:
            raise ConfigError(f"There is no network {network} here: {', '.join(names) or 'the result has no engine'}.")
        return cls(network, tuple(filter(None, opened.split(","))))


def plain(folder: Path) -> dict[str, Any]:
    """engine.json with what can be read from the engine files."""
    info = read_json(folder / "engine.json")
    if info["library"] == "tensorrt_rtx":
        for engine in info["engines"].values():
            header = read_header(folder / engine["file"])
            engine |= {"targets": list(header.targets), "built_by": header.version, "kernels": kernels(folder / engine["file"])}
    return info


def _layers(folder: Path, file: str) -> list[Layer]:
    """The listing beside an engine."""
    text = (folder / file).with_suffix(".layers.txt")
    if not text.is_file():
        raise ConfigError(f"{text} is not there: engines built before networks were listed cannot be drawn. Build again.")
    return read(text.read_text(encoding="utf-8"))


def engine_files(info: dict[str, Any]) -> dict[str, str]:
    """Network -> file of its engine; of a result of `onnx` the one that it may have."""
    if info["kind"] == "onnx":
        return {"model": "model.engine"} if info["engine"] else {}
    return {name: engine["file"] for name, engine in info["engines"].items()}


def draw(folder: Path, engines: Mapping[str, str], view: View, out: Path) -> str:
    """Write the picture; a sentence about it."""
    if not engines:
        raise ConfigError(f"{folder} has no engine, so no network to draw: name targets=[120] when it is made.")
    title = view.network or next(iter(engines))
    if out.suffix not in WRITERS:
        raise ConfigError(f"--draw {out}: the picture is an SVG or Graphviz text, so name it FILE.svg or FILE.dot.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--draw {out}: {out.parent} is no folder; make it first.")
    layers = _layers(folder, engines[title])
    drawn = picture(layers, view.opened) if view.opened else _fitting(layers)
    closed = [block.name for block in drawn.blocks if block.name == block.cluster]
    if view.opened and len(closed) == len(drawn.blocks):
        raise ConfigError(f"open={','.join(view.opened)} begins no cluster of {title}: {', '.join(drawn.clusters)}.")
    write_atomic(out, WRITERS[out.suffix](drawn, title).encode())
    more = f"; open={closed[len(closed) // 2]} shows what is inside" if closed and not view.opened else ""
    return f"{out}: {title}, {len(layers)} layers in {len(drawn.blocks)} boxes{more}"


def _fitting(layers: list[Layer]) -> Picture:
    """Everything open where that can be read."""
    closed = picture(layers)
    drawn = picture(layers, closed.clusters)
    return drawn if len(drawn.blocks) <= MOST_BLOCKS else closed


def network_lines(file: Path) -> Iterator[str]:
    """Every kernel of an engine, in its order."""
    for launch in launches(file):
        yield f"  {launch.kernel[:56]:56}  {_made_from(launch)}".rstrip()


def _made_from(launch: Launch) -> str:
    """The layers by their scopes."""
    scopes: dict[str, list[str]] = {}
    for name in launch.layers:
        scope, _, leaf = name.rpartition(".")
        scopes.setdefault(scope, []).append(leaf)
    told = []
    for scope, leaves in scopes.items():
        more = f" +{len(leaves) - 3}" if len(leaves) > 3 else ""
        told.append(f"{scope}: {' '.join(leaves[:3])}{more}" if scope else " ".join(leaves[:3]) + more)
    return "; ".join(told)


def lines(info: dict[str, Any]) -> Iterator[str]:
    """For a person."""
    ranks = f", {info['ranks']} ranks ({info['parallel']})" if info["ranks"] > 1 else ""
    yield f"{info['library']} {info['version']} for {', '.join(info['targets'])}, {info['dtype']}{ranks}, weights {info['weights']}"
    for name, how in info["computed_as"].items():
        yield f"  {name}: {how}"
    for name, engine in info["engines"].items():
        yield f"{name}: {engine['layers']} layers, {engine['bytes'] / 1e6:,.1f} MB, network {engine['network'][:12]}"
        yield from _kernels(engine.get("kernels", {}))
        yield from _plugins(engine.get("plugins"))
        sizes = f"rows {engine['max_batch']}, tokens a row {engine['max_tokens']}, cache {engine['max_seq_len']}"
        yield f"  {sizes}, moe {engine['moe']}"
        if sent := engine.get("sent_bytes_per_token"):
            way = f"exchange {engine['exchange']}, tokens in {engine['gather']}" if engine["parallel"] == "adp" else "all-reduce"
            yield f"  {way}: {sent:,} bytes a token to other ranks"
        yield f"  in   {_bindings(engine['inputs'])}"
        yield f"  out  {_bindings(engine['outputs'])}"
    yield from _agreement(info)
    yield info["not_run"]


def _kernels(found: dict[str, int]) -> Iterator[str]:
    if found:
        fused = sum(count for kernel, count in found.items() if FUSED_ATTENTION in kernel)
        yield f"  {sum(found.values())} kernels of {len(found)} kinds, {fused} of them fused attention"


def _plugins(found: dict[str, Any] | None) -> Iterator[str]:
    """Which of ours stand for native layers, and why others do not."""
    if found:
        used = (f"{name} x{facts['layers']}" + " (by the host)" * (name in found["host"]) for name, facts in found["used"].items())
        yield f"  plugins for SM{found['sm']}: {', '.join(used) or 'none'}"
        yield from (f"  native instead of {name}: {why}" for name, why in found["native"].items())


def _bindings(tensors: dict[str, Any]) -> str:
    """Name, type and shape; caches and weights are counted."""
    few = {name: facts for name, facts in tensors.items() if not name.startswith(("cache.", "present.", "model.", "lm_head."))}
    told = [f"{name} {facts['dtype']}{facts['shape']}" for name, facts in few.items()]
    caches = sum(name.startswith(("cache.", "present.")) for name in tensors)
    weights = len(tensors) - len(few) - caches
    return ", ".join([*told, f"{caches} cache{'s' if caches != 1 else ''}", *([f"{weights} weights"] if weights else [])])


def _agreement(info: dict[str, Any]) -> Iterator[str]:
    if info["not_compared"]:
        yield f"not compared with the reference: {info['not_compared']}"
        return
    yield f"{'against the reference, interpreted':38} {'activations':11} {'tokens':>6} {'mean KL':>8} {'top-1':>7} {'largest':>8}"
    for row in info["agreement"]:
        figures = f"{row['tokens']:6} {row['mean_kl']:8.1e} {row['top1']:7.1%} {row['max_abs']:8.1e}"
        yield f"{row['what']:38} {row['activations']:11} {figures}"
