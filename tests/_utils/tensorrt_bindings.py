"""TensorRT's wheel of Python bindings without TensorRT: it needs nine C functions, for which libraries are made here."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.engines.torch.toolchain import cxx

__all__ = ["stand_ins"]

FUNCTIONS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL", "getBuilderPluginRegistry",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getNvOnnxParserVersion", "getPluginRegistry",
    "initLibNvInferPlugins",
)  # fmt: skip


def stand_ins(folder: Path) -> str:
    """A folder for LD_LIBRARY_PATH with which `tensorrt_bindings` can be imported; skips the test where that cannot be."""
    if not find_spec("tensorrt_bindings"):
        pytest.skip("the bindings of TensorRT 11.4 are not installed: pip install tensorrt-cu13-bindings==11.4.0.106")
    if not cxx()[0]:
        pytest.skip("no C++ compiler makes the stand-ins for TensorRT's libraries")
    (folder / "stub.cpp").write_text('extern "C" {' + "".join(f"void* {name}() {{ return 0; }}" for name in FUNCTIONS) + "}")
    for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        command = [cxx()[0], "-shared", "-fPIC", "-o", f"lib{name}.so.11", "stub.cpp"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return str(folder)
