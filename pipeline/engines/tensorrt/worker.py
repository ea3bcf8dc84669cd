"""One task in a process of its own: `python -m pipeline.engines.tensorrt.worker REQUEST`, events as JSON lines on stdout.

REQUEST is a JSON file: the checkpoint's folder, the library, and a task. `build` makes engines, `weights` writes the weights of
one rank for engines that take them as inputs. Everything is read and written in the folder of REQUEST. TensorRT writes to stderr
past every logger; the parent keeps that in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.checkpoint import Checkpoint
from pipeline.core.errors import PipelineError
from pipeline.core.events import EventWriter
from pipeline.engines.tensorrt.builder import build, describe
from pipeline.engines.tensorrt.graph import Graph
from pipeline.engines.tensorrt.library import load
from pipeline.engines.tensorrt.listing import listing
from pipeline.engines.tensorrt.network.decoder import define
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.plugins import Plugins
from pipeline.engines.tensorrt.weights import Weights

__all__ = ["main", "network", "peak_bytes", "serve"]

WEIGHTS = "weights.safetensors"
"""What `weights` leaves there; `build` leaves NAME.engine and NAME.layers.txt. The caller puts it all in place."""
INTERRUPTED = 130
Task = Callable[[dict[str, Any], Path, EventWriter, list[int]], dict[str, Any]]
"""Request, its folder, where to tell how far it is, and a list that a signal to stop is put into -> the `done` event."""


def network(
    checkpoint: Checkpoint, library: str, table: dict[str, Any], scratch: Path, *, external: bool = False, values: bool = True
) -> tuple[Graph, Weights]:
    """The network of a `Spec.plain()` table, with its weights. With `external` ones alike segments give the same network."""
    spec = Spec(arch=checkpoint.arch, **table)
    net = Graph(load(library), external_weights=external, first_layer=spec.first_layer if external else 0)
    net.plugins = Plugins(spec.plugins_for, host=spec.host_plugins) if spec.plugins_for else None
    weights = Weights(checkpoint, scratch, spec.dtype, values=values)
    define(net, spec, weights)
    return net, weights


def _build(request: dict[str, Any], folder: Path, events: EventWriter, stop: list[int]) -> dict[str, Any]:
    """Engines by name. Alike networks whose weights are inputs share the first one's, which `engine` names; one that `earlier`
    has (network -> file) is linked, not built."""
    checkpoint, inputs = Checkpoint.open(folder / request["checkpoint"]), request["weights"] == "inputs"
    known: dict[str, str] = {}
    built = {}
    for name, table in request["specs"].items():
        started = time.monotonic()
        net, weights = network(checkpoint, request["library"], table, folder, external=inputs, values=not inputs)
        facts = describe(net) | {
            "formats": dict(sorted(weights.used.items())),
            "dequantized": dict(sorted(weights.dequantized.items())),
        }
        engine = known.setdefault(facts["network"], name) if inputs else name
        path = folder / f"{engine}.engine"
        earlier = request.get("earlier", {}).get(facts["network"]) if engine == name else None
        if earlier:
            os.link(earlier, path)
            events.advance(100)
        elif engine == name:
            build(
                net, request["library"], request["targets"], path, refit=request["weights"] == "refit", advance=events.advance,
                stopped=lambda: bool(stop),
            )  # fmt: skip
        else:
            events.advance(100)
        if engine == name:
            (folder / f"{name}.layers.txt").write_text(listing(net), encoding="utf-8")
        facts |= {"bytes": path.stat().st_size}
        built[name] = {
            "facts": facts,
            "engine": engine,
            "reused": bool(earlier),
            "seconds": time.monotonic() - started,
            "peak_bytes": peak_bytes(),
        }
    return {"built": built}


def peak_bytes() -> int:
    """The most memory that this process had, pages of mapped files included. (`ru_maxrss` would begin with the parent's.)"""
    with contextlib.suppress(OSError, IndexError):
        return 1024 * int(Path("/proc/self/status").read_text(encoding="ascii").split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _write_weights(request: dict[str, Any], folder: Path, events: EventWriter, stop: list[int]) -> dict[str, Any]:
    """The union of what the rank's networks want, each weight once."""
    from pipeline.checkpoint import ShardWriter
    from pipeline.checkpoint.reader import DTYPES

    checkpoint, found = Checkpoint.open(folder / request["checkpoint"]), {}
    names = {dtype: name for name, dtype in DTYPES.items()}
    for table in request["specs"]:
        net, _ = network(checkpoint, request["library"], table, folder, external=True)
        assert net.external is not None
        found |= net.external
    plan = [(name, names[value.dtype], value.shape) for name, value in sorted(found.items())]
    with ShardWriter(folder / WEIGHTS, plan) as writer:
        for name, value in sorted(found.items()):
            writer.write(name, value)
    return {"facts": {"tensors": len(found), "bytes": sum(value.nbytes for value in found.values())}}


TASKS = {"build": _build, "weights": _write_weights}


def main(request_file: Path) -> int:
    """Do one of the tasks here."""
    return serve(request_file, TASKS)


def serve(request_file: Path, tasks: dict[str, Task]) -> int:
    """Do the task that the file names; exit code 3 after an `error` event, 130 after a signal. What others print goes to stderr."""
    request, stop = json.loads(request_file.read_text(encoding="utf-8")), []
    events = EventWriter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    try:
        events.send(event="done", **tasks[request["task"]](request, request_file.parent, events, stop))
    except PipelineError as error:
        events.send(event="error", text=str(error))
        return 3
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
