"""What onnxruntime computes on the CPU beside what torch computed: `python -m pipeline.onnx.check REQUEST`, of `command.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from pipeline.core.events import EventWriter
from pipeline.engines.tensorrt.worker import serve
from pipeline.formats.numerics import Array
from pipeline.onnx import CASES, MODEL

__all__ = ["compare"]


def compare(found: Array, expected: Array) -> dict[str, Any]:
    """Largest difference, and that as a share of the largest finite value expected; nan and inf are met by the same."""
    if found.shape != expected.shape:
        return {"shape": list(found.shape), "expected_shape": list(expected.shape), "max_abs": None, "relative": float("inf")}
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))  # inf - inf is nan
    largest = float(np.abs(np.subtract(found, expected, where=~same, out=np.zeros_like(found))).max(initial=0))
    scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=0))
    return {"shape": list(found.shape), "max_abs": largest, "relative": largest / scale if scale else largest}


def check(request: dict[str, Any], folder: Path, events: EventWriter, stop: list[int]) -> dict[str, Any]:
    """A row for each output of each case."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(folder / MODEL), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base; a type that it has no kernel for is the usual one
        return {"agreement": [], "not_compared": f"onnxruntime {onnxruntime.__version__} does not run it: {_first_line(error)}"}
    rows, known = [], {item.name for item in session.get_inputs()}
    for file in sorted(folder.glob(CASES.format("*"))):
        case = np.load(file)
        feeds = {name[3:]: case[name] for name in case.files if name.startswith("in.") and name[3:] in known}
        expected = [case[name] for name in case.files if name.startswith("out.")]
        for item, found, wanted in zip(session.get_outputs(), session.run(None, feeds), expected, strict=True):
            rows.append({"case": file.stem, "output": item.name, **compare(found, wanted)})
    return {"agreement": rows, "not_compared": None}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:400]


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), {"check": check}))
