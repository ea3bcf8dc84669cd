"""Any torch module to ONNX and TensorRT: `python -m pipeline onnx MODULE:FACTORY out=DIR`, the door for those who bring their own.

FACTORY returns what `torch.export.export` takes: `(module, args)` or `(module, args, dynamic_shapes)`. `export.py` records it and
writes ONNX, `check.py` has onnxruntime compute what torch computed, `engine.py` has TensorRT's parser read it and builds. Each in a
process of its own, so that no two hold the weights at once. `decoder.py` is the example: the decoder of engine=torch.

The native networks of engine=tensorrt are the better engines (quantised weights, ranks, a cache in place); this is for everything
that they do not know.
"""

from __future__ import annotations

from importlib.util import find_spec

from pipeline.core.errors import MissingToolError

__all__ = ["CASES", "ENGINE", "LAYERS", "MODEL", "REPORT", "few", "require"]

MODEL, REPORT, ENGINE, LAYERS = "model.onnx", "engine.json", "model.engine", "model.layers.txt"
CASES = "case{}.npz"
"""Inputs and outputs by name, while they are compared."""
PACKAGES = {"torch": "torch", "onnx": "onnx", "onnxscript": "onnx", "onnxruntime": "onnx"}
"""Module -> the extra that brings it."""


def few(names: list[str]) -> str:
    """The first names, and how many others there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")


def require() -> None:
    """Refuse where a package is missing."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        extras = ",".join(sorted({PACKAGES[name] for name in missing}))
        raise MissingToolError(f"onnx needs {', '.join(missing)}, not installed here: pip install 'r1-pipeline[{extras}]'.")
