"""TensorRT's ONNX parser and builder on model.onnx: `python -m pipeline.onnx.engine REQUEST`, run by `command.py`."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.core.errors import StageError
from pipeline.core.events import EventWriter
from pipeline.engines.tensorrt.builder import build, describe
from pipeline.engines.tensorrt.definition import Definition
from pipeline.engines.tensorrt.library import load
from pipeline.engines.tensorrt.listing import listing
from pipeline.engines.tensorrt.worker import peak_bytes, serve
from pipeline.onnx import ENGINE, LAYERS, MODEL, few

__all__ = ["Parsed", "make"]


class Parsed(Definition):
    """A network that TensorRT's parser made."""

    def __init__(self, trt: ModuleType, model: Path) -> None:
        self._model = model
        super().__init__(trt)
        if not self._parser.parse_from_file(str(model)):
            raise StageError(self._refusal())

    def _new_network(self) -> Any:
        """The parser comes first: one that finds a recorder ends the process when it dies (1.7.1)."""
        network = self.builder.create_network(0)
        self._parser = self.trt.OnnxParser(network, self.logger)
        self.builder.error_recorder = network.error_recorder = self.recorder
        return network

    def _refusal(self) -> str:
        """Operators that the parser does not have, with their nodes; else what it said of the first node."""
        import onnx

        unknown: defaultdict[str, list[str]] = defaultdict(list)
        for node in onnx.load(self._model, load_external_data=False).graph.node:
            if not self._parser.supports_operator(node.op_type):
                unknown[node.op_type].append(node.name)
        if unknown:
            told = (f"{kind} ({few(names)})" for kind, names in sorted(unknown.items()))
            return f"TensorRT's ONNX parser does not have {', '.join(told)}: compute it with other operators."
        error = self._parser.get_error(0)
        place = f"{error.node_name()} ({error.node_operator()})"
        return f"TensorRT's ONNX parser refuses {place}: {' '.join(error.desc().split())[:600]}"


def make(request: dict[str, Any], folder: Path, events: EventWriter, stop: list[int]) -> dict[str, Any]:
    """Write the engine and the list of its layers; say what has to be bound."""
    net = Parsed(load(request["library"]), folder / MODEL)
    net.ranges = {name: shapes for name, shapes in request["ranges"].items() if shapes[0] != shapes[2]}
    (folder / LAYERS).write_text(listing(net), encoding="utf-8")
    build(
        net, request["library"], request["targets"], folder / ENGINE, refit=False, advance=events.advance,
        stopped=lambda: bool(stop),
    )  # fmt: skip
    return {"facts": describe(net) | {"bytes": (folder / ENGINE).stat().st_size}, "peak_bytes": peak_bytes()}


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), {"engine": make}))
